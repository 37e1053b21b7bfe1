"""Checkpoint files: what loads, what is refused, and that a refusal is one line and runs nothing."""

import os
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch
from models import ROOT, SHAPES, TINY, random_tensors
from safetensors.torch import save_file

from rwkv_batch import weights
from rwkv_batch.errors import CheckpointError


def tensors_equal(a: weights.Weights, b: weights.Weights) -> bool:
    own = all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("embedding", "head", "output_ids", "ln_out_weight"))
    layers = zip(a.layers, b.layers, strict=True)
    return own and all(torch.equal(x, vars(two)[n]) for one, two in layers for n, x in vars(one).items() if x is not None)


@pytest.mark.parametrize("name", SHAPES)
def test_shape_is_read_from_the_file(name, tmp_path):
    layers, width, rank_w, rank_a, rank_v, rank_g, _ = SHAPES[name]
    torch.save(random_tensors(SHAPES[name], 300), tmp_path / "m.pth")
    loaded = weights.load(tmp_path / "m.pth")
    expected_v = rank_v if layers > 1 else 0
    assert loaded.shape == weights.ModelShape(layers, width, 4 * width, 300, rank_w, rank_a, expected_v, rank_g)


def test_both_formats_with_and_without_suffix_give_the_same_model(tmp_path):
    tensors = random_tensors(TINY)
    torch.save(tensors, tmp_path / "a.pth")
    save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "b.safetensors")
    loaded = [weights.load(tmp_path / name) for name in ("a", "a.pth", "b", "b.safetensors")]
    assert len({w.fingerprint for w in loaded}) == 1
    assert all(tensors_equal(w, loaded[0]) for w in loaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_file_dtype_loads(dtype, tmp_path):
    torch.save({k: t.to(dtype) for k, t in random_tensors(TINY).items()}, tmp_path / "m.pth")
    assert weights.load(tmp_path / "m", dtype=torch.float32).dtype == torch.float32


def test_layer_zero_may_carry_its_unused_value_residual(tmp_path):
    tensors = dict(random_tensors(TINY))
    plain = weights.from_tensors(dict(tensors))
    tensors |= {f"blocks.0.att.{n}": tensors[f"blocks.1.att.{n}"] for n in ("v0", "v1", "v2")}
    assert tensors_equal(weights.from_tensors(tensors), plain)


def test_fingerprint_tells_models_apart():
    tensors = dict(random_tensors(TINY))
    one = weights.fingerprint_of(tensors)
    changed = tensors["blocks.1.ffn.key.weight"].clone()
    changed[0, 0] += 1
    assert weights.fingerprint_of(tensors | {"blocks.1.ffn.key.weight": changed}) != one
    assert weights.fingerprint_of(dict(reversed(list(tensors.items())))) == one


class Trap:
    """Unpickling this would create the canary file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def _save(path, tensors):
    torch.save(tensors, path)
    return path


def _truncated(folder, tensors, share=0.5, tail=b""):
    path = _save(folder / "m.pth", tensors)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)] + tail)
    return path


def _without(tensors, key):
    return {k: t for k, t in tensors.items() if k != key}


def _malicious(folder, tensors):
    return _save(folder / "m.pth", {**tensors, "emb.weight": Trap(folder / "canary")})


def _malicious_plain_pickle(folder, tensors):
    path = folder / "m.pth"
    path.write_bytes(pickle.dumps(Trap(folder / "canary")))
    return path


def _lying_member(folder, tensors):
    """A compressed member instead of a stored one."""
    path = _save(folder / "m.pth", tensors)
    with zipfile.ZipFile(path) as source:
        members = [(m, source.read(m)) for m in source.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for member, data in members:
            target.writestr(member.filename, data)
    return path


def _nan(folder, tensors):
    bad = tensors["blocks.1.att.w2"].clone()
    bad[3, 5] = float("nan")
    return _save(folder / "m.pth", {**tensors, "blocks.1.att.w2": bad})


def _safetensors_cut(folder, tensors):
    path = folder / "m.safetensors"
    save_file(dict(tensors), path)
    path.write_bytes(path.read_bytes()[:-1000])
    return path


def _garbage_safetensors(folder, tensors):
    path = folder / "m.safetensors"
    path.write_bytes(b"\xff" * 4096)
    return path


def _text_file(folder, tensors):
    path = folder / "m.pth"
    path.write_text("not a model\n")
    return path


BROKEN = {
    "truncated": (_truncated, "complete"),
    "cut near the end": (lambda f, t: _truncated(f, t, 0.99), "complete"),
    "empty": (lambda f, t: _truncated(f, t, 0), "complete"),
    "text": (_text_file, "complete"),
    "malicious zip": (_malicious, "nothing in it was run"),
    "malicious pickle": (_malicious_plain_pickle, "complete"),
    "compressed members": (_lying_member, "damaged"),
    "missing tensor": (lambda f, t: _save(f / "m.pth", _without(t, "blocks.1.att.k_a")), "misses: blocks.1.att.k_a"),
    "missing layer": (lambda f, t: _save(f / "m.pth", {k: v for k, v in t.items() if "blocks.0." not in k}), "not numbered"),
    "wrong shape": (lambda f, t: _save(f / "m.pth", t | {"blocks.1.att.w1": torch.zeros(128, 31)}), "wrong shape"),
    "wrong dtype": (lambda f, t: _save(f / "m.pth", t | {"ln_out.bias": torch.zeros(128, dtype=torch.int32)}), "dtype"),
    "foreign names": (lambda f, t: _save(f / "m.pth", {f"model.{k}": v for k, v in t.items()}), "not an RWKV-7 checkpoint"),
    "unknown tensor": (
        lambda f, t: _save(f / "m.pth", t | {"blocks.0.ffn.s_emb.weight": torch.zeros(4, 4)}),
        "unknown tensors",
    ),
    "no dict": (lambda f, t: _save(f / "m.pth", list(t.values())), "instead of named tensors"),
    "no tensors": (lambda f, t: _save(f / "m.pth", {"emb.weight": 3}), "no plain tensor"),
    "sparse": (lambda f, t: _save(f / "m.pth", t | {"ln_out.bias": torch.ones(128).to_sparse()}), "no plain tensor"),
    "nan": (_nan, "not finite"),
    "other head size": (
        lambda f, t: _save(f / "m.pth", t | {"blocks.0.att.r_k": torch.zeros(4, 32)}),
        "only the head size 64",
    ),
    "cut safetensors": (_safetensors_cut, "not a readable safetensors"),
    "garbage safetensors": (_garbage_safetensors, "not a readable safetensors"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_is_refused_in_one_line(name, tmp_path):
    make, words = BROKEN[name]
    path = make(tmp_path, dict(random_tensors(TINY)))
    with pytest.raises(CheckpointError) as refusal:
        weights.load(path)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "canary").exists()


def test_missing_file_names_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"looked for m, m\.pth, m\.safetensors"):
        weights.load(tmp_path / "m")


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_loading_needs_little_more_memory_than_the_tensors_kept(suffix, tmp_path):
    """Peak anonymous memory of a process that loads, above one that only imports, is at most 1.15 x the tensors."""
    tensors = random_tensors((4, 512, 32, 32, 32, 64, 1.15), 32768)
    path = tmp_path / f"m.{suffix}"
    torch.save(tensors, path) if suffix == "pth" else save_file(dict(tensors), path)
    program = """
import sys, threading, time
from rwkv_batch import weights
import torch
def anonymous():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon')) * 1024
torch.randn(64, 64) @ torch.randn(64, 64)
base, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)
watcher = threading.Thread(target=watch); watcher.start()
loaded = weights.load(sys.argv[1])
done = True; watcher.join()
print((peak - base) / loaded.num_bytes)
"""
    result = subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert float(result.stdout) <= 1.15, result.stderr
