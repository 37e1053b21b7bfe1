"""RWKV-6 against a float64 oracle, against splits and packings of itself, against the `rwkv` package and a real checkpoint."""

import functools
import importlib.util
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import adapter_files
import numpy as np
import pytest
import torch
from models import SHARED
from rwkv6_models import SHAPES6, TINY6, Oracle6, random_tensors6
from test_model import greedy, random_split, run

from rwkv_batch.config import Config
from rwkv_batch.engine.build import build_engine_loop
from rwkv_batch.engine.engine_loop import EngineLoop
from rwkv_batch.errors import CheckpointError, Unprocessable
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.adapters import adapter_file
from rwkv_batch.model.architectures import model_class
from rwkv_batch.model.packed_rows import CHUNK, PackedRows
from rwkv_batch.model.quantized import FORMATS, Quantisation
from rwkv_batch.model.rwkv6 import ops
from rwkv_batch.model.rwkv6.forward import Model
from rwkv_batch.model.state import State
from rwkv_batch.request import Failure, Finish, Request
from rwkv_batch.session_messages import Session
from rwkv_batch.sessions.state_file import StateFile, Stored
from sampling.params import SamplingParams

TOLERANCE = 1e-4  # max abs error of a logit, fp32 against float64


def model_of(tensors: dict[str, torch.Tensor], **options) -> Model:
    weights = weights_module.from_tensors(dict(tensors), **options)
    assert weights.architecture == "RWKV-6"
    assert model_class(weights.architecture) is Model
    return Model(weights)


def assert_equals_the_oracle(tensors, tokens: list[int], splits: list[list[int]]) -> None:
    oracle, model = Oracle6({key: tensor.float().numpy() for key, tensor in tensors.items()}), model_of(tensors)
    expected = oracle.logits(tokens)[:, model.weights.output_ids.numpy()]
    for lengths in splits:
        state = State(model.weights.shape, 3)
        error = np.abs(run(model, tokens, lengths, state=state).numpy() - expected).max()
        assert error <= TOLERANCE, f"split {lengths}: error {error}"
        assert np.abs(state.wkv[:, 1].numpy() - oracle.wkv).max() <= TOLERANCE
        assert state.elapsed == [0, len(tokens), 0]


@pytest.mark.parametrize("name", SHAPES6)
def test_logits_equal_the_oracle_for_any_split(name):
    rng = random.Random(name)
    tokens = [rng.randrange(512) for _ in range(75)]
    splits = [[75], [1] * 75, *(random_split(rng, 75) for _ in range(2))]
    assert_equals_the_oracle(random_tensors6(SHAPES6[name]), tokens, splits)


def test_decays_of_any_strength_neither_overflow_nor_lose_later_tokens():
    """exp(-exp(8)) is 0, exp(-exp(-6)) nearly 1; both in one chunk."""
    rng = random.Random(8)
    tokens = [rng.randrange(512) for _ in range(2 * CHUNK + 5)]
    tensors = dict(random_tensors6(SHAPES6["small heads"], decay=8.0))
    for key in [key for key in tensors if key.endswith("time_decay_w2")]:
        tensors[key] = tensors[key] * 8  # the same channel swings from one token to the next
    assert_equals_the_oracle(tensors, tokens, [[len(tokens)], [1] * len(tokens), [CHUNK + 1, 2, CHUNK + 2]])
    for key in [key for key in tensors if key.endswith("time_decay")]:
        tensors[key] = torch.full_like(tensors[key], 100.0)  # an infinite -log w
    assert torch.isfinite(run(model_of(tensors), tokens, [len(tokens)])).all()


