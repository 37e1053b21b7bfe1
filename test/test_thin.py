"""Thin products on the emulated card: tokens by their adapters, in units of both sizes, and what belongs behind them."""

from types import SimpleNamespace

import pytest
import torch
from emulated_card import launcher_for

from rwkv_batch.kernels.adapted import thin
from rwkv_batch.kernels.adapted.thin import Cut, Grouping, Thin, cut_for
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows, RowLayout

HALF = torch.float16
OWNERS = [3, 3, -1, 7, 3, 3, 7, -1, 12, 3]  # of columns: 3 has five, 7 two, 12 one; two are free
SLOTS = 24
HAS = [0, 3, 7, 0, 12, 5]  # adapters of slots, in turn; 5 has no columns any more


@pytest.fixture
def launcher(card, monkeypatch) -> Launcher:
    card.be(64)
    return launcher_for(card, monkeypatch)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).mul_(scale).half()


def bank(columns: list[int]) -> SimpleNamespace:
    of_slot = torch.tensor([HAS[slot % len(HAS)] for slot in range(SLOTS)] + [0])
    return SimpleNamespace(of_slot=of_slot, owner=torch.tensor(columns))


def numbers_of(rows, tokens: int, of_slot: torch.Tensor) -> list[int]:
    if rows.is_decode:
        return [0 if slot < 0 else int(of_slot[slot]) for slot in rows.slot_tensor.tolist()]
    starts, slots = rows.layout.cu_seqlens.tolist(), rows.layout.slots.tolist()
    found = [0] * tokens
    for slot, first, last in zip(slots, starts, starts[1:], strict=False):
        found[first:last] = [0 if slot < 0 else int(of_slot[slot])] * (last - first)
    return found


def wanted(x, down, up, out, mask, square: bool) -> torch.Tensor:
    hidden = (x.float() @ down.float().transpose(-1, -2)).half().float() * mask
    y = out.float() + hidden @ up.float()
    return y.relu().square().clamp(max=65504) if square else y


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found.float() - expected).norm()) <= 2e-3 * float(expected.norm()) and bool(found.isfinite().all())


DECODE = {
    "one": [1],
    "a few": [2, -1, 0, 4, 7, 1, 5],
    "one adapter": [1, 7, 13, 19],
    "none": [0, 3, -1],
    "many": [(5 * i) % SLOTS if i % 9 else -1 for i in range(140)],
}


@pytest.mark.parametrize(
    ("name", "square"),
    [
        ("one", False), ("a few", False), ("a few", True), ("one adapter", False), ("none", True), ("none", False),
        *(pytest.param("many", square, marks=pytest.mark.long) for square in (False, True)),
    ],
)  # fmt: skip
def test_each_token_gets_what_its_own_adapter_adds(launcher, name, square):
    """Three planes of inputs that fill two pieces, outputs that fill two blocks."""
    slots, found = torch.tensor(DECODE[name]), bank(OWNERS)
    n, rows, planes, k, m = len(slots), CapturedRows.decode(slots), 3, 1088, 320
    x, down, up = random(planes, n, k, scale=k**-0.5), random(planes, len(OWNERS), k), random(planes, len(OWNERS), m)
    out = random(planes, n, m)
    free = [c for c, owner in enumerate(OWNERS) if owner < 0]
    down[:, free], up[:, free] = float("nan"), float("inf")  # which nobody may read
    mask = torch.tensor([[owner == number for owner in OWNERS] for number in numbers_of(rows, n, found.of_slot)])
    expected = wanted(x, down.nan_to_num(0), up.nan_to_num(0, 0, 0), out, mask, square)
    products = Thin(launcher, Thin.num_values(planes, len(OWNERS), n))
    products._hidden.fill_(float("nan"))
    grouping = Grouping(launcher, len(OWNERS), n)
    grouping.tables.fill_(-7)
    for _ in range(2):  # of tables that were used before
        grouping.group(rows, n, found.of_slot, found.owner)
    before = out.clone()
    products.down(x, down, grouping)
    products.add_up(up, out, k, grouping, square=square)
    assert close(out, expected)
    alone = ~mask.any(1)
    if not square:
        assert torch.equal(out[:, alone], before[:, alone])


def test_the_tokens_of_prompts_have_the_adapters_of_their_rows(launcher):
    """Also where a captured step is filled up with tokens and rows that are none."""
    found, n = bank(OWNERS), 40
    packed = PackedRows([1, 0, 2, 7], [9, 4, 20, 1])
    starts = torch.tensor([0, 9, 13, 33, 34, 34, 34], dtype=torch.int32)
    filled = RowLayout(torch.tensor([1, 0, 2, 7, -1, -1]), starts, starts[:6], starts[:6])
    for rows, tokens in ((packed, 34), (CapturedRows.prefill(filled, filled.slots), n)):
        x, down, up, out = random(tokens, 64), random(len(OWNERS), 64, scale=0.1), random(len(OWNERS), 64), random(tokens, 64)
        mask = torch.tensor([[owner == number for owner in OWNERS] for number in numbers_of(rows, tokens, found.of_slot)])
        expected = wanted(x, down, up, out, mask, square=False)
        grouping = Grouping(launcher, len(OWNERS), n)
        grouping.group(rows, tokens, found.of_slot, found.owner)
        products = Thin(launcher, Thin.num_values(1, len(OWNERS), n))
        products.down(x, down, grouping)
        products.add_up(up, out, 64, grouping)
        assert close(out, expected)


