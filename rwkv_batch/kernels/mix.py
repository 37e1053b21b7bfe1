"""Calls of cuda/mix.cu and cuda/wkv/wkv.cu: embedding, residual sum, layer norm, token shift, and the wkv recurrence.

Shapes: N tokens of B rows packed one after another, width C (a multiple of 64, at most 4096), H = C / 64 heads, S slots. In a
decode step every row is one token (N = B) and belongs to its own slot; slot -1 is padding: such a row touches no state and its
outputs mean nothing. `model/reference_ops.py` says what the results are; sums are fp32, stored values fp16 unless a docstring
says fp32. No method allocates or waits; ValueError names the argument that does not fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer
from rwkv_batch.model.packed_rows import RowLayout
from rwkv_batch.model.weights import HEAD_SIZE

COLUMNS_OF_WARP = 256
MAX_WIDTH = 4096
MANY_ROWS = 128  # from which a block takes several at once, as in cuda/mix.cu
PREFILL_WARPS = 16  # of a multiprocessor that takes norms of prefills, as in cuda/mix.cu
# Fewest and most tokens of a prefill that a block of the norm takes, by default; those of narrow models first.
NARROW, RUNS_OF_NARROW, RUNS = 1024, (2, 8), (4, 32)
PLANES_TO_MIX = (6, 1, 3, 2)  # the last two: RWKV-6's
CHUNK = 16  # tokens that the matrix form of the recurrence takes at a time
CHUNK_BYTES = 11136  # of a prepared one, as `Chunk` in cuda/wkv/wkv_spread.cuh
SPREAD_TOKENS = 256  # of a row, on average, from which spreading a recurrence over the GPU pays; measured on an H200
LOGGED_TOKENS = 2  # of a slot and layer at most; the next one has the state written. As in cuda/wkv/wkv_logged.cu
LOGGED_BYTES = 768  # of one and a head, as `Logged` there
STATE_TYPES = {torch.float32: 0, torch.float16: 1}  # as `Type` in cuda/common.cuh


@dataclass(frozen=True)
class WkvInputs:
    """What the matrices make of N tokens for the recurrence; fp16 but for w_raw.

    r, k, v      [N, C]
    w_raw        [N, C] fp32: w = exp(-exp(-0.5) * sigmoid(w_raw)), the bias w0 is in it
    a            [N, C], the in-context learning rate, after its sigmoid
    v_mix        [N, C], how much of v_first becomes v, after its sigmoid; None in layer 0
    g            [N, C], the gate
    v_first      [N, C]: the values of layer 0, written there, read in the others
    """

    r: Tensor
    k: Tensor
    v: Tensor
    w_raw: Tensor
    a: Tensor
    v_mix: Tensor | None
    g: Tensor
    v_first: Tensor


@dataclass(frozen=True)
class WkvLayer:
    """A layer's vectors, fp32 [C]."""

    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


@dataclass(frozen=True, eq=False)
class LayerLog:
    """The log of one layer.

    entries   [S, H, LOGGED_TOKENS, LOGGED_BYTES] uint8
    standing  [S, 2] int32, of all layers: how far each slot is
    is_last   whether the layer is the last of a step, which says so there
    """

    entries: Tensor
    standing: Tensor
    is_last: bool


