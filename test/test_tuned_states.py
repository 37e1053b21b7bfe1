"""Tuned states: their files, what is loaded while rows run, and what rows, prefixes and sessions make of them."""

import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from models import TINY, random_tensors, random_weights
from oracle import Oracle
from safetensors.torch import save_file
from test_worker import GREEDY, Harness

from rwkv_batch.engine import engine_loop
from rwkv_batch.engine.engine import Engine
from rwkv_batch.errors import Conflict, InvalidRequest, NotFound, RwkvBatchError, StorageFailed, UsageError
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import ModelShape
from rwkv_batch.scheduling.prefix_cache import PrefixCache
from rwkv_batch.served.variants import ListVariants, LoadState, RemoveStates, SetWeights
from rwkv_batch.session_messages import Export, Fork, Import, Session
from rwkv_batch.sessions.pool import StatePool
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.state_file import StateFile
from rwkv_batch.tuned import registry, state_file
from rwkv_batch.tuned.registry import TunedStates, orders_of
from rwkv_batch.tuned.state_file import read_state
from sampling.reference import ReferenceSampler

LAYERS, HEADS = TINY[0], TINY[1] // 64
SHAPE = ModelShape(LAYERS, TINY[1], 4 * TINY[1], 256, 32, 32, 32, 32)


def tensors_of(seed: int, layers: int = LAYERS, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"blocks.{i}.att.time_state": (torch.randn(heads, 64, 64, generator=generator) * 0.5).to(dtype) for i in range(layers)
    }


def write(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    if path.suffix == ".pth":
        torch.save(tensors, path)
    else:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return str(path)


def read(path: Path, **how):
    return read_state(path, SHAPE, field="state_filename", **how)


# --- files ---


def test_the_axes_are_those_of_the_oracle(tmp_path):
    """A `.pth` has rows of values and columns of keys; what converters wrote is the other way round."""
    tensors = tensors_of(1)
    state = read(Path(write(tmp_path / "a.pth", tensors)))
    oracle = Oracle({key: tensor.double() for key, tensor in random_tensors(TINY, 256).items()})
    oracle.wkv = np.stack([tensors[f"blocks.{i}.att.time_state"].double().numpy() for i in range(LAYERS)])
    tokens = [5, 77, 130, 9]
    ids = random_weights(TINY, 256).output_ids.numpy()
    wanted = oracle.logits(tokens)[-1][ids]

    def logits(wkv: torch.Tensor) -> np.ndarray:
        model, slots = Model(random_weights(TINY, 256)), State(SHAPE, 1)
        slots.put(0, slots.snapshot_of(wkv))
        return model.forward(torch.tensor(tokens), PackedRows([0], [4]), slots)[0].double().numpy()

    assert np.abs(logits(state.wkv) - wanted).max() < 1e-3
    swapped = {key: tensor.mT for key, tensor in tensors.items()}
    assert np.abs(logits(read(Path(write(tmp_path / "b.pth", swapped))).wkv) - wanted).max() > 0.1
    for path in (tmp_path / "c.st", tmp_path / "d.safetensors"):
        found = read(Path(write(path, swapped)))
        assert found.transposed
        assert (found.key, state.transposed) == (state.key, False)
    assert read(tmp_path / "b.pth", transpose=True).key == state.key
    assert read(tmp_path / "c.st", transpose=False).key != state.key


@pytest.mark.parametrize("name", ["random", "real"])
def test_a_state_is_to_the_rwkv_package_what_it_is_here(tmp_path, request, name):
    """Its states lie one layer after another, three parts each, of which the second is the one that is tuned."""
    os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="0", RWKV_CUDA_ON="0")
    package = pytest.importorskip("rwkv.model", reason="needs the PyPI package rwkv")
    if name == "real":
        file = request.getfixturevalue("real_checkpoint") / "rwkv7-tiny-L12-D64-V256.pth"
    else:
        torch.save(random_tensors(TINY, 256), file := tmp_path / "m.pth")
    weights, tokens = weights_module.load(file), [5, 77, 130, 9] * 8
    shape = weights.shape
    path = Path(write(tmp_path / "a.pth", tensors := tensors_of(1, shape.num_layers, shape.num_heads)))
    slots = State(shape, 1)
    slots.put(0, slots.snapshot_of(read_state(path, shape, field="state").wkv))
    found = Model(weights).forward(torch.tensor(tokens), PackedRows([0], [len(tokens)]), slots)[0]
    peer = package.RWKV(model=str(file.with_suffix("")), strategy="cpu fp32")
    state = peer.generate_zero_state()
    for i in range(shape.num_layers):
        state[3 * i + 1] = tensors[f"blocks.{i}.att.time_state"].float()
    wanted = peer.forward(tokens, state)[0][weights.output_ids]
    assert (found - wanted).abs().max() < 1e-4 * max(1, wanted.abs().max())
    assert (found - peer.forward(tokens, None)[0][weights.output_ids]).abs().max() > 1e-2


