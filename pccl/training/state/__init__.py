"""The training state: what peers replicate and compare, and its files.

replicated_state  the state that all peers have in common, and what newcomers are sent
digests           digests of that state, compared while peers train; `DivergenceError`
buffers           running statistics and other buffers: averaged, taken from the first peer, or local
replica           a model as one flat vector; a rank's shards
torch_state       the tensors of a torch module and optimizer, read and written in place
codec             the state of any object in canonical bytes, without pickle
tensor_file       a file of named tensors
checkpoint        `save` and `load` of the training classes
"""
