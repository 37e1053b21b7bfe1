"""Quantised matrices: how numbers become codes, how codes are packed, and the way back. Plain tensors, on any device.

A matrix [.., M, K] is M outputs of K inputs. Its values are stored row by row; K is a multiple of 64. A `transposed` one, which
`ffn_value` is, has an input in each row and outputs along it: it is stored in its natural order, so that a row can be skipped.

    format  values                              scales                            transposed: scales
    int8    int8 [.., M, K]                     fp32 [.., M, 1] = amax / 127      fp32 [1, K]
    fp8     float8_e4m3fn [.., M, K]            fp32 [.., M, 1], near amax / 448  fp32 [1, K]
    fp6     uint8 [.., M, K / 2 + K / 4], e3m2  fp32 [.., M, 1], near amax / 28   fp32 [1, K]
    fp5     uint8 [.., M, K / 2 + K / 8], e2m2  fp32 [.., M, 1], near amax / 7    fp32 [1, K]
    int4    uint8 [.., M, K / 2]                fp16 [.., M, K / 64]              fp16 [M, K / 64]
    nf4     uint8 [.., M, K / 2]                fp16 [.., M, K / 64] = amax       fp16 [M, K / 64]

int4 is (nibble - 8) * scale, of either sign, so that the largest value can meet -8; nf4 has the 16 levels of Dettmers et al.,
"QLoRA" (2023), rounded to fp16; fp6 and fp5 a sign, an exponent (bias 3 and 1, subnormals, nothing infinite) and two bits of
mantissa.

Order in each 64 inputs of a matrix that is not transposed. Tensor cores give a lane of quarter q = 0..3 the inputs 2q, 2q + 1,
2q + 8, 2q + 9 of each of four fragments of 16; here a lane's inputs lie together:

    8 bits  stored[16 q + 4 s + j]              = input 16 s + 2 q + (j & 1) + 8 (j >> 1)
    4 bits  stored[16 q + 8 w + j], i = j & 3   = input 32 w + 16 (i >> 1) + 8 (i & 1) + 2 q + (j >> 2)

Nibbles are packed eight to a little-endian word of 32 bits, the first lowest, so that pair i of a word, values i and i + 4, is
`word >> 4 * i & 0x000f000f`. fp6 and fp5 have their lower four bits (two of exponent, two of mantissa) in the first K / 2 bytes
of a row, packed like that. What is above them follows, in the same sequence of pairs, p = 0..7 of each 16 values:

    fp6  a word of 32 bits, which rotated left by 2 p has the signs at bits 15 and 31, the upper exponent at bits 12 and 28
    fp5  two bytes: bit 7 - p of the first is the sign of the pair's first value, of the second the sign of its second

so that shifts and masks make two fp16 numbers of a pair: sign, exponent and mantissa where they belong, and 2^12 (fp6) or 2^14
(fp5) times too small.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 64  # inputs of one order, and of one scale where a row has several
VALUES_AT_A_TIME = 2**22  # values that are worked on at a time: what they need beside is not worth the memory of a whole matrix
SMALLEST_SCALE = 1e-30  # of rows that are all zero
CLIPS = tuple(0.88 + 0.04 * n for n in range(12))  # int4: by what the scale that shows the largest value is divided
# fp8, fp6, fp5: by what the scale that shows the largest value is multiplied. A float's steps double at each power of two, so
# it counts where the values lie between two.
SHIFTS = tuple(2 ** (n / 8) for n in range(-3, 5))

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """What tells formats apart.

    bits     of a value
    largest  what a row's largest value is brought to; 0 = each BLOCK of values has a scale
    """

    bits: int
    largest: float = 0.0

    @property
    def grouped(self) -> bool:
        """Whether each BLOCK of values has a scale of its own."""
        return not self.largest

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the scales."""
        return torch.float16 if self.grouped else torch.float32


FORMATS = {
    "int8": Format(8, 127.0),
    "fp8": Format(8, 448.0),
    "int4": Format(4),
    "nf4": Format(4),
    "fp6": Format(6, 28.0),
    "fp5": Format(5, 7.0),
}
VALUE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # others: uint8
VERSION = 1  # of what is above; another makes other matrices of the same model


