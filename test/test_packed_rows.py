"""What ops and kernels are told of the rows of a step."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rwkv_batch.engine.prefill_graphs import step_inputs
from rwkv_batch.model.packed_rows import CHUNK, CONTINUES, NO_SLOT, CapturedRows, PackedRows, RowLayout


def test_rows_lie_one_after_another():
    rows = PackedRows([4, 0, 7], [2, 1, 3])
    assert not rows.is_decode
    assert rows.cu_seqlens == [0, 2, 3, 6]
    assert rows.first_token_index.tolist() == [0, 2, 3]
    assert rows.last_token_index.tolist() == [1, 2, 5]
    assert rows.single == [1]
    assert rows.layout.previous_slot.tolist() == [4, CONTINUES, 0, 7, CONTINUES, CONTINUES]
    assert rows.layout.cu_seqlens.tolist() == rows.cu_seqlens
    assert rows.layout.last_token_index.tolist() == rows.last_token_index.tolist()


def test_slots_that_follow_one_another_are_a_slice():
    assert PackedRows([3, 4, 5], [1, 1, 1]).slot_index == slice(3, 6)
    assert PackedRows([3, 5, 4], [1, 1, 1]).slot_index.tolist() == [3, 5, 4]
    assert PackedRows([3, 5, 4], [1, 1, 1]).is_decode


def test_rows_without_a_slot_have_no_token_before():
    assert RowLayout.of([-1, 2], [2, 1], "cpu").previous_slot.tolist() == [NO_SLOT, CONTINUES, 2]


@pytest.mark.parametrize("lengths", [[1], [CHUNK], [CHUNK + 1, 1, 70], [2, 3 * CHUNK]])
def test_chunks_hold_every_token_of_long_rows_once(lengths):
    rows = PackedRows(list(range(len(lengths))), lengths)
    if max(lengths) == 1:
        assert rows.is_decode
        return
    index, padding = rows.chunks.index, rows.chunks.padding
    held = index.flatten() if padding is None else index[~padding]
    expected = [t for b, n in enumerate(lengths) if n > 1 for t in range(rows.cu_seqlens[b], rows.cu_seqlens[b + 1])]
    assert sorted(held.tolist()) == expected


def test_what_a_captured_step_is_fed_says_the_same():
    """But for what fills it up: tokens that belong to no row, rows without a slot."""
    slots, prompts = [5, 2], [[11, 12, 13], [14]]
    tokens, rest = torch.tensor(step_inputs(slots, prompts, 1, 6, 3, 2 * 6 + 4 * 3 + 1)).split([6, 19])
    row_slots, _, last, cu_seqlens, previous = rest.split([3, 3, 3, 4, 6])
    rows, layout = PackedRows(slots, [3, 1]), RowLayout(row_slots, cu_seqlens, last.int(), previous)
    captured = CapturedRows.prefill(layout, last)
    assert tokens.tolist() == [11, 12, 13, 14, 0, 0]
    assert not captured.is_decode
    assert captured.last_token_index[:2].tolist() == rows.last_token_index.tolist()
    assert captured.layout.cu_seqlens.tolist() == [*rows.cu_seqlens, 4]
    assert captured.layout.previous_slot.tolist() == [*rows.layout.previous_slot.tolist(), NO_SLOT, NO_SLOT]
    assert captured.slot_tensor.tolist() == [*slots, -1]


def test_a_captured_decode_step_knows_its_slots_on_the_device_alone():
    rows = CapturedRows.decode(torch.tensor([3, -1]))
    assert rows.is_decode
    assert list(rows.slots) == list(rows.lengths) == []


def test_the_host_does_not_wait_for_what_a_device_is_told():
    """Or the first stage of a pipeline would have nothing to do until the last one has done the step before."""
    copies = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "copy" in op.name() and args[0].device.type == "cpu":
                copies.append((kwargs or {}).get("non_blocking", False))
            return op(*args, **(kwargs or {}))

    with Noted():
        rows = PackedRows([4, 0], [5, 3], torch.device("meta"))
        told = [rows.layout.slots, rows.first_token_index, rows.last_token_index, rows.slot_tensor]
    assert all(tensor.is_meta for tensor in told)
    assert copies == [True] * len(told)
