"""The GPU engine against the reference ops in fp32 on the same weights, and against itself in other company."""

import random
from types import SimpleNamespace

import pytest
import torch
from models import ROOT

from bench.synth_checkpoint import synth
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.engine.decode_graphs import DecodeGraphs
from rwkv_batch.engine.engine import Engine, Step
from rwkv_batch.engine.prefill_graphs import TOKENS
from rwkv_batch.kernels import compiler, self_check
from rwkv_batch.kernels.gemm import Gemm
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.model import reference_ops
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.request import Request, Sequence
from rwkv_batch.scheduling.plan import Plan, Row
from sampling.params import SamplingParams

pytestmark = pytest.mark.gpu

assert ROOT
# name: (layers, width, ranks of w, a, v, g, shift of the feed-forward key); the published widths, fewer layers
SHAPES = {
    "768": (12, 768, 64, 64, 32, 128, 1.15),
    "2048": (6, 2048, 96, 96, 64, 256, 1.15),
    "2560": (3, 2560, 96, 96, 64, 320, 1.25),
    "4096": (4, 4096, 128, 128, 96, 480, 1.38),
    "320": (3, 320, 32, 32, 16, 64, 1.15),
}
COSINE, RELATIVE = 0.9999, 1e-2  # of all logits together; a single row's cosine may fall to
ROW_COSINE = 0.999
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
BATCHES = (1, 2, 7, 8, 9, 63, 64, 65, 320)
_engines: dict[tuple, Engine] = {}


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return synth(SHAPES[name], vocab=4096, seed=7, device="cuda", place="cuda")


def load(name: str, dtype: torch.dtype) -> weights_module.Weights:
    return weights_module.from_tensors(tensors_of(name), dtype=dtype, device="cuda:0", progress=False)


def engine_of(name: str, slots: int, sizes: list[int] | None = None, wkv_state: str = "fp16", max_tokens: int = 4096) -> Engine:
    key = (name, slots, tuple(sizes or ()), wkv_state)
    if key not in _engines:
        _engines.clear()  # one at a time is enough memory
        config = Config(ops="kernels", wkv_state=wkv_state)
        weights = load(name, torch.float16)
        library = compiler.library()
        _engines[key] = build.build_engine(config, weights, slots, max_tokens=max_tokens, library=library, graph_sizes=sizes)
    return _engines[key]


