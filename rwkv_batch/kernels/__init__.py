"""Our kernels behind the names of the reference operations."""
