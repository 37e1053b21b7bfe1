"""The kernels of a model that is spread over several cards of one host.

exchange.py   calls of cuda/exchange.cu: sums over the ranks, ids from rank 0, logits to it
links.py      which cards reach each other, and how
ops.py        the ops of one rank
"""
