"""Files that may be lost: a start takes longer without them and never fails."""

import os
from types import SimpleNamespace

import pytest
import torch

from rwkv_batch.kernels import self_check
from rwkv_batch.kernels.card_cache import recall, remember

KIND = dict[str, list[str]]


@pytest.mark.parametrize(
    "content", [b"", b'{"a": ["b"', b"[]", b'{"a": "b"}', b'{"a": [1]}', b"\xff\xfe", b"null", b"[" * 10**5]
)
def test_a_broken_file_is_as_good_as_none(tmp_path, content):
    file = tmp_path / "card.json"
    file.write_bytes(content)
    assert recall(file, KIND) == {}
    remember(file, {"a": ["b"]})
    assert recall(file, KIND) == {"a": ["b"]}


def test_a_file_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "new" / "card.json"
    assert recall(file, KIND) == {}
    remember(file, {"a": []})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    remember(file, {"b": []})
    assert recall(file, KIND) == {"a": []}
    assert [path.name for path in file.parent.iterdir()] == ["card.json"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    remember(tmp_path / "file" / "card.json", {"a": []})


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A start check of which only op "logits" is run, by `start.outcome`, and how often."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")
    file = tmp_path / "cuda.json"
    calls = []

    def agrees(name, launcher, wkv_dtype, quant, expected):
        if name != "logits":
            return True
        calls.append(name)
        if isinstance(start.outcome, Exception):
            raise start.outcome
        return start.outcome

    monkeypatch.setattr(self_check, "_is_right", agrees)
    monkeypatch.setattr(self_check, "_fills", lambda launcher, wkv_dtype: True)
    monkeypatch.setattr(self_check.sampling_check, "check", lambda device, library: [])
    launcher = SimpleNamespace(device=torch.device("cpu"), library=None)
    start = SimpleNamespace(outcome=True, calls=calls, file=file, run=lambda: self_check.failing(launcher, torch.float16, file))
    return start


@pytest.mark.parametrize(("outcome", "found"), [(True, []), (False, ["logits"])])
def test_a_result_of_the_start_check_is_remembered(start, outcome, found):
    start.outcome = outcome
    assert [start.run() for _ in range(3)] == [found] * 3
    assert len(start.calls) == 1


def test_a_start_check_without_result_is_made_again(start):
    start.outcome = RuntimeError("CUDA error: the launch failed")
    assert start.run() == ["logits"]
    start.outcome = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        start.run()
    start.outcome = True
    assert start.run() == []
    assert len(start.calls) == 3


@pytest.mark.parametrize("content", ['{"a card', '{"KEY": ["an op of another version"]}', '{"KEY": 7}'])
def test_a_broken_record_of_the_start_check_is_made_anew(start, content):
    start.run()
    [key] = recall(start.file, KIND)
    start.file.write_text(content.replace("KEY", key))
    assert start.run() == []
    assert len(start.calls) == 2
    assert recall(start.file, KIND) == {key: []}


def test_what_the_check_compares_with_can_be_run_before_there_are_kernels(monkeypatch):
    drawn = []
    monkeypatch.setattr(self_check, "CASES", ([1], [2, 1]))
    monkeypatch.setattr(self_check.sampling_check, "rehearse", drawn.append)
    cpu = torch.device("cpu")
    self_check.rehearse(cpu, torch.float16)
    assert drawn == [cpu]
