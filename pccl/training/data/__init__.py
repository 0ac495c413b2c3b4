"""Samples and random numbers for each peer of a group that changes.

Modules:

    elastic_sampler  `ElasticSampler`: each sample of an epoch once
    sample_ledger    which positions of the stream are used, the same on all peers
    stream           the order of the samples, and how free positions are assigned to peers
    sample_log       the samples that a peer has trained on, in a file
    random_streams   `RandomStreams`: random numbers by peer and step
"""

from pccl.training.data.elastic_sampler import ElasticSampler
from pccl.training.data.random_streams import RandomStreams

__all__ = ["ElasticSampler", "RandomStreams"]
