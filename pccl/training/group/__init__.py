"""The peers that train together: who is there, and what they exchange besides averages.

Modules:

    membership  joining, admitting newcomers, averaging until it succeeds
    roll_call   what each peer tells the others when it joins
    site        `Site`: a model in shards, a grid of sites and ranks
    relaunch    a collective that is launched again after losses
    seats       numbers that peers keep, and an exchange of bytes under them
    veto        an exchange in which any peer can refuse a step for all
    weights     the weight of a peer's part in an average
    followers   objects that are told what becomes of each step
    report      what a step returns
"""
