"""The state that all peers of a run have in common: how newcomers get it, and how peers find out that it differs.

Modules:

    contract  which objects and options peers have in common, and what newcomers are sent
    digests   digests of the state, compared while peers train; `DivergenceError`
    buffers   running statistics and other buffers: averaged, taken from the first peer, or local
"""
