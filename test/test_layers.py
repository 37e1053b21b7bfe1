"""Where a layer's time goes: which part a kernel is of, and what it counts for; each way to do a step, and how it is left."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from kernel_recorder import make_launcher

from rwkv_batch.kernels import self_check
from rwkv_batch.kernels.few.ops import FewRowOps
from rwkv_batch.kernels.few.plan import FewPlan
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State

layers, tables, ways = map(importlib.import_module, ("bench.card.layers", "bench.card.tables", "bench.card.ways"))

# A decode step's layers of kernels: each ends 10 us behind the one before it and began before that one ended.
PRODUCTS = [
    "decode_kernel<6, 1>(float",
    "gemm<64, 8>(C",
    "few_ranks<1>(P",
    "wkv_decode_kernel<__half, 8>(W",
    "stream_weights<1>(P",
]
MIX = ["decode_kernel<1, 1>(float", "nvjet_sm90_hsh_64", "cublasLt::splitKreduce_kernel<32>(s", "masked_ffn<-1, 1>(h"]
FEWER = [
    "normed_products<1, 4>(N",
    "wkv_pairs_kernel<__half>(W",
    "plain_products<4>(P",
    "normed_products<1, 4>(N",
    "plain_products<16>(P",
]


def kernels(layer: list[str], count: int = 6) -> list[layers.Kernel]:
    names = [f"void rwkv::{name}" for name in layer * count * layers.REPLAYS]
    return [layers.Kernel(name, 10.0 * number - 5, 10.0 * number + 10) for number, name in enumerate(names)]


def test_parts_add_up_to_the_layer():
    found = layers.parts_of(kernels(PRODUCTS + MIX))
    assert found["layer_us"] == pytest.approx(90)
    assert found["launches"] == 9
    assert found["us"] == {part: 20.0 if part == "key" else 10.0 for part in layers.PARTS}
    assert found["kernels"]["value"] == ["masked_ffn<-1, 1>"]


def test_norms_inside_products_count_with_them():
    found = layers.parts_of(kernels(FEWER))
    assert found["us"] == dict.fromkeys(("rkv", "recurrence", "output", "key", "value"), 10.0)


def test_a_prefill_whose_recurrence_is_several_kernels():
    spread = ["prefill_kernel<6, 4>(f", "edge_kernel<6>(f", "grouped<128, true>(G", "nvjet_sm90_a", "wkv_prepare_kernel(W"]
    spread += [
        "wkv_scan_chunks_kernel(v",
        "wkv_finish_kernel(W",
        "nvjet_sm90_a",
        "prefill_kernel<1, 2>(f",
        "gemm<128>(C",
        "nvjet_b",
    ]
    us = layers.parts_of(kernels(spread))["us"]
    assert us == {**dict.fromkeys(layers.PARTS, 10.0), "norm_att": 20.0, "recurrence": 30.0}


def test_the_tables_of_the_page_are_those_of_the_results():
    page = tables.PAGE.read_text()
    assert page.count("<!-- table: ") == len(tables.MARK.findall(page)) > 3
    assert tables.written(page) == page


def test_every_way_has_its_turn_and_what_was_chosen_stays(monkeypatch):
    launcher, recorder = make_launcher(monkeypatch, hopper=True, content=False)
    weights = self_check.random_weights(torch.device("cpu"))
    ops = FewRowOps(weights, launcher, max_tokens=64, max_rows=32)
    state = State(weights.shape, 20, shift_dtype=torch.float16, wkv_dtype=torch.float16)
    steps, seen = ways.Steps(SimpleNamespace(model=Model(weights, ops), state=state)), []

    def time(run, rounds: int) -> float:
        recorder.clear()
        run()
        seen.append(str(recorder.take()))
        return len(seen) / 1e3

    monkeypatch.setattr(launcher, "time", time)
    ops.plans[3] = FewPlan(4, pairs=True)
    offered = ops.variants("rkv", 17, ops.prepared.layers[-1])
    ops.choose("rkv", 17, offered[-1])
    found = steps.by_variants("rkv", 17)
    assert len(found) == len(offered) == len(seen)
    assert [name for name in found if "chosen" in name] == [ways.name_of(offered[-1]) + " (chosen)"]
    assert ops.variant("rkv", 17, ops.prepared.layers[-1].rkv) == offered[-1]
    seen.clear()
    plans = steps.by_plans(3)
    assert len(plans) == len(seen) == len(set(seen)) > 3
    assert ops.plans == {3: FewPlan(4, pairs=True)}