@pytest.mark.parametrize("pairs", [1, 2**21])
def test_rows_do_not_see_one_another(pairs, monkeypatch):
    monkeypatch.setitem(ops.PAIRS, "cpu", pairs)
    rng = random.Random(1)
    model = model_of(random_tensors6())
    state = State(model.weights.shape, 8)
    for t in (state.shift, state.wkv):
        t.fill_(float("nan"))  # a slot nobody cleared must never leak
    texts = {slot: [rng.randrange(512) for _ in range(rng.randrange(30, 70))] for slot in (0, 2, 3, 5, 6)}
    alone = {slot: run(model, text, [len(text)])[-1] for slot, text in texts.items()}
    state.clear(list(texts))
    fed, last = dict.fromkeys(texts, 0), {}
    while any(fed[slot] < len(text) for slot, text in texts.items()):
        live = [slot for slot, text in texts.items() if fed[slot] < len(text) and rng.random() < 0.8]
        rng.shuffle(live)
        if not live:
            continue
        idle = [slot for slot in range(8) if slot not in live]
        before = state.wkv[:, idle].clone(), state.shift[:, :, idle].clone()
        lengths = [min(rng.choice((1, 1, 7, CHUNK, 70)), len(texts[slot]) - fed[slot]) for slot in live]
        tokens = [t for s, n in zip(live, lengths, strict=True) for t in texts[s][fed[s] : fed[s] + n]]
        logits = model.forward(torch.tensor(tokens), PackedRows(live, lengths), state)
        for row, (slot, n) in enumerate(zip(live, lengths, strict=True)):
            fed[slot] += n
            last[slot] = logits[row]
        for one, two in zip(before, (state.wkv[:, idle], state.shift[:, :, idle]), strict=True):
            assert torch.equal(one.view(torch.int32), two.view(torch.int32)), "an idle slot changed"
    for slot in texts:
        assert (last[slot] - alone[slot]).abs().max() <= TOLERANCE


def test_what_was_drawn_last_is_fed_and_narrow_states_and_weights_stay_close():
    tokens = list(range(3, 60))
    exact = run(model_of(random_tensors6()), tokens, [57])
    for dtype, wkv_dtype, bound in ((torch.float16, torch.float16, 1e-2), (torch.bfloat16, torch.float32, 4e-2)):
        model = model_of(random_tensors6(), dtype=dtype)
        state = State(model.weights.shape, 3, wkv_dtype=wkv_dtype)
        got = run(model, tokens, [40, 1, 16], state=state)
        assert (got - exact).norm() / exact.norm() < bound
        twin = State(model.weights.shape, 3, wkv_dtype=wkv_dtype)
        twin.put_many([0, 1, 2], state.take(1))
        twin.last_ids[:] = 7
        drawn = model.forward(None, PackedRows([0, 1], [1, 1]), twin)
        fed = model.forward(torch.tensor([7]), PackedRows([2], [1]), twin)
        assert (drawn - fed).abs().max() < 0.05


QUICK = ("int8", "nf4")


@pytest.mark.parametrize(
    "form", [*QUICK, *(pytest.param(form, marks=pytest.mark.long) for form in FORMATS if form not in QUICK)]
)
def test_quantised_matrices_run_as_what_they_stand_for(form):
    tensors = random_tensors6()
    found = weights_module.from_tensors(dict(tensors), quant=Quantisation(form))
    quantised = {key for key in found.shape.matrices(Quantisation(form)) if key != "head.weight"}
    assert len(quantised) == 2 * 8
    same = dict(tensors)
    names = {"gate": "att.gate", "receptance": "att.receptance", "key": "att.key", "value": "att.value", "output": "att.output"}
    names |= {"ffn_key": "ffn.key", "ffn_receptance": "ffn.receptance", "ffn_value": "ffn.value"}
    for i, layer in enumerate(found.layers):
        for own, published in names.items():
            dense = getattr(layer, own).dense()
            same[f"blocks.{i}.{published}.weight"] = dense.t() if own == "ffn_value" else dense
    head = torch.zeros(512, 128)
    head[found.output_ids] = found.head.dense()
    same["head.weight"] = head
    tokens = list(range(5, 45))
    expected, got = run(model_of(same), tokens, [40]), run(Model(found), tokens, [39, 1])
    assert (got - expected).norm() / expected.norm() < (2e-2 if form == "int8" else 1e-4)  # few rows times bytes: in bf16
    assert found.fingerprint != model_of(tensors).weights.fingerprint


