"""Adapters merged at load: each format against a plain formula, what is said of them, and what is refused."""

import json
import os
from pathlib import Path

import adapter_files
import numpy as np
import pytest
import torch
from adapter_files import FORMATS, RANK, Draw, changed, matrices
from models import ROOT, TINY, random_tensors
from oracle import Oracle
from safetensors.torch import save_file
from test_weights import Trap

from rwkv_batch.config import Config
from rwkv_batch.config_sources import load
from rwkv_batch.engine.build import build_engine_loop
from rwkv_batch.errors import CheckpointError
from rwkv_batch.model import reference_ops, weights
from rwkv_batch.model.adapters import adapter_file
from rwkv_batch.model.adapters.adapter import Scaling
from rwkv_batch.model.packed_file import unpack
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.quantized import Quantisation
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State

MODEL = random_tensors(TINY)


def merged(*adapters, **options):
    return weights.from_tensors(dict(MODEL), adapters=adapters, **options)


def published(layer) -> dict[str, torch.Tensor]:
    names = {name: getattr(layer, name).dense() for name in ("receptance", "key", "value", "output")}
    return {
        **{f"att.{name}": matrix for name, matrix in names.items()},
        "ffn.key": layer.ffn_key.dense(),
        "ffn.value": layer.ffn_value.dense().t(),
    }


def agrees(found: weights.Weights, wanted: dict[str, np.ndarray]) -> bool:
    pairs = [(m, wanted[f"blocks.{i}.{n}.weight"]) for i, layer in enumerate(found.layers) for n, m in published(layer).items()]
    return all(np.allclose(matrix.double().numpy(), expected, rtol=1e-5, atol=2e-6) for matrix, expected in pairs)


@pytest.mark.parametrize("name", FORMATS)
def test_a_merged_adapter_is_what_its_formula_says(name, tmp_path):
    path, formula = FORMATS[name](MODEL, tmp_path)
    adapter = adapter_file.read(path)
    found = merged(adapter)
    wanted = changed(MODEL, formula)
    assert agrees(found, wanted)
    assert not agrees(merged(), wanted)
    assert len(adapter.changes) == 12
    assert found.fingerprint != merged().fingerprint


def test_the_changed_model_computes_what_the_oracle_says(tmp_path):
    path, formula = adapter_files.lora(MODEL, tmp_path)
    found = merged(adapter_file.read(path))
    state = State(found.shape, 1)
    tokens = [3, 77, 200, 9, 9, 411]
    last = torch.arange(len(tokens))
    logits = Model(found, reference_ops).forward(torch.tensor(tokens), PackedRows([0], [len(tokens)]), state, logits_of=last)
    wanted = Oracle(changed(MODEL, formula)).logits(tokens)[:, found.output_ids.numpy()]
    assert np.abs(logits.numpy() - wanted).max() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("name", "given", "factor"),
    [
        ("LoRA", Scaling(0.5), 0.5),
        ("LoRA", Scaling(alpha=12), 1.5),
        ("PiSSA", Scaling(3.0), 3.0),
        ("HF LoRA", Scaling(0.25), 0.25),
    ],
)
def test_the_scaling_may_be_given(name, given, factor, tmp_path):
    path, formula = FORMATS[name](MODEL, tmp_path)
    adapter = adapter_file.read(path, given)
    assert agrees(merged(adapter), changed(MODEL, formula, s=factor))
    assert (adapter.scaling, adapter.assumed) == (factor, False)


@pytest.mark.parametrize(
    ("name", "scaling", "assumed"),
    [("LoRA", 2.0, True), ("DoRA", 2.0, True), ("web-rwkv", 2.0, True), ("PiSSA", 1.0, False), ("Bone", None, False),
     ("HF LoRA", [1.5, 3.0], False)],
)  # fmt: skip
def test_it_is_said_what_was_understood(name, scaling, assumed, tmp_path):
    path, _ = FORMATS[name](MODEL, tmp_path)
    adapter = adapter_file.read(path)
    report = adapter.report()
    assert (report["scaling"], report["assumed"]) == (scaling, assumed)
    assert report["matrices"] == dict.fromkeys(adapter_files.MATRICES, 2)
    assert ("ASSUMED" in adapter.line()) == assumed
    json.dumps(report)