def damaged(kind: str, path: Path) -> None:
    """Write a file that cannot be used."""
    tensors = tensors_of(2)
    first = "blocks.0.att.time_state"
    if kind == "code":
        path.write_bytes(pickle.dumps(os.system))
    elif kind == "code in a zip":
        torch.save({first: tensors[first], "x": threading.Lock}, path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        write(path, tensors)
        path.write_bytes(path.read_bytes()[:-2000])
    elif kind == "integers":
        write(path, {key: tensor.to(torch.int32) for key, tensor in tensors.items()})
    elif kind == "a layer less":
        write(path, tensors_of(2, LAYERS - 1))
    elif kind == "other heads":
        write(path, tensors_of(2, LAYERS, HEADS + 1))
    elif kind == "a gap":
        write(path, {key: tensor for key, tensor in tensors_of(2, LAYERS + 1).items() if ".1." not in key})
    elif kind == "foreign":
        write(path, {**tensors, "blocks.0.att.x_r": torch.zeros(4)})
    elif kind == "offset":
        write(path, {**tensors, "blocks.0.att.time_offset": torch.zeros(128)})
    elif kind == "no tensors":
        write(path, {})
    elif kind == "nothing":
        write(path, {"emb.weight": torch.zeros(4)})
    elif kind == "nan":
        write(path, {**tensors, first: tensors[first].clone().fill_(float("nan"))})
    elif kind == "infinite":
        write(path, {**tensors, first: tensors[first].clone().fill_(float("inf"))})
    elif kind == "large":
        write(path, {f"blocks.{i}.att.time_state": torch.zeros(9, 64, 64) for i in range(40)})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("code", "zip"), ("code in a zip", "nothing in it was run"), ("empty", "zip"), ("cut", "zip"),
        ("integers", "int32"), ("a layer less", "1 layers of"), ("other heads", "of [3, 64, 64], the model 2 of [2, 64, 64]"),
        ("a gap", "layer 1 is missing"), ("foreign", "more than a state"), ("offset", "time_offset"),
        ("no tensors", "instead of named tensors"), ("nothing", "no time_state"),
        ("nan", "not finite"), ("infinite", "not finite"), ("large", "more than a state"),
    ],
)  # fmt: skip
def test_files_that_are_refused(tmp_path, kind, words):
    path = tmp_path / "bad.pth"
    damaged(kind, path)
    with pytest.raises(RwkvBatchError) as raised:
        read(path)
    error = raised.value
    assert words in error.message
    assert error.message.startswith("state_filename: bad.pth: ")
    assert str(tmp_path) not in error.message
    assert (error.status, error.param) == (422, "state_filename")


def test_a_safetensors_file_that_is_cut_or_none_is_refused(tmp_path):
    path = tmp_path / "bad.st"
    write(path, tensors_of(2))
    for data in (path.read_bytes()[:-100], b"\xff" * 4096):
        path.write_bytes(data)
        with pytest.raises(RwkvBatchError, match="safetensors"):
            read(path)


def test_a_number_that_fp16_does_not_have(tmp_path):
    tensors = {key: tensor.float() for key, tensor in tensors_of(2).items()}
    tensors["blocks.1.att.time_state"][0, 0, 0] = 70000.0
    path = Path(write(tmp_path / "a.pth", tensors))
    assert read(path).wkv[1, 0, 0, 0] == 70000
    with pytest.raises(RwkvBatchError, match="70000"):
        read(path, half=True)


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    path = Path(write(tmp_path / "a.pth", tensors_of(2)))

    def changing(file: Path):
        tensors = {key: tensor.clone() for key, tensor in real(file).items()}
        write(file, tensors_of(3))
        os.utime(file, ns=(1, 1))
        return tensors

    real = state_file.read_file
    monkeypatch.setattr(state_file, "read_file", changing)
    with pytest.raises(Conflict, match="changed"):
        read(path)


