"""A pipeline on cards against one device: logits, states, and steps under way that find what they should."""

import functools
from collections import defaultdict

import pytest
import torch

from bench.synth_checkpoint import synth
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.engine.pipeline.build import Pipeline
from rwkv_batch.engine.pipeline.copies import StagedCopies
from rwkv_batch.kernels import compiler
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.state import Snapshot
from rwkv_batch.request import Request
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling.params import SamplingParams

pytestmark = pytest.mark.gpu

SHAPES = {"768": (6, 768, 64, 64, 32, 128, 1.15), "4096": (4, 4096, 128, 128, 96, 480, 1.38)}
SLOTS, TOKENS = 32, 256  # as many slots as rows in the largest captured prefills
SIZES = [1, 8, 16, 32]
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, top_p=0.8, seed=3, alpha_presence=0.3, alpha_frequency=0.3, ignore_eos=True)
CONFIG = Config(ops="kernels")


@pytest.fixture(autouse=True)
def _first_card():
    """Kernels go to the current device; an engine makes its last one current."""
    torch.cuda.set_device(0)


def cards(kind: str) -> list[torch.device]:
    """One card for all stages, or a card for each; skips where there are too few."""
    count = {"one card": 1, "two cards": 2, "three stages": 1}[kind]
    if torch.cuda.device_count() < count:
        pytest.skip("needs two cards")
    return [torch.device("cuda", i % count) for i in range(3 if kind == "three stages" else 2)]


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return synth(SHAPES[name], vocab=4096, seed=7, device="cuda", place="cuda")


def quantisation(quant: str) -> Quantisation:
    return Quantisation(quant) if quant else PLAIN


@functools.lru_cache(maxsize=1)
def whole(name: str, quant: str = ""):
    weights = weights_module.from_tensors(
        tensors_of(name), dtype=torch.float16, device="cuda:0", progress=False, quant=quantisation(quant)
    )
    options = {"max_tokens": TOKENS, "library": compiler.library(), "graph_sizes": SIZES}
    return build.build_engine(CONFIG, weights, SLOTS, **options)


@functools.cache
def staged(name: str, kind: str, quant: str = ""):
    devices, tensors, form = cards(kind), tensors_of(name), quantisation(quant)
    shape = weights_module.check_tensors(tensors, name, None, form)
    pipeline = Pipeline.over(devices, CONFIG, shape, torch.float16, form)
    weights = weights_module.from_tensors(
        tensors, dtype=torch.float16, progress=False, quant=form, layer_devices=pipeline.layer_devices
    )
    options = {"max_tokens": TOKENS, "library": compiler.library(), "graph_sizes": SIZES, "wkv_dtype": torch.float16}
    return pipeline.build_engine(CONFIG, weights, SLOTS, **options)


def synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    got, expected = got.double().cpu(), expected.double().cpu()
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0)
    assert cosine >= 0.9999
    assert (got - expected).norm() / expected.norm() <= 1.5e-2


KINDS = ("one card", "three stages", "two cards")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "quant"), [("768", ""), ("4096", ""), ("768", "int8")])
@torch.inference_mode()
def test_logits_are_those_of_one_device(kind, name, quant):
    """Prefill and decode, captured and not, the same tokens in the same slots."""
    one, many = whole(name, quant), staged(name, kind, quant)
    first, last = many.model.stages[0].device, many.device
    generator = torch.Generator().manual_seed(3)
    slots, lengths = [3, 0, 9, 15, 7], [40, 1, 33, 64, 90]
    prompts = [torch.randint(1, 4096, (n,), generator=generator).tolist() for n in lengths]
    flat = [id for prompt in prompts for id in prompt]
    for captured in (False, True):
        one.state.clear(slots)
        many.state.clear(slots)
        if captured:
            _, expected = one.prefills.replay(slots, prompts, len(slots))
            _, got = many.prefills.replay(slots, prompts, len(slots))
        else:
            rows = PackedRows(slots, lengths, torch.device("cuda", 0))
            expected = one.model.forward(torch.tensor(flat, device="cuda:0"), rows, one.state)
            rows = PackedRows(slots, lengths, last)
            got = many.model.forward(torch.tensor(flat, device=first), rows, many.state)
        close(got, expected)
        assert [many.state.elapsed[slot] for slot in slots] == lengths
        for _ in range(40):
            ids = torch.randint(1, 4096, (len(slots),), generator=generator)
            one.state.last_ids[torch.tensor(slots, device="cuda:0")] = ids.to("cuda:0")
            many.state.last_ids[torch.tensor(slots, device=last)] = ids.to(last)
            many.model.sampled(slots)
            if captured:
                _, expected = one.graphs.replay(slots)
                _, got = many.graphs.replay(slots)
            else:
                expected = one.model.forward(None, CapturedRows.decode(torch.tensor(slots, device="cuda:0")), one.state)
                got = many.model.forward(None, PackedRows(slots, [1] * len(slots), last), many.state)
            synchronize()
        close(got, expected)


