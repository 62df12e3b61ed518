"""The position in the training data: `ElasticSampler` and `ElasticStream`."""

from ckpt.data.sampler import ElasticSampler
from ckpt.data.stream import ElasticStream

__all__ = ["ElasticSampler", "ElasticStream"]