def test_states_of_the_command_line(tmp_path):
    (tmp_path / "states").mkdir()
    for name in ("a.pth", "states/b.pth"):
        (tmp_path / name).write_bytes(b"x")
    orders = orders_of(f"one={tmp_path}/a.pth, two words = b.pth", str(tmp_path / "states"))
    assert [(order.name, Path(order.files[0]).name) for order in orders] == [("one", "a.pth"), ("two words", "b.pth")]
    for wrong in ("x", "=a.pth", "a=", "a=nothing.pth", f"a={tmp_path}/a.pth,a={tmp_path}/a.pth"):
        with pytest.raises(UsageError, match="--state"):
            orders_of(wrong, None)


# --- what is loaded ---


class Tuned(Harness):
    """A worker with tuned states."""

    def __init__(self, folder: Path, **fields):
        super().__init__(**fields)
        self.folder = folder
        self.worker.tuned = self.tuned = TunedStates(self.engine.state, max_states=8)

    def load(self, name: str, seed: int = 1, **more) -> str:
        """Load a state made of `seed`; returns its key."""
        path = write(self.folder / f"{seed}.pth", tensors_of(seed))
        self.tuned.load(LoadState(name=name, files=[path], **more))
        return self.key(name)

    def key(self, name: str) -> str:
        return next(variant.key for variant in self.tuned.variants if variant.name == name)

    def text(self, prompt: list[int], **fields) -> str:
        id = f"r{len(self.finishes)}"
        self.submit(id, [prompt], **fields)
        self.run()
        return self.texts[id][0]


def said(order_or_error, tuned: TunedStates):
    """Carry out an order and wait for what comes of it."""
    answers, arrived = [], threading.Event()
    tuned.execute(order_or_error, lambda result: (answers.append(result), arrived.set()))
    assert arrived.wait(30)
    return answers[0]


PROMPT = [7, 100, 33, 21, 5]


def test_rows_begin_with_the_state_they_name(tmp_path):
    harness = Tuned(tmp_path)
    first, second = harness.load("first", 1), harness.load("second", 2)
    plain = harness.text(PROMPT)
    texts = [harness.text(PROMPT, state=key) for key in (first, second, "", first)]
    assert len({plain, *texts}) == 3
    assert (texts[2], texts[3]) == (plain, texts[0])
    harness.submit("many", [PROMPT] * 3, state=first, copies=2)
    harness.submit("others", [PROMPT] * 3)
    harness.run()
    assert set(harness.texts["many"].values()) == {texts[0]}
    assert set(harness.texts["others"].values()) == {plain}


def test_loading_changes_no_row_that_runs(tmp_path):
    quiet, harness = Tuned(tmp_path), Tuned(tmp_path)
    prompts = [[3 + i, 40, 50 + i] for i in range(6)]
    key = harness.load("s", 1)
    quiet.load("s", 1)
    for one in (quiet, harness):
        one.submit("plain", prompts[:3], max_tokens=40)
        one.submit("tuned", prompts[3:], max_tokens=40, state=key)
    quiet.run()
    for step in range(30):
        harness.worker.step()
        match step:
            case 5:
                harness.load("other", 2)
            case 10:
                harness.load("s", 3, replace=True)
            case 15:
                said(RemoveStates(), harness.tuned)
    harness.run()
    for id in ("plain", "tuned"):
        assert harness.texts[id] == quiet.texts[id]
    with pytest.raises(NotFound):
        harness.submit("late", [PROMPT], state=key)


def test_prefixes_of_different_states_are_not_mixed(tmp_path):
    harness = Tuned(tmp_path, budget=256)
    harness.scheduler.prefixes = PrefixCache(2**30, every_tokens=64)
    prompt = [1 + (i * 37) % 250 for i in range(200)]
    keys = ["", harness.load("a", 1), harness.load("b", 2)]
    cached, states = [], []
    for number in range(6):
        harness.submit(f"{number}", [prompt], state=keys[number % 3], max_tokens=12)
        harness.run()
        cached.append(harness.finishes[f"{number}"][0].cached_tokens)
        states.append(harness.engine.state.take(0).wkv)  # a random model forgets, so its texts would soon be the same
    assert cached == [0, 0, 0, 160, 160, 160]
    for first in range(3):
        for second in range(3, 6):
            assert torch.equal(states[first], states[second]) == (second == first + 3)
    assert harness.scheduler.prefixes.stats()["prefix_hits_total"] == 3


