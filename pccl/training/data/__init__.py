"""Which peer trains on which samples, and with which random numbers, whoever comes and goes.

Modules:

    elastic_sampler  `ElasticSampler`: each sample of an epoch once; it stands on
        permutation    an order that is computed and never stored
        deal           who gets which positions of an endless stream
        sample_ledger  which of them are used, the same on all peers
        sample_log     what a peer has trained on, in a file (`pccl.tools.audit` reads it)
    random_streams   `RandomStreams`: random numbers by peer and step
"""

from pccl.training.data.elastic_sampler import ElasticSampler
from pccl.training.data.random_streams import RandomStreams

__all__ = ["ElasticSampler", "RandomStreams"]
