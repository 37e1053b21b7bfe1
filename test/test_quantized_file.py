"""Quantised models: loaded from plain and from quantised files, with sessions that know what made them."""

import pytest
import torch
from models import TINY, random_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rwkv_batch.config import Config
from rwkv_batch.engine import build, memory
from rwkv_batch.engine.memory import MemoryPlan
from rwkv_batch.errors import CheckpointError, Unprocessable, UsageError
from rwkv_batch.kernels.quant.matrix import supported_formats
from rwkv_batch.model import weights
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.quantized import FORMATS, Quantisation
from rwkv_batch.model.quantized_file import Stored, stored_as
from rwkv_batch.model.quantized_writer import write_quantised
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import ModelShape
from rwkv_batch.served.glance import QUANTISED, is_quantised
from rwkv_batch.server.quantize_command import quantize_file
from rwkv_batch.sessions.state_file import StateFile
from rwkv_batch.sessions.state_file import Stored as StoredState

CPU = torch.device("cpu")
NUM_IDS = 500  # of 512 rows that the head has


def source_file(folder, tensors=None):
    path = folder / "m.pth"
    torch.save(tensors or random_tensors(TINY), path)
    return path


def quantised_file(folder, quant=Quantisation("int8"), change=None, metadata=None):
    """Return a quantised file, its tensors or metadata changed."""
    path = folder / "q.safetensors"
    write_quantised(source_file(folder), path, quant, CPU)
    if change or metadata:
        with safe_open(path, framework="pt") as opened:
            about = opened.metadata()
        tensors = load_file(path)
        changed = change(tensors) if change else {}
        save_file(tensors | changed, path, metadata=metadata or about)
    return path


def loaded(path, **settings):
    return weights.load(path, valid_ids=lambda vocab_size: range(NUM_IDS), **settings)


def next_logits(model: weights.Weights) -> torch.Tensor:
    state = State(model.shape, 1)
    Model(model).forward(torch.arange(5, 45), PackedRows([0], [40]), state)
    return Model(model).forward(torch.tensor([7]), PackedRows([0], [1]), state)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("form", FORMATS)
def test_a_file_is_the_model_that_is_quantised_at_load(form, head, tmp_path):
    quant = Quantisation(form, head)
    at_load = loaded(source_file(tmp_path), quant=quant)
    from_file = loaded(quantised_file(tmp_path, quant))
    assert at_load.fingerprint == from_file.fingerprint
    assert at_load.quant == from_file.quant == quant
    assert torch.equal(at_load.output_ids, from_file.output_ids)
    assert torch.equal(next_logits(at_load), next_logits(from_file))
    assert (at_load.head.format, at_load.head.shape) == (form if head else "", (len(at_load.output_ids), 128))
    plain = loaded(source_file(tmp_path))
    error = (next_logits(plain) - next_logits(at_load)).norm() / next_logits(plain).norm()
    assert 0 < error < (0.02 if form == "int8" else 0.3)


def test_fingerprints_tell_formats_apart(tmp_path):
    path = source_file(tmp_path)
    kinds = [Quantisation(), *(Quantisation(form, head) for form in FORMATS for head in (True, False))]
    assert len({loaded(path, quant=quant).fingerprint for quant in kinds}) == len(kinds)
    assert loaded(path, quant=Quantisation("int8")).fingerprint == loaded(path, quant=Quantisation("int8")).fingerprint


def test_a_session_of_another_format_is_refused(tmp_path):
    path = source_file(tmp_path)
    files = {}
    for form in ("", "int8", "int4"):
        model = loaded(path, quant=Quantisation(form))
        files[form] = StateFile(model.fingerprint, model.shape)
    state = State(files[""].shape, 1)
    session = StoredState(state.take(0), 0)
    kept = b"".join(files["int8"].encode(session))
    assert files["int8"].decode([kept]).snapshot.elapsed == 0
    for form in ("", "int4"):
        with pytest.raises(Unprocessable, match="another model"):
            files[form].decode([kept])


@pytest.mark.parametrize("form", FORMATS)
def test_a_session_goes_on_in_the_model_from_the_file(form, tmp_path):
    """Begun in the one that was quantised at load."""
    begun = loaded(source_file(tmp_path), quant=Quantisation(form))
    state = State(begun.shape, 2)
    Model(begun).forward(torch.arange(5, 45), PackedRows([0], [40]), state)
    kept = b"".join(StateFile(begun.fingerprint, begun.shape).encode(StoredState(state.take(0), 0)))
    expected = Model(begun).forward(torch.tensor([7]), PackedRows([0], [1]), state)
    later = loaded(quantised_file(tmp_path, Quantisation(form)))
    state = State(later.shape, 2)
    state.put(1, StateFile(later.fingerprint, later.shape).decode([kept]).snapshot)
    assert torch.equal(Model(later).forward(torch.tensor([7]), PackedRows([1], [1]), state), expected)