def test_orders(tmp_path):
    harness = Tuned(tmp_path)
    changes = []
    harness.tuned.changed = changes.append
    paths = [write(tmp_path / f"{i}.pth", tensors_of(i)) for i in range(4)]
    first = said(LoadState(name="one", files=paths[:1], temperature=0.5), harness.tuned)
    assert (first.variants[0].name, first.variants[0].temperature, first.transposed) == ("one", 0.5, [False])
    with pytest.raises(Conflict, match="replace"):
        said(LoadState(name="one", files=paths[1:2]), harness.tuned)
    again = said(LoadState(name="one", files=paths[1:2], replace=True), harness.tuned)
    assert again.variants[0].key != first.variants[0].key
    mix = said(LoadState(name="mix", files=paths[:3], original=True, weights=[0.5, 1.0]), harness.tuned)
    assert (mix.variants[1].kind, mix.variants[1].weights) == ("mix", [0.5, 1.0, 0.0, 0.0])
    other = said(SetWeights(name="mix", weights=[1.0], top_p=0.3), harness.tuned).variants[1]
    assert (other.weights, other.top_p, other.key) == ([1.0, 0.0, 0.0, 0.0], 0.3, mix.variants[1].key)
    assert isinstance(said(SetWeights(name="one", weights=[1.0]), harness.tuned), NotFound)
    assert isinstance(said(RemoveStates(name="none"), harness.tuned), NotFound)
    with pytest.raises(StorageFailed, match="--max-states"):
        said(LoadState(name="many", files=paths[:1] * 5, weights=[1.0]), harness.tuned)
    assert [variant.name for variant in said(ListVariants(), harness.tuned).variants] == ["one", "mix"]
    assert [variant.name for variant in said(RemoveStates(name="one"), harness.tuned).variants] == ["mix"]
    assert said(RemoveStates(), harness.tuned).variants == []
    assert [len(variants) for variants in changes] == [1, 1, 2, 2, 1, 0]


def test_one_load_at_a_time_and_none_while_draining(tmp_path, monkeypatch):
    harness = Tuned(tmp_path)
    path = write(tmp_path / "a.pth", tensors_of(1))
    may_go, answers = threading.Event(), []

    def slow(*args, **more):
        assert may_go.wait(30)
        return read_state(*args, **more)

    monkeypatch.setattr(registry, "read_state", slow)
    harness.worker.execute(LoadState(name="slow", files=[path]), answers.append)
    with pytest.raises(Conflict, match="'slow' is being loaded"):
        harness.worker.execute(LoadState(name="other", files=[path]), answers.append)
    may_go.set()
    deadline = time.monotonic() + 30
    while not answers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [variant.name for variant in answers[0].variants] == ["slow"]
    harness.worker.drain()
    with pytest.raises(RwkvBatchError) as raised:
        harness.worker.execute(LoadState(name="late", files=[path]), answers.append)
    assert raised.value.status == 503


def test_an_engine_that_follows_has_what_was_loaded(tmp_path):
    harness, file = Tuned(tmp_path), tmp_path / "engine.states"
    harness.tuned.remember_in(file)
    harness.load("a", 1, temperature=0.25)
    harness.load("gone", 2)
    said(SetWeights(name="m", weights=[1.0]), harness.tuned)  # there is none
    paths = [write(tmp_path / f"{i}.pth", tensors_of(i)) for i in (3, 4)]
    said(LoadState(name="m", files=paths, weights=[1.0]), harness.tuned)
    said(SetWeights(name="m", weights=[0.0, 2.0]), harness.tuned)
    (tmp_path / "2.pth").unlink()
    follower = Tuned(tmp_path)
    follower.load("of the command line", 5)
    follower.tuned.remember_in(file)
    assert [(v.name, v.temperature, v.weights) for v in follower.tuned.variants] == [("a", 0.25, []), ("m", None, [0.0, 2.0])]
    assert follower.key("a") == harness.key("a")
    file.write_bytes(b"damaged")
    follower.tuned.remember_in(file)
    assert [variant.name for variant in follower.tuned.variants] == ["a", "m"]


