"""RWKV-7: the forward pass, its reference operations, states, weights and their files."""
