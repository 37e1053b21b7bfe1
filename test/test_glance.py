"""What is seen of a model's file before an engine is started for it."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from models import ROOT, random_tensors
from safetensors.torch import save_file

from rwkv_batch.errors import CheckpointError
from rwkv_batch.served.architectures import architecture_of
from rwkv_batch.served.glance import MAX_PICKLE, names_in

ONE = {"emb.weight": torch.ones(2, 4), "blocks.0.att.r_k": torch.ones(1, 4, dtype=torch.bfloat16)}


class Evil:
    """What a pickle with code is made of."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def write_pickle(file: Path, data: bytes) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return file


def test_the_tensors_of_every_kind_of_file_are_named(tmp_path):
    tensors = dict(random_tensors())
    torch.save(tensors, tmp_path / "a.pth")
    save_file(tensors, tmp_path / "a.safetensors")
    for name in ("a.pth", "a.safetensors"):
        assert tensors.keys() <= names_in(tmp_path / name)
        assert architecture_of(names_in(tmp_path / name), name) == "RWKV-7"
    assert "head.weight" in names_in(ROOT / "demo" / "model.rwkv")


def test_an_older_architecture_is_refused_by_name(tmp_path):
    torch.save({"emb.weight": torch.ones(2), "blocks.0.att.time_mix_g": torch.ones(2)}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="RWKV-5"):
        architecture_of(names_in(tmp_path / "a.pth"), "a.pth")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"emb.weight": Evil()}, protocol=protocol)
    with pytest.raises(CheckpointError, match="more than tensors"):
        names_in(write_pickle(tmp_path / "a.pth", data))
    assert not (tmp_path / "executed").exists()


def test_what_is_cut_off_is_refused_wherever_it_ends(tmp_path):
    torch.save(ONE, tmp_path / "a.pth")
    save_file(ONE, tmp_path / "a.safetensors")
    for name in ("a.pth", "a.safetensors"):
        data = (tmp_path / name).read_bytes()
        for end in {*range(0, len(data), 37), len(data) - 1}:
            (tmp_path / name).write_bytes(data[:end])
            with pytest.raises(CheckpointError):
                names_in(tmp_path / name)


def header(**entries) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("text.pth", b"hello"),
        ("pickle.pth", pickle.dumps({"a": 1})),
        ("large.safetensors", (2**60).to_bytes(8, "little") + b"{}"),
        ("list.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("none.safetensors", header()),
        ("deep.safetensors", (100_000).to_bytes(8, "little") + b"[" * 100_000),
        ("long.safetensors", header(a={"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}) + b"123"),
        ("type.safetensors", header(a={"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}) + b"1234"),
        ("empty.safetensors", header(a={"dtype": "F16", "shape": [0], "data_offsets": [0, 0]})),
        ("demo.rwkv", b"RWKVDEMO\xff\xff\xff\xff"),
        ("other.rwkv", b"something else"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError) as raised:
        names_in(tmp_path / name)
    assert name in raised.value.message
    assert str(tmp_path) not in raised.value.message


def test_archives_that_are_none_of_torchs_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
    with zipfile.ZipFile(tmp_path / "other.pth", "w") as archive:
        archive.writestr("readme", "x")
    write_pickle(tmp_path / "damaged.pth", b"\x80\x02X\xff\xff\xff\x7f")
    write_pickle(tmp_path / "large.pth", b"N" * (MAX_PICKLE + 1))
    for name in ("packed", "other", "damaged", "large", "absent"):
        with pytest.raises(CheckpointError):
            names_in(tmp_path / f"{name}.pth")