def test_several_are_merged_in_their_order(tmp_path):
    (tmp_path / "b").mkdir()
    first, one = adapter_files.lora(MODEL, tmp_path)
    second, two = adapter_files.bat(MODEL, tmp_path / "b")
    adapters = adapter_file.read(first), adapter_file.read(second)
    both, turned = merged(*adapters), merged(*reversed(adapters))
    wanted = changed(MODEL, lambda w, p: two(one(w, p), p))
    assert agrees(both, wanted)
    assert not agrees(turned, wanted)
    assert len({both.fingerprint, turned.fingerprint, *(merged(one).fingerprint for one in adapters)}) == 4


def test_whole_tensors_replace_those_of_the_model(tmp_path):
    draw = Draw(9)
    new = {"blocks.1.ln2.weight": 1 + draw(128), "blocks.0.att.x_k": draw(1, 1, 128), "head.weight": draw(512, 128)}
    lora = {"blocks.1.att.key.lora_A": draw(4, 128), "blocks.1.att.key.lora_B": draw(128, 4)}
    torch.save({f"model.{key}": tensor.bfloat16() for key, tensor in (new | lora).items()}, tmp_path / "a.pth")
    adapter = adapter_file.read(tmp_path / "a.pth")
    found = merged(adapter)
    wanted = weights.from_tensors(MODEL | {key: tensor.bfloat16().float() for key, tensor in new.items()})
    assert torch.equal(found.layers[1].ln2_weight, wanted.layers[1].ln2_weight)
    assert torch.equal(found.layers[0].att_mix, wanted.layers[0].att_mix)
    assert torch.equal(found.head.dense(), wanted.head.dense())
    assert torch.equal(found.layers[0].key.dense(), wanted.layers[0].key.dense())
    assert not torch.equal(found.layers[1].key.dense(), wanted.layers[1].key.dense())
    assert adapter.report()["replaced"] == sorted(new)


def test_rounding_and_quantisation_come_after_the_merge(tmp_path):
    path, formula = adapter_files.lora(MODEL, tmp_path)
    adapter, wanted = adapter_file.read(path), changed(MODEL, formula)
    exact = {key: torch.from_numpy(value).float() for key, value in wanted.items()}
    half = merged(adapter, dtype=torch.float16)
    plain = weights.from_tensors(dict(exact), dtype=torch.float16)
    key, known = half.layers[1].key.dense(), plain.layers[1].key.dense()
    assert ((key.float() - known.float()).abs() <= known.float().abs() * 2**-9).all()  # a last bit of fp16, no more
    quant = merged(adapter, quant=Quantisation("int8"))
    known = weights.from_tensors(dict(exact), quant=Quantisation("int8"))
    assert (quant.layers[0].ffn_key.values == known.layers[0].ffn_key.values).float().mean() > 0.999
    assert quant.fingerprint not in (
        known.fingerprint,
        merged(adapter).fingerprint,
        merged(quant=Quantisation("int8")).fingerprint,
    )


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_every_container_of_a_checkpoint_takes_them(suffix, tmp_path):
    path, formula = adapter_files.lora(MODEL, tmp_path)
    model = tmp_path / f"m{suffix}"
    torch.save(MODEL, model) if suffix == ".pth" else save_file(dict(MODEL), model)
    assert agrees(weights.load(model, adapters=[adapter_file.read(path)]), changed(MODEL, formula))


def test_a_server_starts_with_adapters_on_the_built_in_model(tmp_path, caplog):
    model = unpack(ROOT / "demo" / "model.rwkv")
    path, formula = adapter_files.lora(model, tmp_path, layers=[1])
    loop = build_engine_loop(
        Config(device="cpu", threads=1, slots=2, adapter=f"{path}:0.5,{path}:alpha=4"), lambda events: None
    )
    w = model["blocks.1.att.key.weight"].double().numpy()
    wanted = formula(formula(w, "blocks.1.att.key", 0.5), "blocks.1.att.key", 0.5)
    assert np.allclose(loop.engine.model.weights.layers[1].key.dense().numpy(), wanted, atol=1e-5)
    assert [found["scaling"] for found in loop.info.adapters] == [0.5, 0.5]
    assert loop.info.fingerprint != build_engine_loop(Config(device="cpu", threads=1, slots=2), lambda e: None).info.fingerprint


