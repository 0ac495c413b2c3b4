"""The training state: the replicated part, its comparison, and its files.

Modules:

    replicated_state  the state that all peers have in common, and what newcomers are sent
    digests           digests of that state, compared while peers train; `DivergenceError`
    buffers           running statistics and other buffers: averaged, taken from the first peer, or local
    replica           a model as one flat vector; a rank's shards; torch in the default floating-point environment
    torch_state       the tensors of a torch module and optimizer, read and written in place
    codec             the state of any object in canonical bytes, without pickle
    tensor_file       a file of tensors, whole or absent; a state split into tensors and the rest
    checkpoint        `save` and `load` of the training classes; retention and background writes
"""