@dataclass(frozen=True)
class Quantisation:
    """How a model's large matrices are kept.

    format  one of FORMATS, "" = as they are
    head    whether the head is kept so too
    """

    format: str = ""
    head: bool = True

    @property
    def of_head(self) -> str:
        """The format of the head."""
        return self.format if self.head else ""

    def fingerprint(self, source: str) -> str:
        """Return what tells a model kept like this from others; `source`: the fingerprint of the model as published."""
        if not self.format:
            return source
        head = "" if self.head else " without head"
        return hashlib.sha256(f"{source} {self.format}{head} {VERSION}".encode()).hexdigest()[:32]


PLAIN = Quantisation()


def value_dtype(name: str) -> torch.dtype:
    """Return the type of a format's values."""
    return VALUE_DTYPES.get(name, torch.uint8)


def stored_columns(name: str, columns: int) -> int:
    """Return how many values of `value_dtype` a row of so many values takes."""
    return columns * FORMATS[name].bits // 8


def matrix_columns(name: str, columns: int) -> int:
    """Return how many values a row of so many stored ones has."""
    return columns * 8 // FORMATS[name].bits


def scales_shape(name: str, shape: tuple[int, ...], *, transposed: bool = False) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix."""
    if FORMATS[name].grouped:
        return (*shape[:-1], shape[-1] // BLOCK)
    return (1, shape[-1]) if transposed else (*shape[:-1], 1)


def num_bytes(name: str, shape: tuple[int, ...], *, transposed: bool = False) -> int:
    """Return the bytes of a quantised matrix, values and scales."""
    scales = torch.Size(scales_shape(name, shape, transposed=transposed)).numel() * FORMATS[name].scale_dtype.itemsize
    return torch.Size(shape).numel() * FORMATS[name].bits // 8 + scales


def quantise(matrix: Tensor, name: str, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Return values and scales of a matrix of finite numbers [.., M, K], K a multiple of 64, on its device."""
    columns = matrix.shape[-1]
    rows = matrix.reshape(-1, columns)
    values = torch.empty(len(rows), stored_columns(name, columns), dtype=value_dtype(name), device=matrix.device)
    shape = scales_shape(name, matrix.shape, transposed=transposed)
    scales = torch.empty(shape, dtype=FORMATS[name].scale_dtype, device=matrix.device)
    shared = transposed and not FORMATS[name].grouped
    if shared:
        largest = torch.stack([block.abs().amax(0, keepdim=True) for _, block in _blocks(rows)]).amax(0).float()
        scales.copy_(_shown(largest, (block.float() for _, block in _blocks(rows)), name))
    by_row = scales.view(-1, shape[-1])
    for at, block in _blocks(rows):
        block = block.float()
        if not shared:
            by_row[at] = _scales(block, name)
        codes = _encode(block, by_row if shared else by_row[at], name)
        values[at].view(torch.uint8).copy_(_pack(codes, name, transposed))
    return values.view(*matrix.shape[:-1], -1), scales