def test_the_setting_may_be_given_several_times(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('adapter = ["a.pth", "b.pth:2"]')
    assert load(["--adapter", "a.pth:1", "--adapter", "b"], {}).adapter == "a.pth:1,b"
    assert load(["--config", str(file)], {}).adapter == "a.pth,b.pth:2"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("a.pth", ("a.pth", Scaling())), ("a.pth:0.5", ("a.pth", Scaling(0.5))), ("a:alpha=32", ("a", Scaling(alpha=32.0))),
     ("a:b.pth", ("a:b.pth", Scaling())), ("a:nan", ("a:nan", Scaling())), (":1", (":1", Scaling()))],
)  # fmt: skip
def test_file_and_scaling_are_told_apart(text, wanted):
    assert adapter_file.parse(text) == wanted


def _save(path: Path, parts) -> Path:
    torch.save(parts, path)
    return path


def _good(folder, **other) -> Path:
    draw, parts = Draw(), {}
    for prefix, (outs, ins) in matrices(MODEL):
        parts |= {f"{prefix}.lora_A": draw(RANK, ins), f"{prefix}.lora_B": draw(outs, RANK)}
    for key, value in other.items():
        parts[key.replace("__", ".")] = value
    return _save(folder / "a.pth", {key: value for key, value in parts.items() if value is not None})


def _cut(folder, share) -> Path:
    path = _good(folder)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path


def _hf(folder, config=None, text=None, **parts) -> Path:
    path, _ = adapter_files.hf_lora(MODEL, folder)
    if text is not None or config is not None:
        known = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(text if text is not None else json.dumps(known | config))
    if parts:
        save_file({key.replace("__", "."): value for key, value in parts.items()}, folder / "adapter_model.safetensors")
    return path


def _without_config(folder) -> Path:
    path = _hf(folder)
    os.unlink(folder / "adapter_config.json")
    return path


