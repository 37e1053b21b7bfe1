"""One engine over several devices, with `--tp`: each has a shard of the model, all work on the same rows.

build.py    puts it together
decode.py   its decode steps as CUDA graphs
"""