class Mix:
    """The kernels on one device. `pdl`: a kernel may start while the one before it ends; then every kernel of the stream
    that touches the same memory must wait for its predecessor as these do (griddepcontrol.wait).

    spread_tokens  of a row, on average, from which the recurrence of few rows is spread over the GPU
    """

    def __init__(self, launcher: Launcher, *, pdl: bool = False):
        self._launcher = launcher
        self._device = launcher.device
        self._pdl = int(pdl)
        self.spread_tokens = SPREAD_TOKENS
        self._num_sms = torch.cuda.get_device_properties(launcher.device).multi_processor_count
        self._hopper = launcher.hopper
        self._embed = launcher.bind("rwkv_embed", *[POINTER] * 4, *[INT] * 3)
        self._decode = launcher.bind("rwkv_add_norm_mix_decode", *[POINTER] * 8, *[INT] * 6)
        self._prefill = launcher.bind("rwkv_add_norm_mix_prefill", *[POINTER] * 11, *[INT] * 7)
        self._add_norm = launcher.bind("rwkv_add_norm", *[POINTER] * 6, *[INT] * 3)
        self._wkv_decode = launcher.bind("rwkv_wkv_decode", *[POINTER] * 14, INT, *[POINTER] * 2, *[INT] * 4)
        self._wkv_scan = launcher.bind("rwkv_wkv_scan", *[POINTER] * 14, INT, *[POINTER] * 3, *[INT] * 3)
        self._wkv_chunks = None
        if torch.version.hip is None:
            self._wkv_logged = launcher.bind("rwkv_wkv_decode_logged", *[POINTER] * 18, *[INT] * 5)
            self._wkv_chunks = launcher.bind("rwkv_wkv_chunks", *[POINTER] * 14, INT, *[POINTER] * 3, *[INT] * 4)
        self._wkv_spread = None
        if self._hopper:
            self._wkv_spread = launcher.bind("rwkv_wkv_spread", *[POINTER] * 14, INT, *[POINTER] * 4, *[INT] * 4)

    def embed(self, ids: Tensor, table: Tensor, x: Tensor) -> None:
        """x [N, C] fp32 = the rows `ids` [N] int64 of table [V, C]."""
        n, c = x.shape
        self._check(ids=(ids, torch.int64, (n,)), table=(table, torch.float16, (len(table), c)), x=(x, torch.float32, (n, c)))
        self._launcher.launch(self._embed, pointer(ids), None, pointer(table), pointer(x), n, c, self._pdl)

    def embed_decode(self, last_ids: Tensor, slots: Tensor, table: Tensor, x: Tensor) -> None:
        """x [B, C] fp32 = the rows last_ids[slots] of table [V, C], zeros for padding; last_ids [S], slots [B] int64."""
        n, c = x.shape
        self._check(
            last_ids=(last_ids, torch.int64, last_ids.shape),
            slots=(slots, torch.int64, (n,)),
            table=(table, torch.float16, (len(table), c)),
            x=(x, torch.float32, (n, c)),
        )
        arguments = (last_ids, slots, table, x)
        self._launcher.launch(self._embed, *map(pointer, arguments), n, c, self._pdl)

    def add_norm_mix_decode(
        self,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        mix: Tensor,
        shift: Tensor,
        slots: Tensor,
        out: Tensor,
        *,
        parts: int | None = None,
        inputs_ready: bool = False,
    ) -> None:
        """x [B, C] fp32 += y [B, C]; out[k] = lerp(layer norm of x, shift[slots], mix[k]); shift[slots] = layer norm of x.

        y may be None; weight, bias [C] fp32; mix [K, C] fp32, K of PLANES_TO_MIX; shift [S, C]; slots [B] int64; out [K, B, C].
        parts         blocks a row is spread over, by default what is fast, one without clusters; results do not depend on it
        inputs_ready  promises that whatever wrote `shift` and `slots` had ended before the preceding kernel began
        """
        n, c = x.shape
        self._check_norm(x, y, weight, bias, mix, shift, out)
        self._check(slots=(slots, torch.int64, (n,)))
        parts = parts or self._parts(n, c)
        arguments = (x, y, weight, bias, mix, shift, slots, out)
        self._launcher.launch(self._decode, *map(pointer, arguments), n, c, len(mix), parts, inputs_ready, self._pdl)

    def add_norm_mix_prefill(
        self,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        mix: Tensor,
        shift: Tensor,
        rows: RowLayout,
        normed: Tensor,
        out: Tensor,
        *,
        run: int | None = None,
        parts: int | None = None,
    ) -> None:
        """The same for packed rows: a token blends with the one before it in its row, a row's first with shift[slot], which
        then takes the row's last.

        normed  [N, C] scratch
        run     tokens a block takes one after another, parts: blocks a row is spread over; results depend on neither
        """
        n, c = x.shape
        self._check_norm(x, y, weight, bias, mix, shift, out)
        self._check(normed=(normed, torch.float16, (n, c)))
        self._check_rows(rows)
        if rows.previous_slot.shape != (n,):
            raise ValueError(f"rows: {rows.previous_slot.shape[0]} tokens, x has {n}")
        run = run or self._run(n, c)
        arguments = (x, y, weight, bias, mix, shift, rows.previous_slot, rows.last_token_index, rows.slots, normed, out)
        sizes = (n, len(rows.slots), c, len(mix), run, parts or 1)
        self._launcher.launch(self._prefill, *map(pointer, arguments), *sizes, self._pdl)

    def add_norm(self, x: Tensor, y: Tensor | None, index: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor) -> None:
        """out [n, C] = layer norm of (x + y)[index]: x [N, C] fp32, y [N, C] or None, index [n] int64 or None for all."""
        n, c = x.shape
        chosen = n if index is None else len(index)
        self._check(
            x=(x, torch.float32, (n, c)),
            y=(y, torch.float16, (n, c)),
            index=(index, torch.int64, (chosen,)),
            weight=(weight, torch.float32, (c,)),
            bias=(bias, torch.float32, (c,)),
            out=(out, torch.float16, (chosen, c)),
        )
        self._launcher.launch(self._add_norm, *map(pointer, (x, y, index, weight, bias, out)), chosen, c, self._pdl)

    def wkv_decode(
        self,
        inputs: WkvInputs,
        layer: WkvLayer,
        state: Tensor,
        slots: Tensor,
        out: Tensor,
        *,
        log: LayerLog | None = None,
        inputs_ready: bool = False,
    ) -> None:
        """One token for each row: from the recurrence's inputs to out [B, C], what goes into the output matrix.

        state         [S, H, 64 value, 64 key] fp16 or fp32, updated in place; slots [B] int64.
        log           of `state`, then fp16, where most slots' tokens go instead; None: it has no token of these slots
        inputs_ready  promises that whatever wrote `state`, `log` and `slots` had ended before the preceding kernel began
        """
        n, c = out.shape
        self._check_wkv(inputs, layer, state, out)
        self._check(slots=(slots, torch.int64, (n,)))
        sizes = (n, c // HEAD_SIZE, inputs_ready, self._pdl)
        if log is None:
            arguments = (pointer(state), STATE_TYPES[state.dtype], pointer(slots), pointer(out))
            self._launcher.launch(self._wkv_decode, *self._wkv_pointers(inputs, layer), *arguments, *sizes)
            return
        entries = (*state.shape[:2], LOGGED_TOKENS, LOGGED_BYTES)
        self._check(
            state=(state, torch.float16, state.shape),
            entries=(log.entries, torch.uint8, entries),
            standing=(log.standing, torch.int32, (len(state), 2)),
        )
        arguments = map(pointer, (state, log.entries, log.standing, slots, out))
        self._launcher.launch(self._wkv_logged, *self._wkv_pointers(inputs, layer), *arguments, log.is_last, *sizes)

    def wkv_prefill(
        self,
        inputs: WkvInputs,
        layer: WkvLayer,
        state: Tensor,
        rows: RowLayout,
        out: Tensor,
        *,
        exact: bool = False,
        room: Tensor | None = None,
    ) -> None:
        """The same for packed rows of any lengths: out [N, C].

        exact  token by token in fp32, as a decode step does it, instead of 16 tokens at a time on tensor cores (relative error
               about 1e-3). Where tensor cores cannot be used it is always so.
        room   memory that may be overwritten, so that few rows can be spread over the GPU; then inputs.w_raw is overwritten too
        """
        c = out.shape[1]
        self._check_wkv(inputs, layer, state, out)
        self._check_rows(rows)
        arguments = [pointer(state), STATE_TYPES[state.dtype], pointer(rows.cu_seqlens), pointer(rows.slots), pointer(out)]
        sizes = [len(rows.slots), c // HEAD_SIZE]
        kernel = self._wkv_scan
        if not exact and self.spreads(*sizes, len(out), room):
            kernel = self._wkv_spread
            arguments.append(pointer(room))
            sizes.insert(0, len(out))
        elif self._wkv_chunks and not exact:
            kernel = self._wkv_chunks
            alone = self._hopper and sizes[0] * sizes[1] <= self._num_sms  # a block has a multiprocessor to itself
            sizes.append(8 if alone else 4)
        self._launcher.launch(kernel, *self._wkv_pointers(inputs, layer), *arguments, *sizes, self._pdl)

    def spreads(self, rows: int, heads: int, num_tokens: int, room: Tensor | None) -> bool:
        """Whether the recurrence of so many rows is spread over the GPU, where it need not be exact.

        That pays for long rows as long as their states fill half the GPU at most: more of them keep it busy anyway, with less
        memory to read and write.
        """
        if self._wkv_spread is None or room is None or num_tokens < rows * self.spread_tokens:
            return False
        fits = (num_tokens // CHUNK + rows) * heads * CHUNK_BYTES <= room.nbytes
        return fits and rows * heads <= self._num_sms // 2

    def _run(self, tokens: int, width: int) -> int:
        """Tokens of a block such that all multiprocessors are done at about the same time.

        Every block has its start, and leaves a blend to another kernel; long ones may end late.
        """
        warps = (width + COLUMNS_OF_WARP - 1) // COLUMNS_OF_WARP
        at_once = self._num_sms * (PREFILL_WARPS // warps)  # blocks
        fewest, most = RUNS_OF_NARROW if width <= NARROW else RUNS
        rounds = math.ceil(tokens / (at_once * most))
        return max(fewest, math.ceil(tokens / (at_once * rounds)))

    def _parts(self, rows: int, width: int) -> int:
        """Few rows are spread over several blocks each, since one block alone reads the layer's vectors too slowly."""
        if not self._hopper:
            return 1
        least = COLUMNS_OF_WARP if rows <= 64 else 1024 if rows <= 512 else 2048  # columns of a block
        if MANY_ROWS <= rows <= 512 and width == 2048:
            least = 512  # 1.5B with 320 rows took 3,462 us in two parts, 3,430 in four
        return max(
            parts for parts in (1, 2, 4, 8) if parts == 1 or (width % (parts * COLUMNS_OF_WARP) == 0 and width >= parts * least)
        )

    def _check(self, **expected: tuple[Tensor | None, torch.dtype, Sequence[int]]) -> None:
        for name, (tensor, dtype, shape) in expected.items():
            if tensor is not None:
                check(name, tensor, self._device, dtype, shape)

    def _check_norm(self, x, y, weight, bias, mix, shift, out) -> None:
        n, c = x.shape
        if c % HEAD_SIZE or c > MAX_WIDTH or len(mix) not in PLANES_TO_MIX:
            raise ValueError(
                f"x: width {c} must be a multiple of 64 up to {MAX_WIDTH}; mix: {len(mix)} planes must be 1, 2, 3 or 6"
            )
        self._check(
            x=(x, torch.float32, (n, c)),
            y=(y, torch.float16, (n, c)),
            weight=(weight, torch.float32, (c,)),
            bias=(bias, torch.float32, (c,)),
            mix=(mix, torch.float32, (len(mix), c)),
            shift=(shift, torch.float16, (len(shift), c)),
            out=(out, torch.float16, (len(mix), n, c)),
        )

    def _check_rows(self, rows: RowLayout) -> None:
        b = len(rows.slots)
        self._check(
            slots=(rows.slots, torch.int64, (b,)),
            cu_seqlens=(rows.cu_seqlens, torch.int32, (b + 1,)),
            last_token_index=(rows.last_token_index, torch.int32, (b,)),
            previous_slot=(rows.previous_slot, torch.int32, rows.previous_slot.shape),
        )

    def _check_wkv(self, inputs: WkvInputs, layer: WkvLayer, state: Tensor, out: Tensor) -> None:
        n, c = out.shape
        for name, tensor in vars(inputs).items():
            if tensor is not None:
                check(name, tensor, self._device, torch.float32 if name == "w_raw" else torch.float16, (n, c))
        for name, tensor in vars(layer).items():
            check(name, tensor, self._device, torch.float32, (c,))
        if state.dtype not in STATE_TYPES:
            raise ValueError(f"state: expected fp16 or fp32, got {state.dtype}")
        self._check(
            out=(out, torch.float16, (n, c)),
            state=(state, state.dtype, (len(state), c // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE)),
        )

    @staticmethod
    def _wkv_pointers(inputs: WkvInputs, layer: WkvLayer) -> list[int | None]:
        return [pointer(tensor) for tensor in (*vars(inputs).values(), *vars(layer).values())]