def compare(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Return the cosine and the relative RMS of all rows together, and assert that no row is far off."""
    got, expected = got.double(), expected.double()
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() >= ROW_COSINE
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0)
    relative = (got - expected).norm() / expected.norm()
    return float(cosine), float(relative)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("wkv_state", ["fp16", "fp32"])
@torch.inference_mode()
def test_logits_equal_the_reference_in_fp32(name, wkv_state):
    """512 decode steps and 4,096 prefilled tokens."""
    if wkv_state == "fp32" and name not in ("768", "320"):
        pytest.skip("the state's type is independent of the width")
    engine = engine_of(name, 16, [8, 16], wkv_state)
    judge = Model(load(name, torch.float32))
    generator = torch.Generator(device="cuda").manual_seed(3)
    tokens = torch.randint(1, 4096, (512, 8), generator=generator, device="cuda")
    slots = [3, 0, 9, 15, 7, 4, 12, 1]
    state = State(judge.weights.shape, 16, device="cuda")
    engine.state.clear(slots)
    got, expected = [], []
    for step in tokens:
        engine.state.last_ids[torch.tensor(slots, device="cuda")] = step
        rows = CapturedRows.decode(torch.tensor(slots, device="cuda"))
        got.append(engine.model.forward(None, rows, engine.state).clone())
        expected.append(judge.forward(step, PackedRows(slots, [1] * 8, torch.device("cuda:0")), state))
    cosine, relative = compare(torch.cat(got), torch.cat(expected))
    print(f"{name} {wkv_state}: 512 decode steps: cosine {cosine:.6f}, relative RMS {relative:.2e}")
    assert cosine >= COSINE
    assert relative <= RELATIVE
    text = torch.randint(1, 4096, (4096,), generator=generator, device="cuda")
    at = torch.arange(15, 4096, 255, device="cuda")
    rows = PackedRows([5], [4096], torch.device("cuda:0"))
    engine.state.clear([5])
    got = engine.model.forward(text, rows, engine.state, logits_of=at).clone()
    expected = judge.forward(text, rows, state, logits_of=at)
    cosine, relative = compare(got, expected)
    print(f"{name} {wkv_state}: 4096 prefilled tokens: cosine {cosine:.6f}, relative RMS {relative:.2e}")
    assert cosine >= COSINE
    assert relative <= RELATIVE
    difference = (engine.state.wkv[:, 5].float() - state.wkv[:, 5]).norm() / state.wkv[:, 5].norm()
    assert difference <= RELATIVE


@pytest.mark.parametrize("name", ["768", "4096"])
@torch.inference_mode()
def test_tiled_weights_change_no_bit(name):
    """Decode steps of all kinds of sizes and prompts: a copy of the matrices gives what they give."""
    _engines.clear()
    device, sizes, found = torch.device("cuda:0"), [1, 8, 16, 40, 64, 128], []
    weights, library = load(name, torch.float16), compiler.library()
    engine = build.build_engine(
        Config(ops="kernels"), weights, 128, max_tokens=512, library=library, graph_sizes=sizes, tiled=True
    )
    ops, model, state = engine.model.ops, engine.model, engine.state
    layers = [(layer.rkv, layer.output, layer.ffn_key, layer.ffn_value) for layer in ops.prepared.layers]
    matrices = [matrix.gemm for matrix in [*sum(layers, ()), ops.prepared.head] if matrix.gemm is not None]
    assert all((matrix.tiled is not None) is ops.gemm.available for matrix in matrices)
    text = torch.randint(1, 4096, (200,), generator=torch.Generator(device="cuda").manual_seed(9), device="cuda")
    ids, slots = torch.arange(1, len(state.last_ids) + 1, device="cuda"), torch.arange(128, device="cuda")
    for _ in range(2):
        state.clear(range(128))
        logits = [model.forward(text, PackedRows([3], [200], device), state).clone()]
        for size in sizes:
            state.last_ids.copy_(ids)
            rows = CapturedRows.decode(slots[:size])
            logits += [model.forward(None, rows, state).clone() for _ in range(2)]
        found.append(logits)
        for matrix in matrices:
            matrix.tiled = None
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["768", "4096"])
@torch.inference_mode()
def test_prefill_equals_token_by_token_decode(name):
    engine = engine_of(name, 16, [8, 16])
    text = torch.randint(1, 4096, (200,), device="cuda")
    device = torch.device("cuda:0")
    engine.state.clear([2, 6, 11])
    whole = engine.model.forward(text, PackedRows([2], [200], device), engine.state).clone()
    for token in text.split(1):
        last = engine.model.forward(token, PackedRows([6], [1], device), engine.state)
    cosine, relative = compare(last, whole)
    assert cosine >= COSINE
    assert relative <= RELATIVE
    cuts = [1, 16, 33, 1, 100, 49]
    for piece in text.split(cuts):
        last = engine.model.forward(piece, PackedRows([11], [len(piece)], device), engine.state)
    cosine, relative = compare(last, whole)
    assert cosine >= COSINE
    assert relative <= RELATIVE


def start(engine: Engine, prompts: dict[int, list[int]]) -> dict[int, int]:
    """Prefill prompts by slot, each alone, and return the ids sampled."""
    ids = {}
    for slot, prompt in prompts.items():
        sequence = Sequence(Request(id=f"r{slot}", prompts=[prompt], sampling=GREEDY, max_tokens=1000), 0)
        sequence.slot = slot
        step = engine.submit(Plan([Row(sequence, prompt, sample=True, start=True)]))
        ids[slot] = engine.collect(step)[0].id
    return ids


def decode(engine: Engine, slots: list[int]) -> list[int]:
    sampled, _ = engine.graphs.replay(slots)
    return sampled.ids.tolist()


@pytest.mark.parametrize(("sizes", "batches"), [([320], BATCHES), ([8], (1, 2, 7, 8)), ([64], (9, 63, 64)), ([1], (1,))])
@torch.inference_mode()
def test_rows_do_not_depend_on_their_company(sizes, batches):
    """In one size of graph a row's greedy ids and its state are the same alone, in any company, and in any slot."""
    num_slots = 400
    engine = engine_of("768", num_slots, sizes)
    rng = random.Random(5)
    prompts = [[rng.randrange(1, 4096) for _ in range(rng.randrange(3, 40))] for _ in range(max(batches))]
    for batch in batches:
        for tensor in (engine.state.shift, engine.state.wkv):
            tensor.fill_(float("nan"))  # what nobody owns must not matter
        slots = rng.sample(range(num_slots), batch)
        start(engine, dict(zip(slots, prompts, strict=False)))
        company = [decode(engine, slots) for _ in range(12)]
        picked = rng.sample(range(batch), min(batch, 4))
        others = rng.sample([slot for slot in range(num_slots) if slot not in slots], len(picked))
        for i, other in zip(picked, others, strict=True):
            start(engine, {other: prompts[i]})
            alone = [decode(engine, [other])[0] for _ in range(12)]
            assert alone == [step[i] for step in company], f"row {i} of {batch}"
            assert torch.equal(engine.state.wkv[:, other], engine.state.wkv[:, slots[i]])
            assert torch.equal(engine.state.shift[:, :, other], engine.state.shift[:, :, slots[i]])
        free = [slot for slot in range(num_slots) if slot not in slots and slot not in others]
        assert torch.isnan(engine.state.wkv[:, free]).all(), "a free slot was written"


@torch.inference_mode()
def test_neighbours_do_not_notice_joins_and_leaves():
    engine = engine_of("768", 400, [320])
    rng = random.Random(6)
    prompts = {slot: [rng.randrange(1, 4096) for _ in range(rng.randrange(3, 40))] for slot in range(64)}
    start(engine, prompts)
    alone = {0: [decode(engine, [0])[0] for _ in range(40)]}
    start(engine, {0: prompts[0]})
    live, texts = [0], []
    for step in range(40):
        if step % 3 == 0:
            joining = rng.choice([slot for slot in range(1, 64) if slot not in live])
            start(engine, {joining: prompts[joining]})
            live.append(joining)
        if step % 5 == 4:
            live.remove(rng.choice(live[1:]))
        rng.shuffle(live)
        texts.append(decode(engine, live)[live.index(0)])
        if 0 in live:
            live.remove(0)
            live.insert(0, 0)
    assert texts == alone[0]


@torch.inference_mode()
def test_poisoned_row_fails_alone():
    engine = engine_of("768", 400, [320])
    prompts = {slot: [slot + 1, 5, 9] for slot in range(8)}
    start(engine, prompts)
    engine.state.wkv[:, 3] = float("nan")
    sampled, _ = engine.graphs.replay(list(range(8)))
    assert sampled.finite.tolist() == [slot != 3 for slot in range(8)]


def test_reference_ops_run_on_the_gpu():
    """What a machine without a compiler gets."""
    weights = load("320", torch.float16)
    engine = build.build_engine(Config(ops="reference"), weights, 4, max_tokens=64)
    assert engine.model.ops is reference_ops
    ids = start(engine, {0: [5, 6, 7], 1: [9]})
    kernel_ids = start(engine_of("320", 8, [8]), {0: [5, 6, 7], 1: [9]})
    assert ids == kernel_ids


def feed(engine: Engine, rows: dict[int, list[int]], starting: bool, silent: set[int] = frozenset()) -> dict[int, int]:
    """Feed each slot its ids in one step; return what was sampled by slot, of all but the silent ones."""
    plan = []
    for slot, ids in rows.items():
        sequence = Sequence(Request(id=f"r{slot}", prompts=[ids], sampling=GREEDY, max_tokens=1000), 0)
        sequence.slot = slot
        plan.append(Row(sequence, ids, sample=slot not in silent, start=starting))
    tokens = engine.collect(engine.submit(Plan(plan)))
    return {token.sequence.slot: token.id for token in tokens}


@pytest.mark.parametrize(
    "lengths",
    [[1], [5], [16], [17], [300], [512], [1, 1], [16, 3, 1, 40], [16] * 32, [2] * 31, [480, 1], [640], [700], [500, 300]],
)
@torch.inference_mode()
def test_captured_prefill_steps_equal_eager_ones(lengths):
    """Two pieces of every prompt, of which some rows are not sampled; nothing but their slots is written."""
    engine = engine_of("768", 400, [320])
    rng = random.Random(len(lengths))
    slots = rng.sample(range(400), len(lengths))
    silent = set(slots[1::3])
    pieces = [[[rng.randrange(1, 4096) for _ in range(length)] for length in lengths] for _ in range(2)]
    results = []
    for prefills in (engine.prefills, None):
        kept, engine.prefills = engine.prefills, prefills
        for tensor in (engine.state.shift, engine.state.wkv):
            tensor.fill_(float("nan"))
        before = engine.stats()["graph_prefill_steps_total"]
        ids = [feed(engine, dict(zip(slots, piece, strict=True)), i == 0, silent) for i, piece in enumerate(pieces)]
        captured = engine.stats()["graph_prefill_steps_total"] - before
        engine.prefills = kept
        fits = engine.prefills.fits(sum(lengths), len(lengths))
        assert fits or sum(lengths) > TOKENS[-1]  # beyond those, as far as this host is slower than this card
        assert captured == (2 if prefills and fits else 0)
        free = [slot for slot in range(400) if slot not in slots]
        assert torch.isnan(engine.state.wkv[:, free]).all()
        assert torch.isnan(engine.state.shift[:, :, free]).all()
        assert [set(step) for step in ids] == [set(slots) - silent] * 2
        last = engine.state.last_ids[torch.tensor(sorted(set(slots) - silent), device="cuda")].tolist()
        assert last == [ids[1][slot] for slot in sorted(set(slots) - silent)]
        results.append((ids, engine.state.wkv[:, slots].float(), engine.state.shift[:, :, slots].float()))
    (ids, *tensors), (eager_ids, *eager_tensors) = results
    for got, expected in zip(tensors, eager_tensors, strict=True):
        assert (got - expected).norm() <= RELATIVE * expected.norm()
    differing = sum(ids[i][slot] != eager_ids[i][slot] for i in range(2) for slot in ids[i])
    assert differing <= max(1, len(slots) // 8)  # of random weights' near ties


DELAY = 300_000_000  # clock ticks, 0.15 s: what the device is busy with while the host goes on


def silent_step(engine: Engine, slot: int) -> Step:
    """Feed a slot some tokens of its own; nothing is sampled."""
    ids = [(slot * 131 + i * 17) % 4095 + 1 for i in range(40)]
    sequence = Sequence(Request(id=f"r{slot}", prompts=[ids], sampling=GREEDY, max_tokens=0), 0)
    sequence.slot = slot
    return engine.submit(Plan([Row(sequence, ids, sample=False)]))


def decode_step(engine: Engine, slot: int) -> None:
    engine.graphs.replay([slot])


@pytest.mark.parametrize("step", [silent_step, decode_step])
@torch.inference_mode()
def test_a_host_far_ahead_of_the_device_writes_over_nothing(step):
    """Many captured steps with inputs of their own, submitted while the device is busy, and one after another."""
    engine = engine_of("768", 400, [320])
    slots = range(3, 27)
    index = torch.tensor([*slots], device="cuda")
    states = []
    for ahead in (True, False):
        engine.state.clear(slots)
        engine.state.last_ids[index] = 7 * index + 1
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(DELAY)
        for slot in slots:
            step(engine, slot)
            if not ahead:
                torch.cuda.synchronize()
        states.append((engine.state.wkv[:, index].clone(), engine.state.shift[:, :, index].clone()))
    for got, expected in zip(*states, strict=True):
        assert torch.equal(got, expected)


@torch.inference_mode()
def test_a_step_that_samples_nothing_is_waited_for():
    """Otherwise nothing bounds how many steps a newcomer or a cancel waits behind."""
    engine = engine_of("768", 400, [320])
    busy = torch.cuda.Event()
    torch.cuda._sleep(DELAY)
    busy.record()
    step = silent_step(engine, 3)
    assert not busy.query(), "the host waited already when it submitted the step"
    engine.collect(step)
    assert busy.query()


def test_steps_that_are_captured_wait_for_what_was_submitted_before():
    """Capturing goes by a stream of its own, while the current one may still be filling slots and states."""
    device, seen = torch.device("cuda", 0), []

    def launch(*_, **__) -> None:
        if not seen:  # before anything is captured
            torch.cuda.current_stream().synchronize()
            seen.append(filled.query())

    model = SimpleNamespace(weights=SimpleNamespace(device=device), forward=lambda *_: torch.zeros(2, 4, device=device))
    torch.cuda._sleep(500_000_000)
    graphs = DecodeGraphs(model, SimpleNamespace(launch=launch), SimpleNamespace(num_slots=2), [2])
    filled = torch.cuda.Event()
    filled.record()
    graphs.capture()
    assert seen == [True]


def test_the_start_check_finds_nothing_here():
    assert self_check.failing(Launcher(compiler.library(), "cuda:0"), torch.float16) == []


def test_the_start_check_tries_what_only_timing_chooses(monkeypatch):
    launcher = Launcher(compiler.library(), "cuda:0")
    if not Gemm(launcher).available:
        pytest.skip("the launch that is spoilt runs on Hopper GPUs only")
    right = Gemm.inputs
    for spoilt in range(3):

        def wrong(self, *args, plane=spoilt):
            right(self, *args)
            args[3][plane, -1, -8:] = 1

        monkeypatch.setattr(Gemm, "inputs", wrong)
        assert self_check.failing(launcher, torch.float16) == ["time_mix"]
