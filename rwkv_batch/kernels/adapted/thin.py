"""Calls of cuda/linear/adapters.cu: thin products, of few columns, by way of a buffer of their own.

`down` multiplies N tokens by a few columns each, `up` what came of it by the columns' other halves. Which columns a token has
a `Grouping` says, made on the device for each step; without one all tokens have all. A token's result does not depend on the
others, on their adapters or on its place; its sums have one order up to SHARED_TOKENS and another one beyond.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer
from rwkv_batch.model.packed_rows import StepRows

HALF = torch.float16
MAX_COLUMNS = 2048  # of a grouping
MANY_TOKENS = 128  # from which units are of 32 tokens and 32 columns instead of 16 and 8
SHARED_TOKENS = 512  # up to which several thread blocks share the inputs of a product
PIECE = 1024  # inputs that a thread block takes at a time
LONG_PIECE, LONG_WIDTH = 2048, 8192  # and of products with so many
MAX_PARTS = 8
ADD, ADD_SQUARE, BLEND, BIAS = range(4)  # as `Behind` in cuda/linear/adapters.cu


@dataclass(frozen=True)
class Cut:
    """How a product is cut up.

    many    whether units are large
    long    whether pieces are of LONG_PIECE inputs
    pieces  that a thread block takes one after another
    parts   thread blocks that share the inputs; their sums are added by what reads them, in a fixed order
    """

    many: bool
    long: bool
    pieces: int
    parts: int

    @property
    def unit(self) -> tuple[int, int]:
        """Tokens and columns of a unit."""
        return (32, 32) if self.many else (16, 8)


@functools.lru_cache(4096)
def cut_for(tokens: int, width: int) -> Cut:
    """Return how a product of so many tokens and inputs is cut up."""
    many = tokens >= MANY_TOKENS
    long = not many and width >= LONG_WIDTH
    total = -(-width // (LONG_PIECE if long else PIECE))
    pieces = -(-total // MAX_PARTS) if tokens <= SHARED_TOKENS else total
    return Cut(many, long, pieces, -(-total // pieces))


class Grouping:
    """Which tokens of a step have which columns: tables on the device, at a fixed place for each number of tokens.

    num_columns  of the tables of adapters, MAX_COLUMNS at most
    max_tokens   of a step
    """

    def __init__(self, launcher: Launcher, num_columns: int, max_tokens: int):
        if num_columns > MAX_COLUMNS:
            raise ValueError(f"num_columns: at most {MAX_COLUMNS}, not {num_columns}")
        self.num_columns = num_columns
        self._launcher = launcher
        self._group = launcher.bind("rwkv_group_tokens", *[POINTER] * 5, *[INT] * 6)
        self.tables = torch.zeros(self.room(num_columns, max_tokens), dtype=torch.int32, device=launcher.device)

    @staticmethod
    def max_tiles(num_columns: int, tokens: int) -> int:
        """Return how many tiles of tokens there may be: full ones, one that is not for each adapter, and one without any."""
        return tokens // cut_for(tokens, PIECE).unit[0] + min(tokens, num_columns) + 1

    @staticmethod
    def max_units(num_columns: int, tokens: int) -> int:
        """Return how many units there may be."""
        tile, unit = cut_for(tokens, PIECE).unit
        return (
            (tokens // tile + 1) * (num_columns // unit + 1) + min(tokens, num_columns) + num_columns // unit + tokens // tile
        )

    @classmethod
    def room(cls, num_columns: int, max_tokens: int) -> int:
        """Return how long the tables are for steps of up to so many tokens."""
        return max(cls.num_words(num_columns, n) for n in (max_tokens, min(max_tokens, MANY_TOKENS - 1)))

    @classmethod
    def num_words(cls, num_columns: int, tokens: int) -> int:
        """Return how long they are for so many."""
        lists = -(-tokens // 4) * 4 + -(-num_columns // 4) * 4
        return 4 + lists + 4 * (cls.max_tiles(num_columns, tokens) + cls.max_units(num_columns, tokens))

    def group(self, rows: StepRows, tokens: int, of_slot: Tensor, owner: Tensor) -> None:
        """Make the tables of a step: `of_slot` [S+1], `owner` [columns], int64: the adapter's number, 0 and -1 = none."""
        slots, starts = (rows.slot_tensor, None) if rows.is_decode else (rows.layout.slots, rows.layout.cu_seqlens)
        device = self._launcher.device
        check("slots", slots, device, torch.int64, (len(slots),))
        check("of_slot", of_slot, device, torch.int64, of_slot.shape)
        check("owner", owner, device, torch.int64, (self.num_columns,))
        if starts is not None:
            check("starts", starts, device, torch.int32, (len(slots) + 1,))
        pointers = map(pointer, (slots, of_slot, owner, starts, self.tables))
        sizes = (len(slots), tokens, self.num_columns, self.max_tiles(self.num_columns, tokens))
        self._launcher.launch(self._group, *pointers, *sizes, *cut_for(tokens, PIECE).unit)


