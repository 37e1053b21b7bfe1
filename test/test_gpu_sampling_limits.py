"""min_p, repetition penalty and token masks in the sampling kernel: against formulas, the reference, and in captured steps."""

import pytest
import torch
from models import ROOT
from test_gpu_engine import engine_of
from test_gpu_sampling import boundary64, case, unpenalized

from rwkv_batch.request import Request
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling import factory
from sampling.kernel import KernelSampler
from sampling.masks import SlotMasks, pack, unpack
from sampling.params import SamplingParams
from sampling.reference import ReferenceSampler

pytestmark = pytest.mark.gpu

assert ROOT
RULES = [
    case(temperature=0), case(), case(top_k=0, top_p=1.0), case(top_k=0, top_p=0.6), case(top_k=0, top_p=0.1),
    case(rule="sequential", top_k=40, top_p=0.8), case(rule="sequential", top_k=0, top_p=0.7), case(top_k=300, top_p=0.99),
    case(top_k=200, top_p=1.0), case(top_k=0, top_p=0.2, temperature=4.0),
    case(rule="sequential", top_k=400, top_p=0.9, temperature=3.0), case(rule="gumbel"), case(rule="noise", noise=1.5),
]  # fmt: skip
LIMITS = [
    case(), case(min_p=0.1), case(repetition_penalty=1.5), case(min_p=0.01, repetition_penalty=0.7), case(min_p=1.0),
    case(min_p=0.3, repetition_penalty=1.2, logit_bias=((3, 2.0), (700, 1.0)), ignore_eos=True), case(min_p=1e-4),
]  # fmt: skip


@pytest.fixture(scope="module")
def library():
    from rwkv_batch.kernels import compiler

    return compiler.library(0)


def mixed_params(num_rows: int, penalized: bool) -> list[SamplingParams]:
    """Every rule with every limit, as far as there are rows."""
    alphas = {"alpha_presence": 0.5 * penalized, "alpha_frequency": 0.1 * penalized}
    mixes = [{**rule, **limit} for limit in LIMITS for rule in RULES]
    return [SamplingParams(**mixes[i % len(mixes)], **alphas, seed=i) for i in range(num_rows)]


