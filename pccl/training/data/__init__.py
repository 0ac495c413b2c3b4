"""Samples and random numbers for each peer of a group that changes."""

from pccl.training.data.elastic_sampler import ElasticSampler
from pccl.training.data.stream import RandomStreams

__all__ = ["ElasticSampler", "RandomStreams"]