class Thin:
    """The products on one device, and the buffer between their halves.

    num_values  fp32 numbers of the buffer; see `num_values`
    pdl         see `Linear`
    """

    def __init__(self, launcher: Launcher, num_values: int, *, pdl: bool = False):
        self.launcher = launcher
        self.pdl = int(pdl)
        self.num_sms = torch.cuda.get_device_properties(launcher.device).multi_processor_count
        self._hidden = torch.zeros(num_values, dtype=torch.float32, device=launcher.device)
        self._down = launcher.bind("rwkv_thin_down", *[POINTER] * 4, *[INT] * 12)
        self._up = launcher.bind("rwkv_thin_up", *[POINTER] * 7, *[INT] * 13)

    @staticmethod
    def num_values(planes: int, columns: int, max_tokens: int) -> int:
        """Return how long the buffer must be for up to so many tokens, in so many planes of any width."""
        return planes * pitch(columns) * max(max_tokens, MAX_PARTS * min(max_tokens, SHARED_TOKENS))

    def down(self, x: Tensor, down: Tensor, grouping: Grouping | None = None) -> None:
        """hidden = x [N, K] times down [columns, K] transposed, or with a leading dimension as many; K a multiple of 32."""
        planes, (n, width), columns = _planes(x), x.shape[-2:], down.shape[-2]
        lead = x.shape[:-2]
        self._check(x=(x, HALF, (*lead, n, width)), down=(down, HALF, (*lead, columns, width)))
        if width % 32:
            raise ValueError(f"x: width {width} is no multiple of 32")
        cut = cut_for(n, width)
        if cut.parts * planes * n * pitch(columns) > len(self._hidden):
            raise ValueError(f"x: {n} tokens are more than the buffer has room for")
        if grouping is None:
            blocks = -(-n // cut.unit[0]) * -(-columns // cut.unit[1])
        else:
            blocks = min(Grouping.max_units(columns, n), -(-columns // cut.unit[1]) + 8 * -(-n // cut.unit[0]))
        tables = self._tables(grouping, columns, n)
        sizes = (planes, n, width, columns, pitch(columns), tables[1])
        pointers = (pointer(x), pointer(down), pointer(self._hidden), tables[0])
        how = (int(cut.many), int(cut.long), cut.pieces, cut.parts, blocks, self.pdl)
        self.launcher.launch(self._down, *pointers, *sizes, *how)

    def add_up(self, up: Tensor, out: Tensor, width_in: int, grouping: Grouping | None = None, *, square: bool = False) -> None:
        """out [N, M] += hidden times up [columns, M], or with a leading dimension as many.

        width_in  K of the `down` before
        square    out = min(max(out, 0)^2, 65504) then, of all tokens
        """
        self._check(out=(out, HALF, out.shape), up=(up, HALF, (*out.shape[:-2], up.shape[-2], out.shape[-1])))
        self._launch_up(up, out, width_in, grouping, ADD_SQUARE if square else ADD)

    def blend_up(self, up: Tensor, bias: Tensor, start: Tensor, end: Tensor, out: Tensor, width_in: int) -> None:
        """out [P, N, M] = start + (end - start) * (bias + tanh(hidden) up): start, end [N, M], bias [P, M] fp32, up [P, R, M].

        Plane p has columns p * R to p * R + R - 1 of the `down` before, R a multiple of 4.
        """
        planes, n, m = out.shape
        self._check(
            up=(up, HALF, (planes, up.shape[1], m)), bias=(bias, torch.float32, (planes, m)), start=(start, HALF, (n, m)),
            end=(end, HALF, (n, m)), out=(out, HALF, out.shape),
        )  # fmt: skip
        self._launch_up(up, out, width_in, None, BLEND, bias=bias, start=start, end=end, tanh=True)

    def bias_up(self, up: Tensor, bias: Tensor, out: Tensor, width_in: int) -> None:
        """out [N, M] fp32 = bias [M] fp32 + tanh(hidden) up [R, M]; R a multiple of 4."""
        n, m = out.shape
        self._check(up=(up, HALF, (len(up), m)), bias=(bias, torch.float32, (m,)), out=(out, torch.float32, (n, m)))
        self._launch_up(up, out, width_in, None, BIAS, bias=bias, tanh=True)

    def _launch_up(
        self, up: Tensor, out: Tensor, width_in: int, grouping: Grouping | None, behind: int, *, bias: Tensor | None = None,
        start: Tensor | None = None, end: Tensor | None = None, tanh: bool = False,
    ) -> None:  # fmt: skip
        planes, (n, width), columns = _planes(out), out.shape[-2:], up.shape[-2]
        if width % 64:
            raise ValueError(f"out: width {width} is no multiple of 64")
        cut, shared = cut_for(n, width_in), behind in (BLEND, BIAS)
        tiles = -(-n // cut.unit[0])
        blocks = tiles if grouping is None else min(Grouping.max_tiles(columns, n), 2 * tiles + 8)
        tables = self._tables(grouping, columns, n)
        pointers = map(pointer, (start, end, bias))
        hidden_pitch = pitch(columns * planes) if shared else pitch(columns)
        sizes = (planes, n, width, columns, hidden_pitch, tables[1], int(cut.many), cut.parts, int(not shared))
        addresses = (pointer(self._hidden), pointer(up), tables[0], pointer(out), *pointers)
        self.launcher.launch(self._up, *addresses, *sizes, behind, int(tanh), blocks, self.pdl)

    def _tables(self, grouping: Grouping | None, columns: int, tokens: int) -> tuple[int | None, int]:
        if grouping is None:
            return None, 0
        if grouping.num_columns != columns:
            raise ValueError(f"grouping: of {grouping.num_columns} columns, not {columns}")
        return pointer(grouping.tables), Grouping.max_tiles(columns, tokens)

    def _check(self, **expected: tuple[Tensor, torch.dtype, tuple[int, ...]]) -> None:
        for name, (tensor, dtype, shape) in expected.items():
            check(name, tensor, self.launcher.device, dtype, shape)


def pitch(columns: int) -> int:
    """Return the numbers of a token in the buffer."""
    return -(-columns // 4) * 4


def _planes(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() == 3 else 1