def random_masks(generator: torch.Generator, rows: list[int], num_columns: int) -> dict[int, torch.Tensor]:
    """Masks that allow a fifth of the columns, or a single one; some of them end in the middle of a word."""
    shares = torch.tensor([0.2, 0.0])[torch.arange(len(rows)) % 5 // 4][:, None]
    flags = torch.rand(len(rows), num_columns, generator=generator) < shares
    flags[torch.arange(len(rows)), torch.randint(num_columns, (len(rows),), generator=generator)] = True
    return dict(zip(rows, pack(flags), strict=True))


@pytest.mark.parametrize("penalized", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "dtype", "scale"),
    [
        (20, 65536, torch.float16, 2.0), (91, 65536, torch.float16, 1.0), (182, 4099, torch.float16, 3.0),
        (600, 65536, torch.float16, 2.0), (91, 70001, torch.float16, 1.0), (91, 50257, torch.float32, 2.0),
        (182, 8192, torch.bfloat16, 2.0), (364, 1000, torch.float32, 0.0),
    ],
)  # fmt: skip
def test_the_kernel_samples_what_the_reference_samples(library, num_rows, num_columns, dtype, scale, penalized):
    """Over steps, with prompts, masks that change, and rows without any of it in between."""
    generator = torch.Generator().manual_seed(num_rows + num_columns)
    params, slot_list = mixed_params(num_rows, penalized), list(range(num_rows))
    slots = torch.arange(num_rows, device="cuda")
    prompts = [torch.randint(num_columns + 9, (num_columns // 8,), generator=generator).tolist() for _ in slot_list]
    ids = torch.arange(num_columns)
    samplers = ReferenceSampler(num_rows, ids, "cuda"), KernelSampler(num_rows, ids, "cuda:0", library)
    for sampler in samplers:
        sampler.start_many(slot_list, params, [i % 3 for i in slot_list], prompts)
    alive = torch.ones(num_rows, dtype=torch.bool)
    same = total = 0
    for step in range(4):
        logits = (torch.randn(num_rows, num_columns, generator=generator) * scale).to(dtype).cuda()
        masks = random_masks(generator, [row for row in slot_list if (row + step) % 3 == 0], num_columns)
        for sampler in samplers:
            sampler.masks.put(masks)
        one, two = (sampler.sample(logits, slots, slot_list) for sampler in samplers)
        assert torch.equal(one.finite, two.finite)
        drawn = two.ids.cpu()
        for row, words in masks.items():
            assert not two.finite[row] or unpack(words, num_columns)[drawn[row]]
        equal = (one.ids == two.ids).cpu()
        same += int((equal & alive).sum())
        total += int(alive.sum())
        alive &= equal
    assert same >= 0.97 * total, (same, total)
    reference, kernel = (sampler.controls for sampler in samplers)
    seen = torch.zeros_like(kernel.seen) if reference.seen is None else reference.seen  # none where no row has a penalty
    assert torch.equal(seen[alive.cuda()], kernel.seen[alive.cuda()])
    if penalized:
        assert (samplers[1].penalties(slots) - reference.penalties)[alive.cuda()].abs().max() < 1e-5


CHI_CASES = [
    case(top_k=0, top_p=1.0, min_p=0.05), case(top_k=0, top_p=0.7, min_p=0.02, temperature=1.5),
    case(top_k=30, top_p=0.9, min_p=0.1), case(top_k=0, top_p=0.1, min_p=0.01, temperature=3.0),
    case(rule="sequential", top_k=200, top_p=0.9, min_p=0.003), case(rule="sequential", top_k=0, top_p=0.8, min_p=0.2),
    case(top_k=600, top_p=1.0, min_p=1e-3), case(top_k=0, top_p=1.0, min_p=0.9),
]  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("number", range(len(CHI_CASES)))
def test_draws_follow_the_distribution(library, number, masked):
    """Chi-square at 1e-4 over 262,144 draws from 4,096 columns."""
    chosen, num_columns, num_rows, rounds = CHI_CASES[number], 4096, 8192, 32
    generator = torch.Generator().manual_seed(number)
    row = (torch.randn(num_columns, generator=generator) * 2).cuda()
    flags = torch.rand(num_columns, generator=generator) < (0.3 if masked else 2)
    sampler = KernelSampler(num_rows, torch.arange(num_columns), "cuda:0", library)
    params = [unpenalized(**chosen, seed=i + 7) for i in range(num_rows)]
    sampler.start_many(list(range(num_rows)), params, [0] * num_rows)
    if masked:
        sampler.masks.put(dict.fromkeys(range(num_rows), pack(flags)))
    slots = torch.arange(num_rows, device="cuda")
    counts = torch.zeros(num_columns, dtype=torch.float64, device="cuda")
    for _ in range(rounds):
        counts += torch.bincount(sampler.sample(row.expand(num_rows, -1), slots).ids, minlength=num_columns)
    z = row.double().masked_fill(~flags.cuda(), -torch.inf)
    depth = -params[0].temperature * torch.tensor(chosen["min_p"], dtype=torch.float64).log()
    z = z.masked_fill(z < z.max() - depth.item(), -torch.inf)
    weights = boundary64(z, params[0])[2]
    expected = weights / weights.sum() * num_rows * rounds
    assert counts[expected == 0].sum() == 0
    rare = expected < 8
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    kept = wanted > 8
    statistic = float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum())
    freedom = int(kept.sum()) - 1
    if freedom > 0:
        limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty, 1e-4
        assert statistic < limit, (chosen, statistic, limit)


@pytest.mark.parametrize("num_rows", [2, 40, 700])  # several blocks for a row, a block for each, dense blocks
@pytest.mark.parametrize("name", ["rapid", "flashinfer"])
def test_rows_beside_masked_ones_are_as_without_them_in_one_graph(library, name, num_rows):
    """Masks come and go between replays; the others' ids are the same bit for bit, and masked rows draw what they may."""
    from sampling import flashinfer

    if name == "flashinfer" and flashinfer.missing():
        pytest.skip(flashinfer.missing())
    num_columns, steps = 65536, 6
    generator = torch.Generator().manual_seed(3)
    logits = [(torch.randn(num_rows, num_columns, generator=generator) * 2).half().cuda() for _ in range(steps)]
    params, slots = mixed_params(num_rows, penalized=True), torch.arange(num_rows, device="cuda")
    masked = list(range(0, num_rows, 2))

    def run(masks: list[dict[int, torch.Tensor]]) -> torch.Tensor:
        sampler = factory.make_sampler(name, num_rows, torch.arange(num_columns), "cuda:0", library)
        static = logits[0].clone()
        sampler.start_many(list(range(num_rows)), params, [0] * num_rows)
        sampler.launch(static, slots)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sampler.launch(static, slots)
        sampler.start_many(list(range(num_rows)), params, [0] * num_rows)
        ids = []
        for step in range(steps):
            sampler.masks.put(masks[step])
            static.copy_(logits[step])
            graph.replay()
            assert out.finite.all()
            ids.append(out.ids.clone())
        return torch.stack(ids).cpu()

    masks = [random_masks(generator, masked if step % 3 else masked[:1], num_columns) for step in range(steps)]
    with_masks, without = run(masks), run([{}] * steps)
    free = [row for row in range(num_rows) if row not in masked]
    assert torch.equal(with_masks[:, free], without[:, free])
    for step in range(steps):
        for row, words in masks[step].items():
            assert unpack(words, num_columns)[with_masks[step, row]]


def test_a_mask_that_allows_nothing_leaves_no_token(library):
    params = mixed_params(len(RULES) * len(LIMITS), penalized=False)
    num_rows = len(params)
    sampler = KernelSampler(num_rows, torch.arange(5000), "cuda:0", library)
    sampler.start_many(list(range(num_rows)), params, [0] * num_rows)
    sampler.masks.put({row: torch.zeros(157, dtype=torch.int32) for row in range(0, num_rows, 2)})
    sampled = sampler.sample(torch.randn(num_rows, 5000, device="cuda"), torch.arange(num_rows, device="cuda"))
    assert sampled.finite.tolist() == [row % 2 == 1 for row in range(num_rows)]
    assert not sampled.ids[::2].any()


@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_counted_ids_leave_what_sampled_ones_leave(library, num_before):
    """Step, penalties and tokens that occurred, to the bit, so that the draws behind them are the same."""
    penalties = [
        case(), case(alpha_presence=0.0, alpha_frequency=0.5), case(alpha_presence=0.3, repetition_penalty=1.3),
        case(alpha_presence=0, alpha_frequency=0, repetition_penalty=0.8), case(alpha_presence=0, alpha_frequency=0),
        case(temperature=0, alpha_decay=0.9),
    ]  # fmt: skip
    params = [SamplingParams(seed=seed, **controls) for seed, controls in enumerate(penalties)]
    slots, ids = list(range(len(params))), torch.arange(1003) + 3
    index = torch.tensor(slots, device="cuda")
    drawn, counted = (KernelSampler(len(slots), ids, "cuda", library) for _ in range(2))
    generator = torch.Generator().manual_seed(num_before)

    def both() -> list[int]:
        logits = 3 * torch.randn(len(slots), len(ids), generator=generator).cuda()
        found, same = (sampler.sample(logits, index, slots).ids.tolist() for sampler in (drawn, counted))
        assert found == same
        return found

    for sampler in (drawn, counted):
        sampler.start_many(slots, params, [0] * len(slots), [[3, 5, 7, 7, 900, 20000]] * len(slots))
    last = [both() for _ in range(num_before)][-1] if num_before else [9] * len(slots)
    forced = [[30, 31, 30, id, 500, 1000, 30, 7] for id in last]
    for column in zip(*forced, strict=True):
        flags = torch.tensor(column)[:, None] == ids
        drawn.masks.put(dict(zip(slots, pack(flags), strict=True)))
        logits = torch.randn(len(slots), len(ids), generator=generator).cuda()
        assert drawn.sample(logits, index, slots).ids.tolist() == list(column)
    drawn.masks.put({})
    for slot in slots:
        counted.count(slot, forced[slot])
    assert torch.equal(drawn.penalties(index), counted.penalties(index))
    assert torch.equal(drawn.controls.seen, counted.controls.seen)
    assert torch.equal(drawn.controls.step, counted.controls.step)
    for _ in range(6):
        both()
    assert torch.equal(drawn.penalties(index), counted.penalties(index))


class Multiples:
    """Allows the columns that are multiples of a number, which grows with each id; known at once or after a step."""

    def __init__(self, num_columns: int, waits: bool):
        self.num_columns, self.waits = num_columns, waits
        self.drawn: list[tuple[int, int]] = []
        self._ready, self._taken = True, False

    def ready(self) -> bool:
        if self._taken:
            return False
        now, self._ready = self._ready, True
        return now

    def take(self) -> torch.Tensor:
        self._taken = True
        return pack(torch.arange(self.num_columns) % (len(self.drawn) + 2) == 0)

    def accept(self, id: int) -> None:
        self.drawn.append((id, len(self.drawn) + 2))
        self._taken, self._ready = False, not self.waits


@pytest.mark.parametrize(("late", "waits"), [(False, False), (False, True), (True, False)])
def test_masked_rows_draw_inside_captured_steps(late, waits):
    """Or in front of their next one: no step of an engine is launched kernel by kernel, and plain rows have their ids alone."""
    engine = engine_of("768", 8, [8])
    assert isinstance(engine.sampler.masks, SlotMasks)
    num_columns = len(engine.sampler.ids)
    names = ["plain 1", "masked 1", "plain 2", "masked 2", "masked 3"]

    def run(masked: bool) -> tuple[dict[str, list[int]], dict[str, Multiples]]:
        scheduler = Scheduler(num_slots=8, prefill_budget=64, mixed=False, late_draws=late)
        ids, masks = {name: [] for name in names}, {}
        for number, name in enumerate(names):
            params = unpenalized(top_k=0, top_p=0.9, seed=number, ignore_eos=True)
            request = Request(id=name, prompts=[[5 + number, 7, 9]], sampling=params, max_tokens=24)
            (sequence,) = scheduler.add(request)
            if masked and name.startswith("masked"):
                sequence.mask = masks[name] = Multiples(num_columns, waits)
        before = None
        for _ in range(400):
            plan = scheduler.next_plan()
            step = engine.submit(plan) if plan else None
            early = engine.collect(step.early) if step is not None and step.early is not None else []
            for token in early + (engine.collect(before) if before is not None else []):
                name = token.sequence.request.id
                ids[name].append(token.id)
                if token.sequence.mask is not None:
                    token.sequence.mask.accept(token.id)
                if len(ids[name]) == 24:
                    scheduler.finish(token.sequence)
            before = step
            if before is None and all(len(found) == 24 for found in ids.values()):
                return ids, masks
        raise AssertionError("rows do not come to their end")

    eager = engine.num_eager_decodes
    plain, _ = run(masked=False)
    replays = engine.graphs.num_replays
    ids, masks = run(masked=True)
    assert engine.num_eager_decodes == eager
    assert engine.graphs.num_replays > replays
    assert {name: ids[name] for name in names if "plain" in name} == {name: plain[name] for name in names if "plain" in name}
    columns = {id: column for column, id in enumerate(engine.sampler.ids.tolist())}
    for mask in masks.values():
        assert len(mask.drawn) == 24
        assert all(columns[id] % divisor == 0 for id, divisor in mask.drawn)