def dequantise(values: Tensor, scales: Tensor, name: str, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    """Return the matrix in its natural order, made in fp32 and rounded once."""
    rows = values.reshape(-1, values.shape[-1])
    by_row = scales.reshape(-1, scales.shape[-1])
    shared = transposed and not FORMATS[name].grouped
    columns = matrix_columns(name, values.shape[-1])
    matrix = torch.empty(len(rows), columns, dtype=dtype, device=values.device)
    for at, block in _blocks(rows):
        numbers = _unordered(_decode(block, name), FORMATS[name].bits, transposed)
        factors = (by_row if shared else by_row[at]).float()
        if FORMATS[name].grouped:
            numbers, factors = numbers.view(len(block), -1, BLOCK), factors[:, :, None]
        matrix[at] = (numbers * factors).view(len(block), columns)
    return matrix.view(*values.shape[:-1], columns)


def decode(values: Tensor, name: str) -> Tensor:
    """Return the numbers [.., M, K] that scales multiply, fp32, in the order in which they are stored."""
    return _decode(values.reshape(-1, values.shape[-1]), name).view(*values.shape[:-1], -1)


def ordered(inputs: Tensor, name: str) -> Tensor:
    """Return inputs [.., K] in the order in which a matrix that is not transposed stores them."""
    return _ordered(inputs, FORMATS[name].bits, False)


def _blocks(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    step = max(1, VALUES_AT_A_TIME // rows.shape[1])
    for start in range(0, len(rows), step):
        at = slice(start, start + step)
        yield at, rows[at]


def _scales(block: Tensor, name: str) -> Tensor:
    """Return the scales of rows [m, K], in the type in which they are stored."""
    if not FORMATS[name].grouped:
        return _shown(block.abs().amax(1, keepdim=True), (block,), name)
    groups = block.view(len(block), -1, BLOCK)
    if name == "nf4":
        return groups.abs().amax(2).half()
    return _int4_scales(groups).half()


def _shown(largest: Tensor, blocks: Iterable[Tensor], name: str) -> Tensor:
    """Return the scales that show the largest values of rows [m, 1] or of columns [1, K]; of floats, with the least error."""
    scales = (largest / FORMATS[name].largest).clamp_min_(SMALLEST_SCALE)
    if name == "int8":
        return scales
    trials = torch.stack([scales * shift for shift in SHIFTS])
    over = 1 if largest.shape[1] == 1 else 0
    errors = 0
    for block in blocks:
        squares = [(_rounded(block / trial, name).mul_(trial) - block).square_().sum(over, keepdim=True) for trial in trials]
        errors = errors + torch.stack(squares)
    return trials.gather(0, errors.argmin(0, keepdim=True))[0]


def _rounded(values: Tensor, name: str) -> Tensor:
    """Return the numbers of a floating format that are nearest to values, fp32."""
    largest = FORMATS[name].largest
    if name == "fp8":
        return values.clamp_(-largest, largest).to(torch.float8_e4m3fn).float()
    powers = (values.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two, at or below each value
    steps = powers.mul_(0.25).clamp_min_(float(_table(name, values.device)[1]))
    return (values / steps).round_().mul_(steps).clamp_(-largest, largest)


def _int4_scales(groups: Tensor) -> Tensor:
    """Return [m, n] for groups [m, n, 64]: of some that cut off more or less, the one with the least squared error."""
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best, chosen = torch.zeros_like(largest[:, :, 0]), largest[:, :, 0] / -8
    for clip in CLIPS:
        scale = largest / (-8 * clip)
        codes = _ratio(groups, scale).round_().clamp_(-8, 7)
        along, square = (codes * groups).sum(2), codes.square().sum(2).clamp_min(1)
        gain = along.square() / square  # by how much the best scale for these codes lowers the squared error
        better = gain > best
        chosen = torch.where(better, along / square, chosen)
        best = torch.where(better, gain, best)
    return chosen


def _encode(block: Tensor, scales: Tensor, name: str) -> Tensor:
    """Return the codes of rows [m, K], uint8, in their natural order."""
    form = FORMATS[name]
    if form.grouped:
        ratio = _ratio(block.view(len(block), -1, BLOCK), scales[:, :, None].float()).view(block.shape)
    else:
        ratio = block / scales
    if name == "int8":
        return ratio.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    if name == "fp8":
        return ratio.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if name == "int4":
        return ratio.round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    if name == "nf4":
        return _nearest(ratio, _table(name, ratio.device))
    magnitudes = _table(name, ratio.device)[: 2 ** (form.bits - 1)]
    sign = torch.signbit(ratio).to(torch.uint8) << (form.bits - 1)
    return _nearest(ratio.abs_(), magnitudes) | sign


def _ratio(values: Tensor, scales: Tensor) -> Tensor:
    """Return values / scales, zero where a scale is."""
    return torch.where(scales == 0, 0.0, values / scales)


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """Return which of the rising levels is nearest to each value, uint8."""
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)


@cache
def _table(name: str, device: torch.device) -> Tensor:
    """Return the number of each code, fp32."""
    if name == "int4":
        table = torch.arange(16.0) - 8
    elif name == "nf4":
        table = torch.tensor(NF4).half().float()
    else:
        table = _float_table(FORMATS[name].bits)
    return table.to(device)


def _float_table(bits: int) -> Tensor:
    """Return the numbers of a sign, an exponent and two bits of mantissa, the positive ones first."""
    codes = torch.arange(2 ** (bits - 1))
    exponent, mantissa = codes >> 2, (codes & 3) / 4
    bias = 2 ** (bits - 4) - 1
    numbers = torch.where(exponent == 0, mantissa * 2, 1 + mantissa) * 2.0 ** (exponent - bias)
    return torch.cat((numbers, -numbers))


@cache
def _pair_table(name: str, device: torch.device) -> Tensor:
    """Return both numbers of each byte of nibbles, fp32 [256, 2]."""
    codes = torch.arange(256, device=device)
    return torch.stack((_table(name, device)[codes & 15], _table(name, device)[codes >> 4]), 1)


def _decode(rows: Tensor, name: str) -> Tensor:
    """Return the numbers [m, K] of stored rows, fp32, in their stored order."""
    if name in VALUE_DTYPES:
        return rows.float()
    if name in ("int4", "nf4"):
        return _pair_table(name, rows.device).index_select(0, rows.reshape(-1).int()).view(len(rows), -1)
    codes = _unpack(rows, FORMATS[name].bits)
    return _table(name, rows.device).index_select(0, codes.view(-1)).view(codes.shape)


def _pack(codes: Tensor, name: str, transposed: bool) -> Tensor:
    """Codes [m, K] in their natural order -> bytes as stored."""
    bits = FORMATS[name].bits
    codes = _ordered(codes, bits, transposed)
    if bits == 8:
        return codes
    nibbles = codes & 15
    lower = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    if bits == 4:
        return lower
    above = (codes >> 4).view(len(codes), -1, 16).int()
    places = _places(bits, codes.device)
    words = sum((above >> n & 1) << places[n] for n in range(bits - 4)).sum(2)
    upper = words.to(torch.int32 if bits == 6 else torch.int16).view(torch.uint8)
    return torch.cat((lower, upper), 1)


def _unpack(rows: Tensor, bits: int) -> Tensor:
    """Bytes [m, ..] of fp6 or fp5 -> codes [m, K] in their stored order, int32."""
    columns = rows.shape[1] * 8 // bits
    lower, upper = rows[:, : columns // 2].int(), rows[:, columns // 2 :].contiguous()
    nibbles = torch.stack((lower & 15, lower >> 4), 2).view(len(rows), -1, 16)
    words = upper.view(torch.int32 if bits == 6 else torch.int16).int()[:, :, None]
    places = _places(bits, rows.device)
    for n in range(bits - 4):
        nibbles |= (words >> places[n] & 1) << (4 + n)
    return nibbles.view(len(rows), columns)


@cache
def _places(bits: int, device: torch.device) -> Tensor:
    """Return where the bits above the lower four of 16 values are in their word: [bits - 4, 16], the lowest bit first."""
    value = torch.arange(16)
    pair, second = 4 * (value >> 3) + (value & 3), (value >> 2) & 1
    if bits == 5:
        return (7 - pair + 8 * second)[None].to(device)
    return torch.stack([(start + 16 * second - 2 * pair) % 32 for start in (12, 15)]).to(device)


# Each 64 inputs seen as several axes, and how these are turned: from the natural order to the stored one, and back.
ORDERS = {8: ((4, 2, 4, 2), (2, 0, 1, 3)), 4: ((2, 2, 2, 4, 2), (3, 0, 4, 1, 2))}


def _ordered(values: Tensor, bits: int, transposed: bool) -> Tensor:
    """Natural order [.., K] -> stored order."""
    if transposed:
        return values
    axes, turn = ORDERS[8 if bits == 8 else 4]
    blocks = values.reshape(-1, *axes)
    return blocks.permute(0, *(1 + axis for axis in turn)).reshape(values.shape)


def _unordered(values: Tensor, bits: int, transposed: bool) -> Tensor:
    """Stored order [.., K] -> natural order."""
    if transposed:
        return values
    axes, turn = ORDERS[8 if bits == 8 else 4]
    blocks = values.reshape(-1, *(axes[axis] for axis in turn))
    return blocks.permute(0, *(1 + turn.index(axis) for axis in range(len(axes)))).reshape(values.shape)