@pytest.mark.parametrize("ranks", [[64, 5], [1] * 20, [33, 16, 40]])
def test_adapters_of_any_rank(launcher, ranks):
    """In several chunks of columns, and one column each."""
    owners = [number for number, rank in enumerate(ranks, 1) for _ in range(rank)]
    n, k, m = 18, 96, 64
    of_slot = torch.tensor([slot % (len(ranks) + 1) for slot in range(SLOTS)] + [0])
    x, down, up, out = random(n, k, scale=0.1), random(len(owners), k), random(len(owners), m, scale=0.2), random(n, m)
    mask = torch.tensor([[owner == int(of_slot[slot]) for owner in owners] for slot in range(n)])
    expected = wanted(x, down, up, out, mask, square=False)
    grouping, products = Grouping(launcher, len(owners), n), Thin(launcher, Thin.num_values(1, len(owners), n))
    grouping.group(CapturedRows.decode(torch.arange(n)), n, of_slot, torch.tensor(owners))
    products.down(x, down, grouping)
    products.add_up(up, out, k, grouping)
    assert close(out, expected)


def test_a_token_is_the_same_in_any_company(launcher):
    """Bit for bit, among tokens of its own adapter or of others, wherever it stands."""
    n, k, m, own = 20, 1088, 64, torch.randn(1088).half()
    down, up = random(len(OWNERS), k, scale=k**-0.5), random(len(OWNERS), m)
    seen = set()
    for at, others in ((0, [2]), (13, [1]), (19, [4, 1, 0, -1])):
        slots = [others[i % len(others)] for i in range(n)]
        slots[at] = 1
        x = random(n, k, seed=at)
        x[at] = own
        out, found = torch.zeros(n, m, dtype=HALF), bank(OWNERS)
        grouping, products = Grouping(launcher, len(OWNERS), n), Thin(launcher, Thin.num_values(1, len(OWNERS), n))
        grouping.group(CapturedRows.decode(torch.tensor(slots)), n, found.of_slot, found.owner)
        products.down(x, down, grouping)
        products.add_up(up, out, k, grouping)
        seen.add(tuple(out[at].tolist()))
    assert len(seen) == 1


@pytest.mark.parametrize("n", [1, 21, pytest.param(130, marks=pytest.mark.long)])
def test_pairs_that_all_tokens_have(launcher, n):
    """Five planes that are blended by what comes of one product, and a bias in fp32."""
    planes, rank, c = 5, 8, 128
    x, start, end = random(n, c), random(n, c), random(n, c, seed=1)
    down, up = random(planes * rank, c, scale=0.1), random(planes, rank, c, scale=0.3)
    bias, out = torch.randn(planes, c), torch.zeros(planes, n, c, dtype=HALF)
    products = Thin(launcher, Thin.num_values(1, planes * rank, n))
    products.down(x, down)
    products.blend_up(up, bias, start, end, out, c)
    hidden = (x.float() @ down.float().t()).tanh().half().float().view(n, planes, rank).transpose(0, 1)
    share = bias[:, None] + hidden @ up.float()
    assert close(out, torch.lerp(start.float(), end.float(), share))
    wide = torch.zeros(n, c)
    products.down(x, down[:rank])
    products.bias_up(up[0], bias[0], wide, c)
    assert close(wide, share[0])


def test_products_are_cut_up_so_that_all_inputs_are_taken():
    for tokens in (1, 64, 127, 128, 320, 512, 513, 4096):
        for width in (64, 768, 1024, 2048, 4096, 8192, 10240, 16384, 65536):
            cut = cut_for(tokens, width)
            piece = thin.LONG_PIECE if cut.long else thin.PIECE
            assert cut.parts * cut.pieces * piece >= width > (cut.parts - 1) * cut.pieces * piece
            assert cut.parts <= thin.MAX_PARTS
            assert not (cut.many and cut.long), "there is no such kernel"
    assert cut_for(64, 4096) == Cut(many=False, long=False, pieces=1, parts=4)


def test_there_is_room_for_what_any_step_needs():
    for columns in (1, 31, 256, 2048):
        for most in (1, 64, 130, 4096):
            assert Grouping.room(columns, most) == max(Grouping.num_words(columns, n) for n in range(1, most + 1))
