"""Compressors of pseudo-gradients, for `DiLoCo(compression=...)`: what the engine's quantization does not do itself.

Each peer encodes its vector into bytes, an all-gather carries the bytes, and each peer decodes all of them and adds
them up in float32, by rank. With `Owners`, each peer does so for a part of the vector, and encodes the mean again.
*Error feedback* (Karimireddy et al. 2019, arXiv:1901.09847): a peer keeps what its encoding has lost, times `decay`,
and adds it to the vector of the next step. The residual belongs to one object on one peer: it is discarded when the
peers of the average change, and is not in checkpoints.

Decoding uses only integers (also in zlib), NumPy's elementwise float32 operations, tables of exact values, and a fixed
order, so that equal bytes give equal vectors on all processors. Encoding need not be reproducible.
"""

from pccl.training.compression.averages import ARCTopK, OneBitAdam, Sketch
from pccl.training.compression.compressor import Compressor, Floats, Owners, Shapes
from pccl.training.compression.matrices import DCTTopK, PowerSGD
from pccl.training.compression.quantizers import Entropy, Sign
from pccl.training.compression.sparse import DGC, PerLayer, RandomK, TopK

__all__ = [
    "DGC",
    "ARCTopK",
    "Compressor",
    "DCTTopK",
    "Entropy",
    "Floats",
    "OneBitAdam",
    "Owners",
    "PerLayer",
    "PowerSGD",
    "RandomK",
    "Shapes",
    "Sign",
    "Sketch",
    "TopK",
]
