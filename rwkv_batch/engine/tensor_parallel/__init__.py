"""One engine over several devices, with `--tp`: each has a shard of the model, all work on the same rows.

build.py    puts it together
graphs.py   its steps as CUDA graphs
"""
