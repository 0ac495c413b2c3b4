"""The model as the other folders see it: parameters as one flat vector, the tensors in use, a rank's shards.

Modules:

    replica           a model as one flat vector: a torch module, or NumPy arrays
    held_tensors      the tensors of a module and its optimizer, and whether they still are the ones in use
    shards            this rank's part of a distributed tensor
    torch_arithmetic  torch's operations in the default floating-point environment
"""
