"""A checkpoint's architecture decides which model runs it."""

import pytest
import torch
from models import TINY, random_weights
from rwkv6_models import random_tensors6

from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.errors import CheckpointError, UsageError
from rwkv_batch.model import reference_ops, weights
from rwkv_batch.model.architectures import model_class
from rwkv_batch.model.rwkv6 import forward as rwkv6
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.served import architectures
from rwkv_batch.served.architectures import architecture_of


def test_published_checkpoints_are_told_apart():
    assert architecture_of(["emb.weight", "blocks.0.att.r_k"], "m") == "RWKV-7"
    assert architecture_of(random_tensors6(), "m") == "RWKV-6"
    for mark, architecture in list(architectures.MARKS.items())[2:]:
        with pytest.raises(CheckpointError, match=f"m: an {architecture} checkpoint; what runs here: RWKV-7, RWKV-6"):
            architecture_of(["emb.weight", f"blocks.0{mark}", "blocks.0.att.time_decay"], "m")
    x052 = ["blocks.0.att.time_mix_k", "blocks.0.att.time_mix_g", "blocks.0.att.time_faaaa", "blocks.0.att.gate.weight"]
    with pytest.raises(CheckpointError, match="m: an RWKV-5 checkpoint"):
        architecture_of(x052, "m")


def test_each_architecture_has_its_model():
    assert {name: model_class(name) for name in architectures.RUNNABLE} == {"RWKV-7": Model, "RWKV-6": rwkv6.Model}
    assert type(build.model_of(random_weights(TINY), reference_ops, "reference")) is Model
    assert type(build.model_of(weights.from_tensors(dict(random_tensors6())), reference_ops, "reference")) is rwkv6.Model


def test_what_cannot_be_compiled_says_so():
    for settings in ({"ops": "compile"}, {"compile": "default"}):
        for device in (torch.device("cuda", 0), torch.device("cpu")):
            with pytest.raises(UsageError, match=r"--(ops|compile) \w+: RWKV-6 cannot be compiled"):
                build.find_kernels(Config(**settings), device, "RWKV-6")
