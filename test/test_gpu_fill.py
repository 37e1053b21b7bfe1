"""Slots of the state overwritten by the kernel: the right values where they belong, not a bit anywhere else."""

import pytest
import torch

from rwkv_batch.kernels.states.fill import StateFill
from rwkv_batch.model.state import Snapshot, State
from rwkv_batch.model.weights import ModelShape

pytestmark = pytest.mark.gpu

HALF, FLOAT = torch.float16, torch.float32
DEVICE = torch.device("cuda", 0)
SHAPE = ModelShape(3, 320, 1280, 300, 8, 8, 8, 8)
MANY = 2500  # more slots than go along with two launches


@pytest.fixture(scope="module")
def fill():
    """The kernel."""
    from rwkv_batch.kernels.compiler import library
    from rwkv_batch.kernels.launch import Launcher

    torch.manual_seed(1)
    return StateFill(Launcher(library(0), DEVICE))


def values(*dims, dtype):
    return torch.randn(*dims, device=DEVICE).to(dtype)


def bits(tensor):
    return tensor.view(torch.int16 if tensor.dtype == HALF else torch.int32)


@pytest.mark.parametrize("zeros", [False, True], ids=["source", "zeros"])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize(
    ("outer", "num_slots", "row"),
    [(1, 1, 64), (3, 40, 64), (5, 33, 320), (2, 65, 4096 + 64), (64, 320, 4096), (4, 320, 64 * 4096), (2, MANY, 192)],
)
def test_chosen_slots_and_no_others(fill, outer, num_slots, row, dtype, zeros):
    """One, all, scattered, each 31 and 33 of them, and -1 among them; the free ones hold NaN and keep it."""
    source = None if zeros else values(outer, row, dtype=dtype)
    scattered = torch.randperm(num_slots).tolist()
    target = torch.empty(outer, num_slots, row, dtype=dtype, device=DEVICE)
    some = [-1, *scattered[: num_slots // 2], -1]
    for slots in ([num_slots - 1], list(range(num_slots)), scattered, scattered[:31], scattered[:33], some, [-1], []):
        target.fill_(torch.nan)
        expected = target.clone()
        chosen = torch.tensor([slot for slot in slots if slot >= 0], dtype=torch.int64, device=DEVICE)
        expected[:, chosen] = 0 if zeros else source.unsqueeze(1)
        fill(slots, target=(target, source))
        assert torch.equal(bits(target), bits(expected))


def test_past_four_gibibytes(fill):
    target = torch.full((3, 16, 2**26), torch.nan, dtype=HALF, device=DEVICE)  # 6 GiB
    source = values(3, 2**26, dtype=HALF)
    fill([15, 3], target=(target, source))
    for slot in range(16):
        kept = target[:, slot]
        assert torch.equal(kept, source) if slot in (3, 15) else bool(kept.isnan().all())


def test_the_launch_keeps_its_place_in_the_stream(fill):
    """Behind work that writes the slots and the source, before work that reads them, on whatever stream is current."""
    target, source = torch.zeros(4, 8, 4096, dtype=HALF, device=DEVICE), torch.zeros(4, 4096, dtype=HALF, device=DEVICE)
    a = torch.randn(8192, 8192, dtype=HALF, device=DEVICE)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(10):
                a = a @ a * 1e-3
            source.fill_(7)
            target.fill_(1)
            fill([2, 5], target=(target, source))
            source.fill_(9)
            read = target.clone()
            target.fill_(2)
        stream.synchronize()
        assert read[0, :, 0].tolist() == [1, 1, 7, 1, 1, 7, 1, 1]
        assert bool((target == 2).all())


def test_what_does_not_fit_is_refused_by_name(fill):
    target, source = torch.zeros(2, 8, 64, device=DEVICE), torch.ones(2, 64, device=DEVICE)
    for message, slots, parts in (
        ("slots", [8], {"wkv": (target, source)}),
        ("slots", [0, -2], {"wkv": (target, None)}),
        ("wkv", [0], {"wkv": (target[0], source)}),
        ("wkv", [0], {"wkv": (target[:, ::2], source)}),
        ("wkv", [0], {"wkv": (target.cpu(), source)}),
        ("wkv: rows of 264 bytes", [0], {"wkv": (torch.zeros(2, 8, 66, device=DEVICE), None)}),
        ("wkv.* begin", [0], {"wkv": (target, torch.ones(129, device=DEVICE)[1:].view(2, 64))}),
        ("source of wkv", [0], {"wkv": (target, source.half())}),
        ("source of wkv", [0], {"wkv": (target, source[:1])}),
        ("source of wkv", [0], {"wkv": (target, torch.ones(64, 2, device=DEVICE).T)}),
        ("source of wkv", [0], {"wkv": (target, source.cpu())}),
        ("source of wkv", [0], {"shift": (target, source), "wkv": (target, source[0])}),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            fill(slots, **parts)
    assert not target.any()


@pytest.mark.parametrize("wkv_dtype", [HALF, FLOAT])
def test_the_state_is_what_torch_makes_of_it(fill, wkv_dtype):
    """Snapshots of other types, from the device, from the host and page-locked; one slot, many, and cleared ones."""
    states = [State(SHAPE, 100, shift_dtype=HALF, wkv_dtype=wkv_dtype, device=DEVICE, fill=each) for each in (None, fill)]
    shift, wkv = values(3, 2, 320, dtype=FLOAT), values(3, 5, 64, 64, dtype=FLOAT)
    snapshots = [
        Snapshot(shift, wkv, 7),
        Snapshot(shift.half(), wkv.half(), 8),
        Snapshot(shift.cpu(), wkv.cpu().half(), 9),
        Snapshot(shift.cpu().half().pin_memory(), wkv.cpu().pin_memory(), 10),
    ]
    for state in states:
        state.shift.fill_(torch.nan)
        state.wkv.fill_(torch.nan)
        for i, snapshot in enumerate(snapshots):
            state.put(i, snapshot)
            state.put_many([99 - i, 10 + i, 50 - i], snapshot)
        state.put_many(range(60, 80), state.take(11))
        state.clear([70, 2, 97])
        state.clear([])
        with pytest.raises(ValueError, match="shapes"):
            state.put_many([20, 21], Snapshot(shift[:2], wkv, 1))
    one, other = states
    assert torch.equal(bits(one.shift), bits(other.shift))
    assert torch.equal(bits(one.wkv), bits(other.wkv))
    assert one.elapsed == other.elapsed
    assert [other.elapsed[slot] for slot in (0, 99, 70, 71, 20)] == [7, 7, 0, 8, 0]
    assert other.shift[:, :, 20].isnan().all()


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize(
    ("outer", "num_slots", "row"), [(1, 1, 64), (5, 33, 320), (64, 340, 4096), (4, 340, 64 * 4096), (2, MANY, 192)]
)
def test_slots_are_copied_out_and_in(fill, outer, num_slots, row, dtype):
    """One, all, scattered: each to a place of its own and back to another slot, and no slot that was not named."""
    target = values(outer, num_slots, row, dtype=dtype)
    scattered = torch.randperm(num_slots).tolist()
    for slots in ([num_slots - 1], list(range(num_slots)), scattered[: num_slots // 2], []):
        copies = [torch.full((outer * row,), torch.nan, dtype=dtype, device=DEVICE) for _ in slots]
        before = target.clone()
        fill.take(slots, target=(target, copies))
        assert torch.equal(bits(target), bits(before))
        assert all(
            torch.equal(bits(copy.view(outer, row)), bits(target[:, slot])) for slot, copy in zip(slots, copies, strict=True)
        )
        fill.put([*reversed(slots)], target=(target, copies))
        for slot, copy in zip(reversed(slots), copies, strict=True):
            before[:, slot] = copy.view(outer, row)
        assert torch.equal(bits(target), bits(before))


def test_copies_past_four_gibibytes(fill):
    target = torch.zeros((3, 16, 2**26), dtype=HALF, device=DEVICE)  # 6 GiB
    target[:, 15] = values(3, 2**26, dtype=HALF)
    copy = torch.empty(3, 2**26, dtype=HALF, device=DEVICE)
    fill.take([15], target=(target, [copy]))
    assert torch.equal(copy, target[:, 15])
    fill.put([14], target=(target, [copy]))
    assert torch.equal(copy, target[:, 14])
    assert not target[:, 13].any()


def test_copies_that_do_not_fit_are_refused_by_name(fill):
    target, copy = torch.zeros(2, 8, 64, device=DEVICE), torch.ones(2, 64, device=DEVICE)
    for message, slots, copies in (
        ("slots", [8], [copy]),
        ("slots", [-1], [copy]),
        ("slots", [1, 1], [copy, copy]),
        ("copies of wkv: 1 for 2", [0, 1], [copy]),
        ("copies of wkv", [0], [copy[:1]]),
        ("copies of wkv", [0], [copy.half()]),
        ("copies of wkv", [0], [torch.ones(64, 2, device=DEVICE).T]),
        ("copies of wkv", [0], [torch.ones(129, device=DEVICE)[1:]]),
        ("copies of wkv", [0], [copy.cpu()]),
    ):
        for call in (fill.take, fill.put):
            with pytest.raises(ValueError, match=f"^{message}"):
                call(slots, wkv=(target, copies))
    assert not target.any()
    assert bool((copy == 1).all())


@pytest.mark.parametrize("wkv_dtype", [HALF, FLOAT])
def test_states_that_are_taken_and_put_together_are_those_of_torch(fill, wkv_dtype):
    states = [State(SHAPE, 100, shift_dtype=HALF, wkv_dtype=wkv_dtype, device=DEVICE, fill=each) for each in (None, fill)]
    shift, wkv = values(3, 2, 320, dtype=FLOAT), values(3, 5, 64, 64, dtype=FLOAT)
    for state in states:
        generator = torch.Generator(device=DEVICE).manual_seed(3)
        for tensor in (state.shift, state.wkv):
            tensor.normal_(generator=generator)
        state.advance(range(100), range(100))
        kept = state.take_many([7, 99, 0])
        assert [each.elapsed for each in kept] == [7, 99, 0]
        state.put_each([0, 50, 99, 3], [*kept, Snapshot(shift.cpu(), wkv.half(), 5)])
        assert [state.elapsed[slot] for slot in (0, 50, 99, 3)] == [7, 99, 0, 5]
    one, other = states
    assert torch.equal(bits(one.shift), bits(other.shift))
    assert torch.equal(bits(one.wkv), bits(other.wkv))
