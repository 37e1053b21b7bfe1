"""A checkpoint's architecture decides which model runs it."""

import sys
from types import ModuleType

import pytest
from models import TINY, random_weights

from rwkv_batch.engine import build
from rwkv_batch.errors import CheckpointError
from rwkv_batch.model import architectures, reference_ops
from rwkv_batch.model.architectures import architecture_of, model_class
from rwkv_batch.model.rwkv7 import Model


def test_published_checkpoints_are_told_apart():
    assert architecture_of(["emb.weight", "blocks.0.att.r_k"], "m") == "RWKV-7"
    for mark, architecture in list(architectures.MARKS.items())[1:]:
        with pytest.raises(CheckpointError, match=f"m: an {architecture} checkpoint; what runs here: RWKV-7"):
            architecture_of(["emb.weight", f"blocks.0{mark}", "blocks.0.att.time_decay"], "m")


def test_a_second_architecture_needs_a_module_and_a_line(monkeypatch):
    other = ModuleType("rwkv_batch.model.rwkv6")
    other.Model = type("Model", (Model,), {})
    monkeypatch.setitem(sys.modules, other.__name__, other)
    monkeypatch.setitem(architectures.RUNNABLE, "RWKV-6", other.__name__)
    assert architecture_of(["blocks.0.att.time_maa_x"], "m") == "RWKV-6"
    assert model_class("RWKV-6") is other.Model
    weights = random_weights(TINY)
    assert type(build.model_of(weights, reference_ops, "reference")) is Model
    monkeypatch.setattr(weights, "architecture", "RWKV-6")
    assert type(build.model_of(weights, reference_ops, "reference")) is other.Model
