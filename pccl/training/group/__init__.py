"""The group of peers that train together.

Modules:

    membership  joining, the configuration check, admitting newcomers
    relaunch    a collective that is launched again after losses
    site        `Site`: a model in shards, a grid of sites and ranks
"""
