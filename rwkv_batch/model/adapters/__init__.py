"""Small changes of a model's matrices that were trained beside it: LoRA and its kin.

changes.py        what each kind makes of a matrix
adapter.py        a set of them, and how it fits a model
adapter_file.py   the files that hold them; `hf_peft.py`: those of that library
"""