@pytest.mark.parametrize("form", ["", *FORMATS])
def test_the_size_is_known_before_anything_is_loaded(form):
    """But for the embedding, what a layer has beside its matrices, and ids without logits."""
    quant = Quantisation(form)
    shape = ModelShape(2, 128, 512, 512, 32, 32, 32, 32)
    model = weights.from_tensors(dict(random_tensors(TINY)), quant=quant)
    assert shape.count_bytes(torch.float32, quant) == pytest.approx(model.num_bytes, rel=0.01)


def test_more_slots_fit_beside_a_quantised_model(monkeypatch):
    shape = ModelShape(32, 4096, 16384, 65536, 128, 128, 96, 480)
    half = torch.float16
    sizes = {form: shape.count_bytes(half, Quantisation(form)) for form in ("", "int8", "int4")}
    assert sizes["int8"] <= 7.4e9 + 65536 * 4096 * 2  # of weights that a step reads; and the embedding
    assert sizes["int4"] <= 4.3e9 + 65536 * 4096 * 2
    monkeypatch.setattr(memory, "free_memory", lambda device: 20 * 2**30)
    slots = [MemoryPlan(CPU, shape, half, half, quant=Quantisation(form)).slots(0, 1000, "m") for form in sizes]
    assert slots[0] < slots[1] < slots[2]
    gpu = torch.device("cuda")
    plans = [build.plan_memory(Config(), shape, gpu, half, half, 512, Quantisation(form, head=False)) for form in sizes]
    assert plans[1].buffers == plans[2].buffers == plans[0].buffers + 2 * 4096 * 16384  # room for one matrix in fp16


def test_the_settings_choose_the_format(tmp_path):
    stored = Stored(Quantisation("int8", head=False), "f" * 32)
    assert build.choose_quant(Config(), "m", None) == Quantisation()
    assert build.choose_quant(Config(quant="none"), "m", None) == Quantisation()
    assert build.choose_quant(Config(quant="nf4", quant_head=False), "m", None) == Quantisation("nf4", head=False)
    assert build.choose_quant(Config(), "m", stored) == build.choose_quant(Config(quant="int8"), "m", stored) == stored.quant
    for settings in ({"quant": "int4"}, {"quant": "none"}):
        with pytest.raises(UsageError, match="m is quantised as int8 but the head already"):
            build.choose_quant(Config(**settings), "m", stored)
    with pytest.raises(UsageError, match="--no-quant-head"):
        build.choose_quant(Config(quant_head=False), "m", Stored(Quantisation("int8"), "f" * 32))
    with pytest.raises(CheckpointError, match="quantised as int8"):
        loaded(quantised_file(tmp_path), quant=Quantisation("int4"))


def test_a_card_that_cannot_run_a_format_is_named(monkeypatch):
    assert supported_formats((9, 0)) == tuple(FORMATS)
    assert "fp8" not in supported_formats((8, 6))
    assert supported_formats((7, 5)) == ()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX A4000")
    build.check_quant(Quantisation("int8"), torch.device("cuda"))
    build.check_quant(Quantisation("fp8"), CPU)
    with pytest.raises(UsageError, match=r"RTX A4000 cannot run it; it can run int8, int4, nf4, fp6, fp5"):
        build.check_quant(Quantisation("fp8"), torch.device("cuda"))


def test_a_width_that_no_scale_fits_is_refused():
    tensors = dict(random_tensors(TINY))
    for i in range(2):
        p = f"blocks.{i}.ffn."
        tensors |= {p + "key.weight": tensors[p + "key.weight"][:500], p + "value.weight": tensors[p + "value.weight"][:, :500]}
    with pytest.raises(CheckpointError, match="feed-forward width 500 is not a multiple of 64"):
        weights.from_tensors(dict(tensors), quant=Quantisation("int8"))
    assert weights.from_tensors(tensors).shape.ffn_width == 500


def test_numbers_that_halves_cannot_hold_are_refused():
    tensors = dict(random_tensors(TINY))
    tensors["blocks.1.ffn.key.weight"] = tensors["blocks.1.ffn.key.weight"].float().index_fill(0, torch.tensor([3]), 1e6)
    with pytest.raises(CheckpointError, match=r"ffn\.key\.weight does not fit into fp16"):
        weights.from_tensors(tensors, quant=Quantisation("int4"))


def without(tensors, key):
    del tensors[key]
    return {}


