"""Samples and random numbers for each peer of a group that changes.

Modules:

    elastic_sampler  `ElasticSampler`: each sample of an epoch once
    sample_ledger    which positions of the stream are used, the same on all peers; a peer's log of its samples
    stream           the order of the samples, how free positions are assigned to peers; `RandomStreams`
"""

from pccl.training.data.elastic_sampler import ElasticSampler
from pccl.training.data.stream import RandomStreams

__all__ = ["ElasticSampler", "RandomStreams"]
