"""Thin products on a GPU: any number of tokens, adapters and ranks, in company and in graphs."""

import itertools
import random

import pytest
import torch

from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.adapted.thin import Grouping, Thin
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows

pytestmark = pytest.mark.gpu
HALF = torch.float16
GPU = torch.device("cuda:0")
SLOTS = 320


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(compiler.library(), GPU)


@pytest.fixture(autouse=True)
def stream(launcher):
    launcher.use_current_stream()


class Case:
    """Adapters of some ranks whose columns lie anywhere, slots that have them or none, and the tables of all matrices."""

    def __init__(self, seed: int, adapters: int, ranks: tuple[int, ...], widths: tuple[int, int], planes: int):
        rng, (k, m) = random.Random(seed), widths
        self.rng, self.k, self.m, self.planes = rng, k, m, planes
        owners = [number for number in range(1, adapters + 1) for _ in range(rng.choice(ranks))]
        owners += [-1] * rng.randrange(1, 9)
        rng.shuffle(owners)
        self.owner = torch.tensor(owners, device=GPU)
        self.of_slot = torch.tensor([rng.randrange(adapters + 1) for _ in range(SLOTS)] + [0], device=GPU)
        torch.manual_seed(seed)
        self.down = torch.randn(planes, len(owners), k, device=GPU).mul_(k**-0.5).half()
        self.up = torch.randn(planes, len(owners), m, device=GPU).half()
        self.down[:, self.owner < 0], self.up[:, self.owner < 0] = float("nan"), float("inf")

    def make(self, launcher: Launcher, tokens: int) -> tuple[Thin, Grouping]:
        products = Thin(launcher, Thin.num_values(self.planes, len(self.owner), tokens), pdl=True)
        products._hidden.fill_(float("nan"))
        grouping = Grouping(launcher, len(self.owner), tokens)
        grouping.tables.fill_(-7)
        return products, grouping

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(self.planes, tokens, self.k, device=GPU).half(), torch.randn(
            self.planes, tokens, self.m, device=GPU
        ).half()

    def wanted(self, x: torch.Tensor, out: torch.Tensor, numbers: torch.Tensor, square: bool) -> torch.Tensor:
        mask = self.owner == numbers.unsqueeze(1)
        down, up = self.down.nan_to_num(0).double(), self.up.nan_to_num(0, 0, 0).double()
        y = out.double() + (x.double() @ down.transpose(1, 2)).half().double() * mask @ up
        return y.relu().square().clamp(max=65504) if square else y


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(found.isfinite().all()) and float((found.double() - wanted).norm()) <= 2e-3 * float(wanted.norm())


WIDTHS = {"rkv": ((4096, 4096), 3), "key": ((4096, 16384), 1), "value": ((16384, 4096), 1), "768": ((768, 768), 3)}


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(("adapters", "ranks"), [(1, (4,)), (3, (7, 33)), (8, (32,)), (32, (4, 16, 64)), (5, (64,))])
def test_each_token_gets_what_its_own_adapter_adds(launcher, widths, adapters, ranks):
    case = Case(adapters, adapters, ranks, *WIDTHS[widths])
    for tokens in (1, 2, 7, 16, 17, 63, 64, 127, 128, 200, 320):
        slots = torch.tensor(case.rng.sample(range(SLOTS), tokens), device=GPU)
        slots[torch.rand(tokens, device=GPU) < 0.1] = -1
        products, grouping = case.make(launcher, tokens)
        x, out = case.inputs(tokens)
        square = tokens % 2 == 0
        expected = case.wanted(x, out, torch.where(slots < 0, 0, case.of_slot[slots]), square)
        grouping.group(CapturedRows.decode(slots), tokens, case.of_slot, case.owner)
        products.down(x, case.down, grouping)
        products.add_up(case.up, out, case.k, grouping, square=square)
        assert close(out, expected), tokens