def run(engine, *, in_step: bool) -> dict[str, list[int]]:
    """Return the ids of 40 rows of several requests; `in_step`: every step ends before the next one begins."""
    torch.cuda.set_device(engine.device)
    num_groups = len(engine.model.stages)
    scheduler = Scheduler(num_slots=SLOTS, prefill_budget=TOKENS, busy_budget=64, mixed=False, num_groups=num_groups)
    generator = torch.Generator().manual_seed(11)
    lengths = [int(n) for n in torch.randint(1, 400, (40,), generator=generator)]
    prompts = [torch.randint(1, 4096, (n,), generator=generator).tolist() for n in lengths]
    ids, flight, waiting = defaultdict(list), [], list(range(0, 40, 4))
    steps = 0
    while True:
        if waiting and steps % 3 == 0:
            at = waiting.pop(0)
            params = GREEDY if at % 8 else SEEDED
            scheduler.add(Request(id=f"{at}", prompts=prompts[at : at + 4], sampling=params, max_tokens=17, loop="continuous"))
        plan = scheduler.next_plan()
        if plan is not None:
            flight.append((engine.submit(plan), plan.groups))
            if in_step:
                synchronize()
        while flight and (plan is None or len(flight) > num_groups or any(g & plan.groups for _, g in flight[:-1])):
            for token in engine.collect(flight.pop(0)[0]):
                name = f"{token.sequence.request.id}-{token.sequence.index}"
                ids[name].append(token.id)
                if len(ids[name]) == 17:
                    scheduler.finish(token.sequence)
            if plan is None:
                break
        steps += 1
        if plan is None and not waiting and not flight:
            return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_steps_under_way_draw_what_they_draw_one_by_one(kind, name):
    engine = staged(name, kind)
    expected = run(engine, in_step=True)
    assert sorted(map(len, expected.values())) == [17] * 40
    for _ in range(5):
        assert run(engine, in_step=False) == expected
    assert engine.graphs.num_replays > 100
    assert engine.prefills.num_replays > 10


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_prompt_is_submitted_while_the_last_stage_has_the_one_before(kind, captured, monkeypatch):
    """The host waits for no device, or the first stage would have nothing to do until the last one is done."""
    engine = staged("768", kind)
    torch.cuda.set_device(engine.device)
    if not captured:
        monkeypatch.setattr(engine, "prefills", None)
    scheduler = Scheduler(num_slots=SLOTS, prefill_budget=TOKENS, mixed=False, num_groups=len(engine.model.stages))
    prompts = [[1 + i % 400 for i in range(length)] for length in (300, 90, 33)]
    for round in range(2):  # what is made once may be waited for
        scheduler.add(Request(id=f"{round}", prompts=prompts, sampling=SEEDED, max_tokens=1))
        steps = []
        torch.cuda.set_sync_debug_mode("error" if round else "default")
        try:
            while (plan := scheduler.next_plan()) is not None:
                steps.append(engine.submit(plan))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(steps) >= 2
        tokens = [token for step in steps for token in engine.collect(step)]
        assert len(tokens) == len(prompts)
        for token in tokens:
            scheduler.finish(token.sequence)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_states_are_cut_and_joined_beside_the_steps(kind):
    """Through the host and back, while rows decode in other slots."""
    engine = staged("768", kind)
    copies = StagedCopies(engine.state, engine.model.stages)
    shape = engine.state.shape
    whole = Snapshot(
        torch.randn(shape.num_layers, 2, shape.width).half().pin_memory(),
        torch.randn(shape.num_layers, shape.num_heads, 64, 64).half().pin_memory(),
        7,
    )
    for round in range(20):
        staged_one, mark = copies.to_device(whole)
        engine.graphs.replay(list(range(8, 20)))
        copies.wait(staged_one, mark)
        engine.state.put(round % 8, staged_one)
        engine.state.put(20, whole)
        engine.graphs.replay(list(range(8, 20)))
        for slot in (round % 8, 20):
            taken = engine.take(slot)
            mark = copies.mark()
            engine.state.clear([slot])
            back = copies.to_host(taken, mark)
            assert torch.equal(back.wkv, whole.wkv)
            assert torch.equal(back.shift, whole.shift)
            assert copies.is_finite(taken, mark)
