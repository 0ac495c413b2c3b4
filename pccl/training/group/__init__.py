"""The group of peers that train together.

Modules:

    membership     joining, admitting newcomers, bringing them up
    configuration  the configuration check: peers compare their options when they join
    relaunch       a collective that is launched again after losses
    site           `Site`: a model in shards, a grid of sites and ranks
"""
