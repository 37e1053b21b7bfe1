"""RWKV-6 ("Finch", x060): Peng et al., "Eagle and Finch" (2024). Plain torch on every device; there are no kernels for it."""