@pytest.mark.parametrize("lengths", [[500, 12], [3, 1, 900, 7, 200], [4096]])
def test_the_tokens_of_prompts(launcher, lengths):
    case, tokens = Case(1, 6, (32, 5), (2048, 2048), 3), sum(lengths)
    rows = PackedRows(case.rng.sample(range(SLOTS), len(lengths)), lengths, GPU)
    products, grouping = case.make(launcher, tokens)
    x, out = case.inputs(tokens)
    numbers = case.of_slot[torch.tensor([s for s, n in zip(rows.slots, lengths, strict=True) for _ in range(n)], device=GPU)]
    expected = case.wanted(x, out, numbers, square=False)
    grouping.group(rows, tokens, case.of_slot, case.owner)
    products.down(x, case.down, grouping)
    products.add_up(case.up, out, case.k, grouping)
    assert close(out, expected)


@pytest.mark.parametrize("tokens", [24, 320])
def test_a_token_is_the_same_in_any_company(launcher, tokens):
    case = Case(2, 8, (32, 9), (4096, 4096), 1)
    slot = int((case.of_slot[:-1] == 3).nonzero()[0])
    own, seen = torch.randn(case.k, device=GPU).half(), []
    products, grouping = case.make(launcher, tokens)
    for at, others in ((0, [s for s in range(SLOTS) if s != slot]), (tokens - 1, [-1]), (tokens // 2, [slot])):
        slots = torch.tensor([case.rng.choice(others) for _ in range(tokens)], device=GPU)
        slots[at] = slot
        x, out = case.inputs(tokens)
        x[0, at], out[0, at] = own, 0
        grouping.group(CapturedRows.decode(slots), tokens, case.of_slot, case.owner)
        products.down(x, case.down, grouping)
        products.add_up(case.up, out, case.k, grouping)
        seen.append(out[0, at].clone())
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_a_graph_finds_other_rows_when_it_is_replayed(launcher):
    """Many pairs one after another, as in a step: nothing may begin before what it needs is there."""
    case, tokens, pairs = Case(3, 8, (32,), (4096, 4096), 1), 64, 40
    products, grouping = case.make(launcher, tokens)
    slots = torch.arange(tokens, device=GPU)
    x, y = (t[0] for t in case.inputs(tokens))
    down, up = case.down[0], case.up[0] * 0.03

    def step() -> None:
        launcher.use_current_stream()
        grouping.group(CapturedRows.decode(slots), tokens, case.of_slot, case.owner)
        for i in range(pairs):  # each reads what the one before wrote
            source, target = (x, y) if i % 2 == 0 else (y, x)
            products.down(source, down, grouping)
            products.add_up(up, target, case.k, grouping)

    first = x.clone(), y.clone()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        slots.copy_(torch.tensor(random.Random(seed).sample(range(SLOTS), tokens), device=GPU))
        found = []
        for run in (graph.replay, graph.replay, step):
            x.copy_(first[0]), y.copy_(first[1])
            run()
            torch.cuda.synchronize()
            found.append((x.clone(), y.clone()))
        assert bool(found[0][0].isfinite().all())
        for one, other in itertools.pairwise(found):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("tokens", [1, 9, 64, 200, 1030])
@pytest.mark.parametrize("c", [768, 2048])
def test_pairs_that_all_tokens_have(launcher, tokens, c):
    planes, rank = 5, 32
    torch.manual_seed(tokens)
    x, start, end = (torch.randn(tokens, c, device=GPU).half() for _ in range(3))
    down = torch.randn(planes * rank, c, device=GPU).mul_(c**-0.5).half()
    up = torch.randn(planes, rank, c, device=GPU).mul_(0.2).half()
    bias, out = torch.randn(planes, c, device=GPU), torch.full((planes, tokens, c), float("nan"), dtype=HALF, device=GPU)
    products = Thin(launcher, Thin.num_values(1, planes * rank, tokens), pdl=True)
    products.down(x, down)
    products.blend_up(up, bias, start, end, out, c)
    hidden = (x.double() @ down.double().t()).tanh().half().double().view(tokens, planes, rank).transpose(0, 1)
    share = bias[:, None].double() + hidden @ up.double()
    assert close(out, torch.lerp(start.double(), end.double(), share))
    wide = torch.full((tokens, c), float("nan"), device=GPU)
    products.down(x, down[:rank])
    products.bias_up(up[0], bias[0], wide, c)
    assert close(wide, share[0])
