"""One model spread over several devices, a shard on each: heads, feed-forward units and tokens of the head are dealt out.

shard.py      which part of each tensor is whose
state.py      the state of all ranks, with the face of one
exchange.py   what ranks tell each other within a step
forward.py    the forward pass of all of them
"""