def test_what_an_engine_without_states_says(tmp_path):
    harness = Harness()
    with pytest.raises(InvalidRequest):
        harness.submit("r", [PROMPT], state="x")
    with pytest.raises(InvalidRequest):
        harness.worker.execute(ListVariants(), print)


# --- sessions ---


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_sessions_remember_what_they_began_with(tmp_path, durability, monkeypatch):
    """Also after a restart, of which the log knows only ids, and in copies and files."""
    monkeypatch.setattr(engine_loop, "IDLE_SECONDS", 0.005)

    def engine() -> Tuned:
        harness = Tuned(tmp_path)
        harness.tuned.load(LoadState(name="a", files=[write(tmp_path / "1.pth", tensors_of(1))]))
        harness.tuned.load(LoadState(name="b", files=[write(tmp_path / "2.pth", tensors_of(2))]))
        file = StateFile(random_weights(TINY, 256).fingerprint, SHAPE)
        harness.pool = StatePool(SessionDatabase(tmp_path / "s.db"), file, torch.device("cpu"), durability=durability)
        harness.worker.sessions = harness.pool
        harness.pool.use(harness.worker.compute)
        return harness

    def turn(harness: Tuned, prompt: list[int], state: str = "", name: str = "s") -> str:
        id = f"r{len(harness.finishes) + len(harness.failures)}"
        harness.submit(id, [prompt], state=state, session=Session(name=name, separate=False), max_tokens=5)
        deadline = time.monotonic() + 60
        while not (harness.finishes.get(id) or harness.failures.get(id)):
            harness.worker.step()
            assert time.monotonic() < deadline
        if id in harness.failures:
            raise harness.failures[id].exception()
        return harness.texts[id][0]

    def command(harness: Tuned, order):
        answers = []
        harness.worker.execute(order, answers.append)
        deadline = time.monotonic() + 60
        while not answers:
            harness.worker.step()
            assert time.monotonic() < deadline
        assert not isinstance(answers[0], Exception), answers[0]

    second = [9, 8, 7]
    first = engine()
    a, b = first.key("a"), first.key("b")
    texts = [turn(first, PROMPT, a), turn(first, second)]
    plain = [turn(first, PROMPT, name="plain"), turn(first, second, name="plain")]
    assert texts[0] != plain[0]
    with pytest.raises(RwkvBatchError) as raised:
        turn(first, second, b)
    assert (raised.value.status, raised.value.param) == (422, "state")
    with pytest.raises(RwkvBatchError, match="another state"):
        turn(first, second, a, name="plain")
    steady = [*texts, turn(first, PROMPT)]
    first.pool.close()
    for path in tmp_path.glob("s.db*"):
        path.unlink()
    earlier = engine()
    assert [turn(earlier, PROMPT, a), turn(earlier, second)] == texts
    earlier.pool.close()
    later = engine()
    with pytest.raises(RwkvBatchError, match="another state"):
        turn(later, second, b)
    command(later, Fork(name="s", copies=["copy"]))
    command(later, Export(name="s", path=str(tmp_path / "file")))
    command(later, Import(name="import", path=str(tmp_path / "file")))
    third = turn(later, PROMPT, a)
    assert [turn(later, PROMPT, name=name) for name in ("copy", "import")] == [third, third]
    for name in ("copy", "import"):
        with pytest.raises(RwkvBatchError, match="another state"):
            turn(later, second, b, name=name)
    assert [*texts, third] == steady
    later.pool.close()


# --- a state merged into the model ---


def test_a_model_with_a_merged_state_begins_with_it(tmp_path):
    merged = weights_module.from_tensors({**random_tensors(TINY, 256), **tensors_of(1)})
    plain = random_weights(TINY, 256)
    assert merged.fingerprint != plain.fingerprint
    harness, begun = Tuned(tmp_path), Harness()
    key = harness.load("s", 1)
    engine = Engine(Model(merged), ReferenceSampler(8, merged.output_ids), State(merged.shape, 8))
    begun.worker.engine = begun.engine = engine
    begun.submit("r", [PROMPT, PROMPT], max_tokens=20, sampling=GREEDY)
    begun.run()
    assert set(begun.texts["r"].values()) == {harness.text(PROMPT, state=key)}
    incomplete = {**random_tensors(TINY, 256), "blocks.0.att.time_state": torch.zeros(HEADS, 64, 64)}
    with pytest.raises(RwkvBatchError, match="misses"):
        weights_module.from_tensors(incomplete)
