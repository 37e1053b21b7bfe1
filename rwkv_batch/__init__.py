"""Batch inference for RWKV-7: weights, one forward, two loops, one step."""

__version__ = "0.1.0"