KEY = "blocks.1.att.key.weight"
BROKEN = {
    "scales missing": (lambda t: without(t, KEY + ".scales"), "misses: blocks.1.att.key.weight.scales"),
    "values missing": (lambda t: without(t, KEY), "misses: blocks.1.att.key.weight"),
    "NaN scales": (lambda t: {KEY + ".scales": t[KEY + ".scales"] * float("nan")}, "not finite"),
    "infinite scales": (lambda t: {KEY + ".scales": t[KEY + ".scales"] * float("inf")}, "not finite"),
    "scales of another shape": (lambda t: {KEY + ".scales": t[KEY + ".scales"][:64].clone()}, "wrong shape"),
    "scales of another type": (lambda t: {KEY + ".scales": t[KEY + ".scales"].half()}, "dtype"),
    "values of another shape": (lambda t: {KEY: t[KEY][:, :64].clone()}, "wrong shape"),
    "values of another type": (lambda t: {KEY: t[KEY].view(torch.uint8)}, "dtype"),
    "a plain matrix": (lambda t: {KEY: torch.zeros(128, 128)}, "dtype"),
    "not transposed": (
        lambda t: {"blocks.0.ffn.value.weight": t["blocks.0.ffn.value.weight"].t().contiguous()},
        "wrong shape",
    ),
    "NaN in what is plain": (lambda t: {"blocks.0.att.w1": t["blocks.0.att.w1"] * float("nan")}, "not finite"),
    "scales of what has none": (lambda t: {"emb.weight.scales": torch.ones(512, 1)}, "unknown tensors"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line(name, tmp_path):
    change, words = BROKEN[name]
    with pytest.raises(CheckpointError) as refusal:
        loaded(quantised_file(tmp_path, change=change))
    assert words in refusal.value.message
    assert "\n" not in refusal.value.message


def test_e4m3_that_is_no_number_is_refused(tmp_path):
    def change(tensors):
        values = tensors[KEY].view(torch.uint8).clone()
        values[3, 5] = 0xFF
        return {KEY: values.view(torch.float8_e4m3fn)}

    with pytest.raises(CheckpointError, match="not finite"):
        loaded(quantised_file(tmp_path, Quantisation("fp8"), change))


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ("{", "do not say"),
        ("[1]", "do not say"),
        ('{"quant": "int8"}', "do not say"),
        ('{"quant": "int8", "head": 1, "version": 1, "source": "' + "f" * 32 + '"}', "do not say"),
        ('{"quant": "int8", "head": true, "version": 1, "source": "../x"}', "do not say"),
        ('{"quant": "int3", "head": true, "version": 1, "source": "' + "f" * 32 + '"}', "int3"),
        ('{"quant": "int8", "head": true, "version": 2, "source": "' + "f" * 32 + '"}', "version 2"),
        ('{"quant": "int4", "head": true, "version": 1, "source": "' + "f" * 32 + '"}', "wrong shape"),
        ('{"quant": "int8", "head": false, "version": 1, "source": "' + "f" * 32 + '"}', "unknown tensors"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(about, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        loaded(quantised_file(tmp_path, metadata={QUANTISED: about}))


def test_a_cut_file_is_refused(tmp_path):
    path = quantised_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    assert stored_as(path) is None
    with pytest.raises(CheckpointError, match="not a readable safetensors"):
        loaded(path)


def test_a_quantised_file_without_its_metadata_is_no_checkpoint(tmp_path):
    path = quantised_file(tmp_path)
    save_file(load_file(path), path)
    with pytest.raises(CheckpointError, match="not an RWKV-7 checkpoint"):
        loaded(path)


def test_a_glance_tells_what_is_quantised(tmp_path):
    assert is_quantised(quantised_file(tmp_path))
    assert not is_quantised(source_file(tmp_path))
    plain = tmp_path / "plain.st"
    save_file(random_tensors(TINY), plain)
    assert not is_quantised(plain)
    for content in (b"", bytes(8), b"\2\0\0\0\0\0\0\0[]", b"\xff" * 20):
        plain.write_bytes(content)
        assert not is_quantised(plain)


def test_the_command_writes_a_file_or_says_in_one_line_why_not(tmp_path, capsys):
    source, target = source_file(tmp_path), tmp_path / "out.safetensors"

    def command(*argv: object) -> tuple[int, str]:
        code = quantize_file([str(word) for word in argv], {}, [])
        printed = capsys.readouterr()
        return code, printed.out or printed.err.splitlines()[-1]

    code, said = command(tmp_path / "m", target, "--quant", "fp8", "--device", "cpu")
    assert (code, "MiB" in said) == (0, True)
    assert loaded(target).quant == Quantisation("fp8")
    assert target.stat().st_mode == source.stat().st_mode, "readable for whom other files are"
    kept = target.read_bytes()
    refused = {
        (source, target): "--quant",
        (source, target, "--quant", "int3"): "int3",
        (tmp_path / "none", target, "--quant", "int8"): "no such checkpoint",
        (source, tmp_path / "out.pth", "--quant", "int8"): "must end in .safetensors",
        (source, tmp_path / "no" / "x.safetensors", "--quant", "int8"): "no folder",
        (target, target, "--quant", "int8"): "same file",
        (target, tmp_path / "twice.safetensors", "--quant", "int8"): "quantised already",
        (source, target, "--quant", "int8", "--device", "cuda:99"): "sees no such GPU",
    }
    for argv, words in refused.items():
        code, said = command(*argv)
        assert (code, words in said) == (2, True), said
    (tmp_path / "dir.safetensors").mkdir()
    code, said = command(source, tmp_path / "dir.safetensors", "--quant", "int8", "--device", "cpu")
    assert (code, "cannot write" in said) == (74, True), said
    assert target.read_bytes() == kept
    assert not list(tmp_path.glob("*.part"))
