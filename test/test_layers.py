"""Where a layer's time goes: which part a kernel is of, and what it counts for."""

import importlib

import pytest

layers, tables = map(importlib.import_module, ("bench.card.layers", "bench.card.tables"))

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
