"""The bench of quality finds what it should: nothing where nothing is lost, and more the coarser a format is."""

import json
import sys

import pytest
import torch
from models import TINY, random_tensors

from bench import quality
from rwkv_batch.model.packed_file import quantise


@pytest.fixture
def files(tmp_path):
    tensors = {name: tensor.float() for name, tensor in random_tensors(TINY, 256).items()}
    tensors["head.weight"] *= 20  # so that answers are worth comparing
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(".weight") and name != "emb.weight":
            scale, values = quantise(tensor)
            tensors[name] = values * scale[:, None]
    torch.save(tensors, tmp_path / "m.pth")
    (tmp_path / "text.txt").write_text("Once there was a fox.\n<|endoftext|>\n" + "The fox went home. " * 40)
    lines = [{"text": "the fox went home"}, {"text": "a b"}]
    (tmp_path / "lambada.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def figures(files, monkeypatch, *flags: str) -> dict:
    argv = ["quality.py", "--model-path", files / "m.pth", "--text", files / "text.txt", "--threads", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", list(map(str, [*argv, "--out", files / "out.json", *flags])))
    threads = torch.get_num_threads()
    quality.main()
    torch.set_num_threads(threads)
    return [*json.loads((files / "out.json").read_text()).values()][-1]


def test_coarser_formats_lose_more(files, monkeypatch):
    found = figures(files, monkeypatch, "--modes", "int8,fp8,fp8-w8a8,int4", "--lambada", files / "lambada.jsonl")
    rows = {row["mode"]: row for row in found["rows"] if "mode" in row}
    assert rows["int8"]["tokens"] == len("Once there was a fox.") + len("The fox went home. " * 40)
    divergences = [rows[mode]["kl"] for mode in ("int8", "fp8", "fp8-w8a8", "int4")]
    assert divergences == sorted(divergences)
    assert abs(divergences[0]) < 1e-6, "what was made of bytes is found again"
    assert rows["int8"]["top1_percent"] > 99 > rows["int4"]["top1_percent"]
    assert {row["lambada"] for row in found["rows"] if "lambada" in row} == {"none", "int8", "fp8", "fp8-w8a8", "int4"}
    moved = figures(files, monkeypatch, "--modes", "int8", "--off-grid")
    assert moved["rows"][0]["kl"] > 1e-6