def test_an_adapter_is_merged(tmp_path):
    tensors = {key: tensor.float() for key, tensor in random_tensors6().items()}
    file, formula = adapter_files.lora(tensors, tmp_path, layers=[1])
    changed = dict(tensors)
    for name in ("att.receptance", "ffn.value"):
        prefix = f"blocks.1.{name}"
        changed[f"{prefix}.weight"] = torch.from_numpy(formula(tensors[f"{prefix}.weight"].double().numpy(), prefix)).float()
    merged = weights_module.from_tensors(dict(tensors), adapters=[adapter_file.read(file)]).layers[1]
    wanted = weights_module.from_tensors(changed).layers[1]
    for name in ("receptance", "ffn_value"):
        assert torch.allclose(getattr(merged, name).dense(), getattr(wanted, name).dense(), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("blocks.1.att.time_decay_w1"), "misses: blocks.1.att.time_decay_w1"),
        (lambda t: t.pop("blocks.0.att.time_faaaa"), "not an RWKV-6 checkpoint"),
        (lambda t: t.update({"blocks.0.att.time_faaaa": torch.zeros(3, 64)}), "3 heads of 64 values"),
        (lambda t: t.update({"blocks.0.att.gate.weight": torch.zeros(128, 64)}), "wrong shape"),
        (lambda t: t.update({"blocks.0.att.time_maa_w2": torch.zeros(5 * 32, 128)}), "3-dimensional"),
        (lambda t: t.update({"blocks.1.att.more": torch.zeros(4)}), "unknown tensors"),
        (lambda t: t.update({"blocks.3.ln1.bias": torch.zeros(128)}), "not numbered"),
        (lambda t: t.update({"ln_out.bias": torch.zeros(128, dtype=torch.int32)}), "dtype"),
        (lambda t: t.update({"ln_out.bias": torch.full((128,), float("nan"))}), "not finite"),
    ],
)
def test_a_broken_checkpoint_is_refused_in_one_line(change, words):
    tensors = dict(random_tensors6())
    change(tensors)
    with pytest.raises(CheckpointError) as refusal:
        weights_module.from_tensors(tensors)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@contextmanager
def looped(folder: Path, tensors: dict[str, torch.Tensor], **settings) -> Iterator[EngineLoop]:
    """An engine put together as the server's is, with what it delivered as `events`."""
    torch.save(tensors, folder / "m.pth")
    events = []
    config = Config(model_path=str(folder / "m.pth"), slots=4, state_db=str(folder / "db"), prefix_min_tokens=32, **settings)
    loop = build_engine_loop(config, lambda batch: events.extend(batch.get(b"test", ())))
    loop.events = events
    try:
        yield loop
    finally:
        loop.stop()
        loop.run()


@pytest.fixture
def loop(tmp_path):
    """An engine on the CPU."""
    with looped(tmp_path, random_tensors6(SHAPES6["small heads"], 256), device="cpu") as found:
        yield found


def answer(loop, prompt: list[int], **fields) -> tuple[list[int], Finish]:
    """The greedy ids behind a prompt, and how the row ended."""
    sampling = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0, ignore_eos=True, logprobs=0)
    request = Request(id=f"r{loop.last_step}", prompts=[prompt], **{"sampling": sampling, "max_tokens": 8, **fields})
    loop.submit(request, b"test")
    ids, deadline = [], time.monotonic() + 60
    while time.monotonic() < deadline:
        loop.step()
        events = loop.events[:]
        loop.events.clear()
        for event in events:
            assert not isinstance(event, Failure), event
            ids += [token.id for delta in event.deltas for token in delta.logprobs or ()]
            if event.finishes:
                return ids, event.finishes[0]
    raise AssertionError("no end")


def test_sessions_and_cached_prefixes_go_on_where_they_were(loop):
    rng = random.Random(3)
    begin, more = ([rng.randrange(1, 256) for _ in range(n)] for n in (90, 20))
    expected, finish = answer(loop, begin + more, cache=False)
    assert (len(expected), finish.reason) == (8, "length")
    answer(loop, begin, max_tokens=0, session=Session(name="s", separate=False))
    assert answer(loop, more, session=Session(name="s", separate=False))[0] == expected
    assert answer(loop, begin + more)[1].cached_tokens == 0
    found, finish = answer(loop, begin + more)
    assert finish.cached_tokens > 0
    assert found == expected


def test_a_state_survives_its_file():
    model = model_of(random_tensors6(SHAPES6["small heads"]))
    state = State(model.weights.shape, 2)
    run(model, [1, 2, 3], [3], state=state)
    file = StateFile(model.weights.fingerprint, model.weights.shape)
    data = b"".join(bytes(piece) for piece in file.encode(Stored(state.take(1), 0)))
    assert len(data) <= file.size(torch.float32, torch.float32)
    found = file.decode([data]).snapshot
    assert found.wkv.shape == (3, 8, 8, 8)
    assert torch.equal(found.wkv, state.wkv[:, 1])
    assert torch.equal(found.shift, state.shift[:, :, 1])
    with pytest.raises(Unprocessable, match="another model"):
        StateFile("0" * 32, model.weights.shape).decode([data])


