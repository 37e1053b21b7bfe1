"""The state with something that fills its slots gives it the right memory."""

import pytest
import torch
from models import TINY, random_weights

from rwkv_batch.model.state import Snapshot, State


class PlainFill:
    """What `state_fill.StateFill` does, in plain torch."""

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
