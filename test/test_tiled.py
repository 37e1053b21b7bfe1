"""The copy of the large matrices for steps of few rows: its order, its bytes, who reads it, when there is room for one."""

import itertools
import logging

import pytest
import torch
from kernel_recorder import make_launcher

from rwkv_batch.config import Config
from rwkv_batch.engine import memory
from rwkv_batch.kernels import self_check, tiled
from rwkv_batch.kernels.gemm import TileConfig
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.variants import LoraPlacement, Method, Variant
from rwkv_batch.model.packed_rows import CapturedRows
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import ModelShape

SHAPE = ModelShape(32, 4096, 16384, 65536, 128, 128, 96, 480)
BYTES = 2 * (32 * (4 * 4096**2 + 2 * 4096 * 16384) + 65536 * 4096)
PRODUCTS = ("rkv", "output", "ffn_key", "ffn_value", "head")


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (3, 128, 64), (2, 64, 192)])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_value_is_where_the_kernel_looks_for_it(dims, transposed):
    """By the kernel's own rule: pieces of 64 rows and values, rows of 128 bytes in the copy engine's swizzle."""
    K = dims[-1]
    weight = torch.randperm(torch.Size(dims).numel()).remainder(2048).half().view(dims)  # fp16 holds these exactly
    given = weight.mT.contiguous().mT if transposed else weight
    found = tiled.tiles_of(given)
    assert found.is_contiguous()
    assert found.shape == (weight.numel() // K // 64, K // 64, 64, 64)
    found = found.flatten().tolist()
    rows = weight.reshape(-1, K).tolist()
    for row, k in itertools.product(range(0, len(rows), 5), range(0, K, 3)):
        piece = row // 64 * (K // 64) + k // 64
        unit = k % 64 // 8 ^ row % 8
        assert found[piece * 4096 + row % 64 * 64 + unit * 8 + k % 8] == rows[row][k], (row, k)


def model_of(monkeypatch, *, hopper: bool = True):
    monkeypatch.setattr(torch, "empty", torch.zeros)
    launcher, _ = make_launcher(monkeypatch, hopper=hopper, content=False)
    weights = self_check.random_weights(torch.device("cpu"))
    ops = KernelOps(weights, launcher, max_tokens=64, max_rows=64)
    state = State(weights.shape, 64, shift_dtype=torch.float16, wkv_dtype=torch.float16)
    return ops, Model(weights, ops), state


def matrices_of(ops: KernelOps) -> list:
    layers = [getattr(layer, name) for layer in ops.prepared.layers for name in PRODUCTS[:4]]
    return [matrix.gemm for matrix in [*layers, ops.prepared.head] if matrix.gemm is not None]


def test_products_read_the_copy(monkeypatch):
    ops, model, state = model_of(monkeypatch)
    tiled.tile(ops)
    matrices = matrices_of(ops)
    assert all(matrix.tiled.nbytes == matrix.weight.nbytes for matrix in matrices)
    assert tiled.num_bytes(ops.prepared.source.shape) >= sum(matrix.tiled.nbytes for matrix in matrices)
    for name in PRODUCTS:
        ops.choose(name, 8, Variant(Method.GEMM, TileConfig(64, 8, 1, 4, 20)))
    with monkeypatch.context() as patch:
        handed = []
        patch.setattr(ops.launcher, "launch", lambda function, *arguments: handed.append(arguments))
        model.forward(None, CapturedRows.decode(torch.arange(8)), state)
    given = {value for arguments in handed for value in arguments if isinstance(value, int)}
    assert {matrix.tiled.data_ptr() for matrix in matrices} <= given


@pytest.mark.parametrize("placement", [LoraPlacement.FUSED_DOWN, LoraPlacement.FUSED])
def test_products_with_low_rank_pairs_read_it_too(monkeypatch, placement):
    ops, model, state = model_of(monkeypatch)
    tiled.tile(ops)
    offered = ops.variants("rkv", 8, ops.prepared.layers[0])
    variant = next((one for one in offered if one.method is Method.GEMM and one.lora is placement), None)
    if variant is None:
        pytest.skip("not offered for this width")
    ops.choose("rkv", 8, variant)
    handed = []
    monkeypatch.setattr(ops.launcher, "launch", lambda function, *arguments: handed.append(arguments))
    model.forward(None, CapturedRows.decode(torch.arange(8)), state)
    given = {value for arguments in handed for value in arguments if isinstance(value, int)}
    assert {layer.rkv.gemm.tiled.data_ptr() for layer in ops.prepared.layers} <= given


def test_a_copy_that_gives_other_bits_is_not_used(monkeypatch, caplog):
    ops, *_ = model_of(monkeypatch)
    results = itertools.count()
    monkeypatch.setattr(ops.gemm, "gemm", lambda x, matrix, out, **_: out.fill_(next(results)))
    with caplog.at_level(logging.ERROR):
        tiled.tile(ops)
    assert "WRONG RESULTS" in caplog.text
    assert all(matrix.tiled is None and matrix.turned is None for matrix in matrices_of(ops))


@pytest.mark.parametrize("most", [4096, 0])
def test_small_models_have_their_values_by_outputs_too(monkeypatch, most):
    monkeypatch.setattr(tiled, "TURNED_UNITS", most)
    ops, *_ = model_of(monkeypatch)
    tiled.tile(ops)
    for layer in ops.prepared.layers:
        turned = layer.ffn_value.gemm.turned
        assert (turned is not None) == (most > 0)
        if most:
            assert torch.equal(turned, layer.ffn_value.weight.T)
            assert turned.is_contiguous()
        assert layer.ffn_key.gemm.turned is None
    copies = [tensor.nbytes for matrix in matrices_of(ops) for tensor in (matrix.tiled, matrix.turned) if tensor is not None]
    assert tiled.num_bytes(ops.prepared.source.shape) >= sum(copies)


def test_other_cards_have_none(monkeypatch):
    ops, *_ = model_of(monkeypatch, hopper=False)
    tiled.tile(ops)
    assert not matrices_of(ops)


def plan_of(monkeypatch, free_gib: float, quant: Quantisation = PLAIN, **settings) -> memory.MemoryPlan:
    monkeypatch.setattr(memory, "free_memory", lambda device: int(free_gib * 2**30))
    monkeypatch.setattr(memory, "runs_on", lambda device: True)
    half = torch.float16
    return memory.plan_memory(Config(**settings), SHAPE, torch.device("cuda"), half, half, 4096, quant)


@pytest.mark.parametrize(("free_gib", "has"), [(139, True), (79, False), (24, False)])
def test_automatic_copies_are_made_where_much_memory_is_left(monkeypatch, free_gib, has):
    plan = plan_of(monkeypatch, free_gib)
    assert plan.tiled_bytes == BYTES
    assert plan.tiles(340) is has


def test_what_was_asked_for_is_counted(monkeypatch):
    off, on = (plan_of(monkeypatch, 50, tiled_weights=choice) for choice in ("off", "on"))
    assert on.buffers - off.buffers == BYTES
    assert on.tiles(200)
    assert not off.tiles(1)
    assert not plan_of(monkeypatch, 139, Quantisation("int8")).tiles(1), "its matrices are never read in fp16"
    assert not plan_of(monkeypatch, 139, devices="0,1", tp=2).tiles(1)


def test_who_asks_in_vain_is_told(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert plan_of(monkeypatch, 139, Quantisation("int8"), tiled_weights="on").tiled == "off"
    assert "--tiled-weights" in caplog.text
