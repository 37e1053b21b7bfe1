"""Checkpoint files: what loads, what is refused, and that a refusal is one line and runs nothing."""

import os
import pickle
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import SHAPES, TINY, random_tensors
from safetensors.torch import save_file

from rwkv_batch.config import Config
from rwkv_batch.engine.build import build_engine_loop
from rwkv_batch.errors import CheckpointError, NoMemory
from rwkv_batch.model import checkpoint, tensor_reader, weights
from rwkv_batch.model.tensor_reader import Upload


def tensors_equal(a: weights.Weights, b: weights.Weights) -> bool:
    own = all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("embedding", "output_ids", "ln_out_weight"))
    own = own and torch.equal(a.head.dense(), b.head.dense())
    layers = zip(a.layers, b.layers, strict=True)
    return own and all(torch.equal(x, y) for one, two in layers for x, y in zip(one.tensors, two.tensors, strict=True))


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


def _later_zip(folder, tensors):
    """A version of the format that nobody reads yet."""
    path = _save(folder / "m.pth", tensors)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 199
    path.write_bytes(data)
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
    "later zip": (_later_zip, "complete"),
    "further dimension": (
        lambda f, t: _save(f / "m.pth", t | {"blocks.1.att.key.weight": t["blocks.1.att.key.weight"][None]}),
        "wrong shape",
    ),
    "compressed members": (_lying_member, "damaged"),
    "missing tensor": (lambda f, t: _save(f / "m.pth", _without(t, "blocks.1.att.k_a")), "misses: blocks.1.att.k_a"),
    "missing layer": (lambda f, t: _save(f / "m.pth", {k: v for k, v in t.items() if "blocks.0." not in k}), "not numbered"),
    "wrong shape": (lambda f, t: _save(f / "m.pth", t | {"blocks.1.att.w1": torch.zeros(128, 31)}), "wrong shape"),
    "wrong dtype": (lambda f, t: _save(f / "m.pth", t | {"ln_out.bias": torch.zeros(128, dtype=torch.int32)}), "dtype"),
    "foreign names": (lambda f, t: _save(f / "m.pth", {f"model.{k}": v for k, v in t.items()}), "not an RWKV-7 checkpoint"),
    "RWKV-6 without its rest": (
        lambda f, t: _save(f / "m.pth", {"emb.weight": t["emb.weight"], "blocks.0.att.time_maa_x": t["ln_out.bias"]}),
        "not an RWKV-6 checkpoint",
    ),
    "RWKV-5": (
        lambda f, t: _save(f / "m.pth", {"emb.weight": t["emb.weight"], "blocks.0.att.time_mix_g": t["ln_out.bias"]}),
        "an RWKV-5 checkpoint; what runs here: RWKV-7, RWKV-6",
    ),
    "RWKV-4": (
        lambda f, t: _save(f / "m.pth", {"emb.weight": t["emb.weight"], "blocks.0.att.time_first": t["ln_out.bias"]}),
        "an RWKV-4 checkpoint",
    ),
    "unknown tensor": (
        lambda f, t: _save(f / "m.pth", t | {"blocks.0.ffn.s_emb.weight": torch.zeros(4, 4)}),
        "unknown tensors",
    ),
    "line break in a name": (
        lambda f, t: _save(f / "m.pth", t | {"blocks.0\nx": torch.zeros(4)}),
        "unknown tensors: blocks.0 x",
    ),
    "endless number": (lambda f, t: _save(f / "m.pth", t | {f"blocks.{'9' * 5000}.x": torch.zeros(4)}), "unknown tensors"),
    "empty tensors": (
        lambda f, t: _save(
            f / "m.pth",
            t
            | {key: t[key][:0] for key in t if key.endswith("ffn.key.weight")}
            | {key: t[key][:, :0] for key in t if key.endswith("ffn.value.weight")},
        ),
        "no values: blocks.0.ffn.key.weight",
    ),
    "meta tensor": (lambda f, t: _save(f / "m.pth", t | {"emb.weight": t["emb.weight"].to("meta")}), "no values: emb.weight"),
    "no entries": (lambda f, t: _save(f / "m.pth", {}), "instead of named tensors"),
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


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_that_cannot_be_mapped_lacks_memory(tmp_path, monkeypatch, suffix):
    def unmappable(*args, **more):
        raise RuntimeError("unable to mmap 420135367351 bytes from file <m>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "load", unmappable)
    monkeypatch.setattr(checkpoint, "safe_open", unmappable)
    path = tmp_path / f"m{suffix}"
    torch.save({}, path)
    with pytest.raises(NoMemory, match="not enough memory to map") as refusal:
        checkpoint.read_file(path)
    assert refusal.value.status == 507


def test_a_model_whose_file_changes_while_it_is_read_is_not_served(tmp_path, monkeypatch):
    """Its tensors are read where they lie, so they could be of both versions."""

    def changing(path: Path) -> dict[str, torch.Tensor]:
        tensors = {key: tensor.clone() for key, tensor in read_file(path).items()}
        os.utime(path, ns=(1, 1))
        return tensors

    read_file = checkpoint.read_file
    torch.save(random_tensors(TINY, 256), tmp_path / "m.pth")
    monkeypatch.setattr(checkpoint, "read_file", changing)
    with pytest.raises(CheckpointError, match=r"m\.pth: changed while it was read"):
        build_engine_loop(Config(model_path=str(tmp_path / "m.pth"), device="cpu", threads=1, slots=2), lambda batch: None)


def test_missing_file_names_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"looked for m, m\.pth, m\.safetensors"):
        weights.load(tmp_path / "m")


def anonymous_memory() -> int:
    """Resident anonymous bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def peak_of_loading(path: str) -> float:
    """Peak anonymous memory while a file is loaded, as a multiple of the tensors kept; for a process that did nothing yet."""
    base, peaks, done = anonymous_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            peaks.append(anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    loaded = weights.load(Path(path))
    done.set()
    watcher.join()
    return (max(*peaks, anonymous_memory()) - base) / loaded.num_bytes


@pytest.mark.parametrize("suffix", ["pth", pytest.param("safetensors", marks=pytest.mark.long)])
def test_loading_needs_little_more_memory_than_the_tensors_kept(suffix, tmp_path):
    """At most 1.15 times as much, in a process of its own."""
    tensors = random_tensors((3, 512, 32, 32, 32, 64, 1.15), 16384)
    path = tmp_path / f"m.{suffix}"
    torch.save(tensors, path) if suffix == "pth" else save_file(dict(tensors), path)
    script = "import sys, test_weights; print(test_weights.peak_of_loading(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script, path], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert 0.5 < float(run.stdout) <= 1.15


@pytest.mark.parametrize("length", [1, 100, 1000, 1001, 2500, 8000, 8001, 20_000])
def test_large_tensors_pass_rooms_on_their_way_to_a_gpu(length, monkeypatch):
    """A copy to a GPU reads its room at any time until it is waited for: here, at the last moment."""
    monkeypatch.setattr(tensor_reader, "ROOM_BYTES", 1000)
    upload = Upload()
    upload.make_rooms(pinned=False)
    source = torch.randint(256, (length,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    upload.through_rooms(source, target, lambda room, part: SimpleNamespace(synchronize=lambda: part.copy_(room[: len(part)])))
    assert torch.equal(source, target)


def test_small_tensors_go_as_they_are():
    upload, tensor = Upload(), torch.arange(6)
    assert upload(tensor, torch.device("cpu")) is tensor
    assert upload(tensor, torch.device("meta")).is_meta
