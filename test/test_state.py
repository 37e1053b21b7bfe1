"""The state with something that fills its slots gives it the right memory."""

import random

import pytest
import torch
from models import TINY, random_weights

from rwkv_batch.model.state import Snapshot, State


class PlainFill:
    """What `fill.StateFill` does, in plain torch."""

    def __call__(self, slots, **parts):
        for target, source in parts.values():
            assert target.is_contiguous()
            for slot in slots:
                target[:, slot] = 0 if source is None else source

    def take(self, slots, **parts):
        for target, copies in parts.values():
            for slot, copy in zip(slots, copies, strict=True):
                copy.copy_(target[:, slot].view(copy.shape))

    def put(self, slots, **parts):
        for target, copies in parts.values():
            for slot, copy in zip(slots, copies, strict=True):
                target[:, slot] = copy.view(target[:, slot].shape)


@pytest.mark.parametrize("wkv_dtype", [torch.float32, torch.float16])
def test_filled_slots_equal_those_that_torch_wrote(wkv_dtype):
    shape = random_weights(TINY, 256).shape
    states = [State(shape, 6, shift_dtype=torch.float16, wkv_dtype=wkv_dtype, fill=each) for each in (None, PlainFill())]
    snapshot = Snapshot(torch.randn_like(states[0].take(0).shift.float()), torch.randn_like(states[0].take(0).wkv).double(), 9)
    for state in states:
        state.shift.fill_(torch.nan)
        state.wkv.fill_(torch.nan)
        state.put(5, snapshot)
        state.put_many([3, 0, 1], snapshot)
        state.clear([0, 4])
        state.clear([])
        kept = state.take_many([5, 4])
        state.put_each([4, 0], kept)
        assert [each.elapsed for each in kept] == [9, 0]
        assert torch.equal(kept[0].wkv, state.take(5).wkv)
        assert state.take_many([]) == []
        with pytest.raises(ValueError, match="shapes"):
            state.put_each([0], [Snapshot(snapshot.shift[:1], snapshot.wkv, 1)])
    for one, other in ((states[0].shift, states[1].shift), (states[0].wkv, states[1].wkv)):
        assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    assert states[1].elapsed == states[0].elapsed == [0, 9, 0, 9, 9, 9]
    assert states[1].shift[:, :, 2].isnan().all()


class CountingLog:
    """A log of which every entry says what a step makes of a slot's matrices: x becomes 7 x + token, modulo a prime."""

    def __init__(self, state, least_rows):
        self.state, self.least_rows = state, least_rows
        self.kept = [[] for _ in range(state.num_slots)]

    def flush(self, slots):
        assert len(set(slots)) == len(slots) > 0
        for slot in slots:
            for token in self.kept[slot]:
                self.feed(slot, token)
            self.kept[slot] = []

    def forget(self, slots):
        assert len(slots) > 0
        for slot in slots:
            self.kept[slot] = []

    def feed(self, slot, token):
        self.state.wkv[:, slot] = (self.state.wkv[:, slot] * 7 + token) % 8191

    def step(self, slots, tokens):
        """Every third token of a slot is written, with what was kept before it."""
        for slot, token in zip(slots, tokens, strict=True):
            self.kept[slot].append(token)
            if len(self.kept[slot]) == 3:
                self.flush([slot])


@pytest.mark.parametrize("fill", [None, PlainFill()], ids=["torch", "fill"])
@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_lost_or_counted_twice_whatever_happens_to_slots_with_a_log(seed, fill):
    """As long as steps say what they are, and states change hands by the methods of `State` alone."""
    state = State(random_weights(TINY, 256).shape, 9, fill=fill)
    log, rng, seen, kept = CountingLog(state, 4), random.Random(seed), [0] * 9, []
    state.keep_log(log)
    state.clear(range(9))

    def decode():
        slots = rng.sample(range(9), rng.randint(1, 9))
        tokens = [rng.randrange(1, 1000) for _ in slots]
        state.advance(slots, [1] * len(slots), logged=state.logs(len(slots)))
        if len(slots) >= 4:
            log.step(slots, tokens)
        for slot, token in zip(slots, tokens, strict=True):
            if len(slots) < 4:
                assert not log.kept[slot]
                log.feed(slot, token)
            seen[slot] = (seen[slot] * 7 + token) % 8191

    def prefill():
        slots = rng.sample(range(9), 2)
        state.advance(slots, [3, 2])
        for slot in (slots[0],) * 3 + (slots[1],) * 2:
            assert not log.kept[slot]
            log.feed(slot, 5)
            seen[slot] = (seen[slot] * 7 + 5) % 8191

    def take():
        slots = rng.sample(range(9), rng.randint(1, 3))
        kept.extend(zip(state.take_many(slots), [seen[slot] for slot in slots], strict=True))

    def put():
        slots = rng.sample(range(9), rng.randint(1, 3))
        if kept and rng.random() < 0.5:
            snapshot, value = rng.choice(kept)
            state.put_many(slots, snapshot)
            values = [value] * len(slots)
        elif kept:
            some = [rng.choice(kept) for _ in slots]
            state.put_each(slots, [snapshot for snapshot, _ in some])
            values = [value for _, value in some]
        else:
            state.clear(slots)
            values = [0] * len(slots)
        for slot, value in zip(slots, values, strict=True):
            seen[slot] = value

    for _ in range(200):
        rng.choices((decode, prefill, take, put), (6, 1, 1, 1))[0]()
    assert kept
    for snapshot, value in [*kept, *((state.take(slot), seen[slot]) for slot in range(9))]:
        assert (snapshot.wkv == value).all()


def test_nothing_is_flushed_where_nothing_can_be_logged():
    state = State(random_weights(TINY, 256).shape, 8)
    log = CountingLog(state, 4)
    log.flush = log.forget = None
    state.advance([1, 2], [1, 1], logged=state.logs(8))
    state.clear([1])
    assert not state.logs(8)
    state._log = log  # without the slots that `keep_log` takes for unflushed
    state.advance([1, 2], [5, 1])
    state.take_many([1, 2])
    state.put(3, state.take(2))
    state.clear([1])
