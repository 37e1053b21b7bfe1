"""Quantised matrices: errors within what each format states, and every bit where an oracle without shared code looks for it."""

import struct

import pytest
import torch

from rwkv_batch.model import quantized
from rwkv_batch.model.quantized import FORMATS
from rwkv_batch.model.weight import Weight

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# Relative error (Frobenius norm): of normal random numbers; the same with three columns of 30 times as much, where an output
# has them beside its others, and where they are outputs of their own. Outliers need the upper steps of their scale: the error
# counted is that of what is no outlier.
ERRORS = {
    "int8": (0.009, 0.11, 0.0075),
    "fp8": (0.028, 0.028, 0.028),
    "int4": (0.095, 0.24, 0.24),
    "nf4": (0.1, 0.22, 0.22),
    "fp6": (0.055, 0.058, 0.055),
    "fp5": (0.06, 0.48, 0.06),
}


def matrix(rows: int, columns: int, *, outliers: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator) * 0.02
    if outliers:
        values[:, 7::1000] *= 30
    return values


def small_float(code: int, exponent_bits: int) -> float:
    """Sign, exponent, two bits of mantissa."""
    sign = -1.0 if code >> (exponent_bits + 2) else 1.0
    exponent, mantissa = code >> 2 & (2**exponent_bits - 1), code & 3
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 0:
        return sign * mantissa / 4 * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 4) * 2.0 ** (exponent - bias)


def e4m3(code: int) -> float:
    sign, exponent, mantissa = (-1.0 if code & 128 else 1.0), code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def place_of_8_bits(k: int) -> int:
    """Where input k of a row is stored, found by search in what the description says."""
    base, within = k // 64 * 64, k % 64
    for q in range(4):
        for s in range(4):
            for j in range(4):
                if 16 * s + 2 * q + (j & 1) + 8 * (j >> 1) == within:
                    return base + 16 * q + 4 * s + j
    raise AssertionError


def pair_of_nibbles(k: int) -> tuple[int, int, int]:
    """(word of 32 bits, pair in it, which of the pair) of input k of a row."""
    block, within = divmod(k, 64)
    for q in range(4):
        for word in range(2):
            for pair in range(4):
                s = 2 * word + (pair >> 1)
                first = 16 * s + 2 * q + 8 * (pair & 1)
                if within - first in (0, 1):
                    return block * 8 + 2 * q + word, pair, within - first
    raise AssertionError


def natural_pair(c: int) -> tuple[int, int, int]:
    return c // 8, c % 4, c % 8 // 4


