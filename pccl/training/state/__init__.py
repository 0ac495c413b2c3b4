"""Training state as bytes: in canonical form, in files, and back into the tensors in use.

Modules:

    codec         the state of any object in canonical bytes, without pickle
    tensor_file   a file of tensors that is whole or not there
    tensor_tree   a state taken apart into tensors and the rest
    torch_state   the values of a torch module and optimizer, in their places
    checkpoint    one format for all training classes, written in the background, of which the newest are kept
    checkpointed  `save` and `load` of the training classes, of ranks of a site together
"""
