"""What differs on AMD GPUs: products through torch instead of kernels of ours."""