@functools.cache
def package_in(folder: str) -> ModuleType:
    """The package's module as it is without RWKV-7, whatever was imported before."""
    spec = importlib.util.spec_from_file_location("rwkv_without_7", f"{folder}/model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(monkeypatch):
    """The package rwkv, which also looks into the environment while it runs."""
    found = importlib.util.find_spec("rwkv")
    if found is None:
        pytest.skip("needs the PyPI package rwkv")
    for name in ("RWKV_V7_ON", "RWKV_JIT_ON", "RWKV_CUDA_ON"):
        monkeypatch.setenv(name, "0")
    return package_in(found.submodule_search_locations[0])


def assert_same_greedy_ids(package, path, tensors, vocab: int, num_prompts: int, count: int = 64) -> None:
    """A first divergence is allowed only where the two best logits are within 1e-3, and at most once in 1,000 tokens."""
    torch.save({key: tensor.float() for key, tensor in tensors.items()}, path)  # it would apply ln0 in the type of the file
    peer = package.RWKV(model=str(path.with_suffix("")), strategy="cpu fp32", verbose=False)
    model, rng = model_of(tensors), random.Random(vocab)
    diverged = total = 0
    for _ in range(num_prompts):
        prompt = [rng.randrange(1, vocab) for _ in range(rng.randrange(1, 40))]
        ours, margins = greedy(model, prompt, count)
        logits, peer_state = peer.forward(list(prompt), None)
        theirs = []
        for _ in range(count):
            theirs.append(int(logits.argmax()))
            logits, peer_state = peer.forward([theirs[-1]], peer_state)
        total += count
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            assert margins[at] < 1e-3, f"diverged at token {at} with margin {margins[at]}"
            diverged += 1
    assert diverged <= max(1, total // 1000)


@pytest.mark.parametrize("num_prompts", [1, pytest.param(16, marks=pytest.mark.long)])
def test_greedy_ids_equal_the_rwkv_package(package, tmp_path, num_prompts):
    assert_same_greedy_ids(package, tmp_path / "m.pth", random_tensors6(TINY6, 4096, 1), 4096, num_prompts)


@pytest.mark.parametrize("name", [pytest.param("tiny", marks=pytest.mark.long), "small heads"])
def test_a_tuned_state_in_the_checkpoint_is_where_rows_begin(package, name, tmp_path):
    """The package turns the file's [value, key] round for itself."""
    tensors = {key: tensor.float() for key, tensor in random_tensors6(SHAPES6[name]).items()}
    layers, width, size = SHAPES6[name][:3]
    generator = torch.Generator().manual_seed(1)
    for i in range(layers):
        tensors[f"blocks.{i}.att.time_state"] = torch.randn(width // size, size, size, generator=generator) * 0.5
    torch.save(tensors, tmp_path / "m.pth")
    peer = package.RWKV(model=str(tmp_path / "m"), strategy="cpu fp32", verbose=False)
    model, tokens = model_of(tensors), [5, 9, 200, 33, 77]
    state = State(model.weights.shape, 3)
    state.put(1, state.snapshot_of(model.weights.start))
    expected = peer.forward(list(tokens), None)[0][model.weights.output_ids]
    found = run(model, tokens, [3, 1, 1], state=state)[-1]
    assert (found - expected).abs().max() <= TOLERANCE
    assert (run(model, tokens, [5])[-1] - expected).abs().max() > 0.01


@pytest.fixture(scope="module")
def real6() -> dict[str, torch.Tensor]:
    """A real checkpoint of others with heads of 8, where it is at hand."""
    path = SHARED / "checkpoints" / "tiny-rwkv-6v0-3m.npz"
    if not path.is_file():
        pytest.skip("needs the file checkpoints/tiny-rwkv-6v0-3m.npz beside the repository")
    return {key: torch.from_numpy(value) for key, value in np.load(path).items()}


def test_real_checkpoint_of_others(real6):
    tokens = list(b'"in a ')
    assert_equals_the_oracle(real6, tokens, [[len(tokens)], [1] * len(tokens), [4, 1, len(tokens) - 5]])


@pytest.mark.long
def test_greedy_ids_of_a_real_checkpoint_of_others(real6, package, tmp_path):
    tokens = list(b'"in a world of letters that nobody reads, one more sentence is no harm')[:64]
    assert_equals_the_oracle(real6, tokens, [[len(tokens)], [1] * len(tokens), [5, 1, len(tokens) - 6]])
    assert_same_greedy_ids(package, tmp_path / "m.pth", real6, 256, 1)
