"""RWKV-6's forward pass on kernels."""