KEY = "blocks__1__att__key"
BROKEN = {
    "pickle with code": (
        lambda f: _save(f / "a.pth", {"blocks.0.att.key.lora_A": Trap(f / "canary")}),
        "nothing in it was run",
    ),
    "no file": (lambda f: f / "missing.pth", "No such file"),
    "empty": (lambda f: _cut(f, 0), "complete"),
    "truncated": (lambda f: _cut(f, 0.7), "complete"),
    "garbage safetensors": (lambda f: (f / "a.st", (f / "a.st").write_bytes(b"\xff" * 999))[0], "not a readable safetensors"),
    "a text": (lambda f: (f / "a.txt", (f / "a.txt").write_text("x"))[0], "not the file of an adapter"),
    "a list": (lambda f: _save(f / "a.pth", [torch.ones(2)]), "instead of named tensors"),
    "no tensors": (lambda f: _save(f / "a.pth", {}), "instead of named tensors"),
    "NaN": (lambda f: _good(f, **{f"{KEY}__lora_A": torch.full((RANK, 128), float("nan"))}), "not finite"),
    "infinity": (lambda f: _good(f, **{f"{KEY}__lora_B": torch.full((128, RANK), float("inf"))}), "not finite"),
    "whole numbers": (lambda f: _good(f, **{f"{KEY}__lora_A": torch.ones(RANK, 128, dtype=torch.int64)}), "no floating-point"),
    "no numbers": (lambda f: _good(f, **{f"{KEY}__lora_A": torch.ones(0, 128)}), "no floating-point"),
    "A without B": (lambda f: _good(f, **{f"{KEY}__lora_B": None}), "make no adapter"),
    "ranks differ": (lambda f: _good(f, **{f"{KEY}__lora_A": torch.ones(RANK + 1, 128)}), "halves"),
    "wrong inputs": (lambda f: _good(f, **{f"{KEY}__lora_A": torch.ones(RANK, 256)}), "does not fit the model"),
    "wrong outputs": (lambda f: _good(f, **{f"{KEY}__lora_B": torch.ones(256, RANK)}), "does not fit the model"),
    "three dimensions": (lambda f: _good(f, **{f"{KEY}__lora_B": torch.ones(1, 128, RANK)}), "halves"),
    "a layer too many": (
        lambda f: _good(f, blocks__2__att__key__lora_A=torch.ones(1, 128), blocks__2__att__key__lora_B=torch.ones(128, 1)),
        "which the model does not have",
    ),
    "unknown tensor": (lambda f: _good(f, blocks__1__att__time_offset=torch.ones(128)), "which the model does not have"),
    "whole tensor of another shape": (lambda f: _good(f, blocks__1__att__x_k=torch.ones(64)), "does not fit the model"),
    "bone and lora": (lambda f: _good(f, **{f"{KEY}__bone": torch.ones(RANK, 128)}), "make no adapter"),
    "bone of no form": (lambda f: _save(f / "a.pth", {"blocks.1.att.key.bone": torch.ones(4, 8, 9)}), "a Bone of shape"),
    "oldest bone": (lambda f: _save(f / "a.pth", {"blocks.1.ffn.key.bone": torch.ones(512, 8)}), "does not fit the model"),
    "bat that divides nothing": (
        lambda f: _save(f / "a.pth", {"blocks.1.ffn.value.bone": torch.ones(2, 256, 256)}),
        "do not divide",
    ),
    "magnitudes of another matrix": (lambda f: _good(f, **{f"{KEY}__lora_M": torch.ones(1, 64)}), "does not fit the model"),
    "experts": (lambda f: _good(f, blocks__0__ffn__moe_info=torch.ones(2)), "mixture of LoRA experts"),
    "nothing": (lambda f: _save(f / "a.pth", {"emb": torch.ones(3)}), "which the model does not have"),
    "strange PiSSA file": (
        lambda f: (_good(f), _save(f / "init_pissa.pth", {"blocks.0.att.key.init_lora_A": torch.ones(2, 2)}))[0],
        "move it",
    ),
    "HF folder without a file": (lambda f: f, "a folder without"),
    "HF without config": (_without_config, "needs adapter_config.json"),
    "HF config is no JSON": (lambda f: _hf(f, text="{"), "not readable"),
    "HF config is a list": (lambda f: _hf(f, text="[]"), "peft_type"),
    "HF of another kind": (lambda f: _hf(f, config={"peft_type": "LOKR"}), "peft_type LOKR"),
    "HF PiSSA": (lambda f: _hf(f, config={"init_lora_weights": "pissa_niter_4"}), "changes the model too"),
    "HF without alpha": (lambda f: _hf(f, config={"lora_alpha": None}), "lora_alpha"),
    "HF pattern": (lambda f: _hf(f, config={"alpha_pattern": {"(a+)+$": 3}}), "alpha_pattern"),
    "HF DoRA without magnitudes": (lambda f: _hf(f, config={"use_dora": True}), "disagree"),
    "HF foreign tensor": (lambda f: _hf(f, base_model__lm_head__bias=torch.ones(3)), "no part of an adapter"),
    "HF foreign module": (
        lambda f: _hf(f, layers__0__attn__g_proj__lora_A__weight=torch.ones(1, 128)),
        "no matrix of RWKV",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_used_is_refused_in_one_line(name, tmp_path):
    make, words = BROKEN[name]
    path = make(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        merged(adapter_file.read(path))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "canary").exists()


def test_bone_takes_no_scaling(tmp_path):
    path, _ = adapter_files.bone(MODEL, tmp_path)
    with pytest.raises(CheckpointError, match="no scaling"):
        adapter_file.read(path, Scaling(2.0))


def test_a_quantised_checkpoint_is_refused(tmp_path):
    from rwkv_batch.model.quantized_writer import write_quantised

    torch.save(random_tensors((2, 128, 32, 32, 32, 32, 1.15)), tmp_path / "m.pth")
    write_quantised(tmp_path / "m.pth", tmp_path / "q.safetensors", Quantisation("int8"), torch.device("cpu"))
    path, _ = adapter_files.lora(MODEL, tmp_path)
    with pytest.raises(CheckpointError, match="quantised already"):
        weights.load(tmp_path / "q.safetensors", adapters=[adapter_file.read(path)])