def decoded(row: bytes, name: str, k: int, columns: int, transposed: bool) -> float:
    """The number at input k of a stored row, before its scale."""
    if name == "int8":
        return struct.unpack_from("b", row, k if transposed else place_of_8_bits(k))[0]
    if name == "fp8":
        return e4m3(row[k if transposed else place_of_8_bits(k)])
    word, pair, second = (natural_pair if transposed else pair_of_nibbles)(k)
    nibble = struct.unpack_from("<I", row, 4 * word)[0] >> 4 * pair >> 16 * second & 15
    if name == "int4":
        return nibble - 8
    if name == "nf4":
        return float(torch.tensor(NF4[nibble]).half())
    pair += 4 * (word % 2)
    if name == "fp6":
        above = struct.unpack_from("<I", row, columns // 2 + 4 * (word // 2))[0]
        turned = (above << 2 * pair | above >> (32 - 2 * pair)) & 0xFFFFFFFF
        code = (turned >> (15 + 16 * second) & 1) << 5 | (turned >> (12 + 16 * second) & 1) << 4 | nibble
        return small_float(code, 3)
    signs = row[columns // 2 + 2 * (word // 2) + second]
    return small_float((signs >> (7 - pair) & 1) << 4 | nibble, 2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_value_is_where_the_description_says(name, transposed):
    rows, columns = 3, 128
    weight = Weight.quantised(matrix(rows, columns), name, transposed=transposed)
    dense, scales = weight.dense(), weight.scales.float()
    for m in range(rows):
        row = bytes(weight.values[m].view(torch.uint8).tolist())
        for k in range(columns):
            scale = scales[m, k // 64] if FORMATS[name].grouped else scales[0, k] if transposed else scales[m, 0]
            expected = decoded(row, name, k, columns, transposed) * float(scale)
            assert float(dense[m, k]) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_errors_stay_within_their_bounds(name, transposed):
    usual = torch.ones(2048, dtype=torch.bool)
    usual[7::1000] = False
    for outliers, bound in ((False, ERRORS[name][0]), (True, ERRORS[name][1 + transposed])):
        values = matrix(256, 2048, outliers=outliers)
        error = Weight.quantised(values, name, transposed=transposed).dense() - values
        assert error[:, usual].norm() < bound * values[:, usual].norm()


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_numbers_of_a_format_come_back_as_they_are(name):
    """Quantising what was quantised changes nothing but the last bits of a scale. Floats may find another scale."""
    once = Weight.quantised(matrix(64, 256), name).dense()
    again = Weight.quantised(once, name).dense()
    assert torch.allclose(once, again, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["fp8", "fp6", "fp5"])
def test_scales_of_floats_are_sought(name):
    """With the scale that just shows the largest value, errors would be larger."""
    values = matrix(64, 256)
    largest = FORMATS[name].largest
    scales = values.abs().amax(1, keepdim=True) / largest
    exponents = ((values / scales).abs().log2().floor() - (3 if name == "fp8" else 2)).exp2()
    smallest = {"fp8": 2.0**-9, "fp6": 2.0**-4, "fp5": 2.0**-2}[name]
    steps = exponents.clamp_min(smallest)
    plain = ((values / scales / steps).round() * steps * scales - values).norm()
    assert (Weight.quantised(values, name).dense() - values).norm() < 0.98 * plain


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_extremes(name):
    values = torch.zeros(4, 128)
    values[1, 5], values[2, :64], values[3] = -60000.0, 1e-6, 60000.0
    for transposed in (False, True):
        dense = Weight.quantised(values, name, transposed=transposed).dense()
        assert dense.isfinite().all()
        assert dense[0].abs().max() <= (0 if not transposed else 1e-20)
        assert torch.allclose(dense[3], values[3], rtol=2e-3)
        assert dense[1, 5] == pytest.approx(-60000, rel=2e-3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_known_beforehand(name, transposed):
    weight = Weight.quantised(matrix(96, 192), name, transposed=transposed)
    assert weight.shape == (96, 192)
    assert weight.nbytes == quantized.num_bytes(name, (96, 192), transposed=transposed)
    assert weight.values.dtype == quantized.value_dtype(name)
    assert weight.values.shape == (96, quantized.stored_columns(name, 192))
    assert weight.scales.shape == quantized.scales_shape(name, (96, 192), transposed=transposed)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_rows_change_nothing(name, monkeypatch):
    """A matrix larger than what is worked on at a time."""
    stacked = torch.stack([matrix(64, 128) * (n + 1) for n in range(3)])
    whole, flat = Weight.quantised(stacked, name), Weight.quantised(stacked[1], name, transposed=True)
    monkeypatch.setattr(quantized, "VALUES_AT_A_TIME", 7 * 128)
    parts, flat_parts = Weight.quantised(stacked, name), Weight.quantised(stacked[1], name, transposed=True)
    for one, other in ((whole, parts), (flat, flat_parts)):
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one.tensors(), other.tensors(), strict=True)
        )
    assert torch.equal(parts.dense()[2], parts.part(2).dense())
    assert torch.equal(parts.part(2).rows(slice(3, 9)).dense(), parts.dense()[2, 3:9])
    index = torch.tensor([5, 1])
    assert torch.equal(flat.rows(index).dense(torch.float16), flat.dense(torch.float16)[index])


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_in_stored_order_is_the_product(name):
    weight, inputs = Weight.quantised(matrix(32, 192), name), matrix(5, 192)
    numbers = quantized.decode(weight.values, name)
    if FORMATS[name].grouped:
        numbers = (numbers.view(32, -1, 64) * weight.scales[:, :, None]).view(32, 192)
    else:
        numbers = numbers * weight.scales
    expected = inputs @ weight.dense().t()
    assert torch.allclose(quantized.ordered(inputs, name) @ numbers.t(), expected, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_makes_what_a_cpu_makes(name, transposed):
    values = matrix(256, 1024, outliers=True)
    here, there = (Weight.quantised(values.to(d), name, transposed=transposed) for d in ("cpu", "cuda"))
    if name in ("int8", "nf4"):  # for others a scale is sought, and two may be as good
        assert torch.allclose(here.dense(), there.dense().cpu(), rtol=0.01, atol=1e-6)
    assert torch.equal(there.dense().cpu(), there.to("cpu").dense())
    error = there.dense().cpu() - values
    assert error.norm() <= 1.001 * (here.dense() - values).norm()
