"""Matrix products through cuBLASLt, with the algorithm of each shape chosen by timing and remembered for the card.

Weights are fp16, sums fp32, results fp16. The library is the one torch has loaded; it is called through its C API, so that a
choice is ours and stays the same from run to run (NVIDIA, "cuBLAS Library", chapter cuBLASLt).
"""

import ctypes
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.card_cache import recall, remember
from rwkv_batch.kernels.compiler import cache_folder
from rwkv_batch.kernels.launch import Launcher, pointer
from rwkv_batch.kernels.measured import measured

log = logging.getLogger("rwkv_batch.engine")

NAMES = ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so")
HALF, SINGLE = 2, 0  # cudaDataType_t
COMPUTE_SINGLE = 68  # CUBLAS_COMPUTE_32F
DESC_TRANSA = 3
LAYOUT_BATCH_COUNT, LAYOUT_BATCH_OFFSET = 5, 6
PREFERENCE_WORKSPACE = 1
WORKSPACE_BYTES = 64 * 2**20
CANDIDATES = 8  # algorithms asked for and timed
NEAR_ROWS, NEAR = 640, 1.5  # from so many rows on, what was chosen for up to so many times as many, or fewer, is taken
LEAD_OF_MANY = 1.03  # how many times as fast as one more promising an algorithm must be for so many rows
MOST_PRODUCTS = 1024  # prefills come in any length: then the oldest are forgotten
NOT_SUPPORTED = 15


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass
class Product:
    """One shape's descriptors and its algorithm."""

    desc: ctypes.c_void_p
    a: ctypes.c_void_p
    b: ctypes.c_void_p
    c: ctypes.c_void_p
    algorithm: Algorithm


class MatMul:
    """Products on one device. Not for use from two threads or streams at a time: they share a workspace."""

    NAME = "matmul"  # of the file of choices
    INPUT_TYPE = HALF

    def __init__(self, launcher: Launcher):
        self.launcher = launcher
        self._lib = _library()
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=launcher.device)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._products: dict[tuple, Product] = {}
        self._matmul = self._lib.cublasLtMatmul
        self._matmul.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]
        card, version = torch.cuda.get_device_name(launcher.device), self._lib.cublasLtGetVersion()
        self._file = cache_folder() / f"{self.NAME}-{card.replace(' ', '-')}-{version}.json"
        shipped = measured(card).algorithms.get(f"{self.NAME}-{version}", {})
        choices = shipped | recall(self._file, dict[str, list[int]])
        self._choices = {shape: words for shape, words in choices.items() if len(words) == len(Algorithm().data)}

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, *, in_out: bool = False) -> None:
        """Write x [N, K] times weight [M, K] transposed into out [N, M]; with a leading dimension, as many such products.

        in_out  the weight is [K, M]
        All fp16 and contiguous.
        """
        shape = _shape(x, weight, in_out)
        product = self._products.get(shape) or self._prepare(shape)
        self._run(product, x, weight, out)

    def tune(self, calls: list[tuple[Tensor, ...]], *, in_out: bool = False) -> None:
        """Choose the algorithm of one shape by timing `calls`, (x, weight, out) of different weights, in a CUDA graph."""
        shape = _shape(*calls[0][:2], in_out)
        key = ",".join(map(str, shape))
        if key in self._choices:
            return
        product = self._products.get(shape) or self._prepare(shape)
        best_time, best = float("inf"), product.algorithm
        lead = LEAD_OF_MANY if shape[1] >= NEAR_ROWS else 1
        for heuristic in self._heuristics(product, CANDIDATES):
            product.algorithm = heuristic.algorithm
            taken = self.launcher.time(lambda: [self._run(product, *call) for call in calls])
            if taken * lead < best_time:
                best_time, best = taken, heuristic.algorithm
        product.algorithm = best
        self._choices[key] = list(best.data)

    def save(self) -> None:
        """Remember what was chosen for the next start."""
        remember(self._file, self._choices)

    def _run(self, product: Product, x: Tensor, weight: Tensor, out: Tensor) -> None:
        # Column-major, as cuBLAS sees it, this is out^T = weight x^T.
        status = self._matmul(
            self._handle, product.desc, ctypes.addressof(self._one), pointer(weight), product.a, pointer(x), product.b,
            ctypes.addressof(self._zero), pointer(out), product.c, pointer(out), product.c,
            ctypes.addressof(product.algorithm), pointer(self._workspace), WORKSPACE_BYTES, self.launcher.stream,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cublasLtMatmul failed with status {status}")

    def _prepare(self, shape: tuple) -> Product:
        count, n, m, k, transposed = shape
        desc = self._describe(transposed)
        rows, columns = (k, m) if transposed else (m, k)
        inputs = (self._layout(rows, columns, count, self.INPUT_TYPE), self._layout(k, n, count, self.INPUT_TYPE))
        layouts = (*inputs, self._layout(m, n, count, HALF))
        product = Product(desc, *layouts, Algorithm())
        chosen = self._choices.get(",".join(map(str, shape)))
        if chosen:
            product.algorithm.data[:] = chosen
        elif (near := self._near(shape, product)) is not None:
            product.algorithm = near
        else:
            found = self._heuristics(product, 1)
            if not found:
                raise RuntimeError(f"cuBLASLt knows no algorithm for {shape}")
            product.algorithm = found[0].algorithm
        if len(self._products) >= MOST_PRODUCTS:
            self._forget(next(iter(self._products)))
        self._products[shape] = product
        return product

    def _near(self, shape: tuple, product: Product) -> Algorithm | None:
        """Return what was chosen for the nearest number of many rows, where it can do this one."""
        count, n, *rest = shape
        sizes = {}
        for key, words in self._choices.items():
            of_count, rows, *of_rest = map(int, key.split(","))
            if n >= NEAR_ROWS <= rows and [of_count, *of_rest] == [count, *rest] and max(n, rows) <= NEAR * min(n, rows):
                sizes[rows] = words
        for rows in sorted(sizes, key=lambda rows: max(n, rows) / min(n, rows)):
            algorithm, result = Algorithm(), Heuristic()
            algorithm.data[:] = sizes[rows]
            status = self._lib.cublasLtMatmulAlgoCheck(
                self._handle, product.desc, product.a, product.b, product.c, product.c, ctypes.byref(algorithm),
                ctypes.byref(result),
            )  # fmt: skip
            if status == 0 and result.workspace_bytes <= WORKSPACE_BYTES:
                return algorithm
        return None

    def _describe(self, transposed: int) -> ctypes.c_void_p:
        desc = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(desc), COMPUTE_SINGLE, SINGLE)
        self._set(desc, DESC_TRANSA, ctypes.c_int32(transposed))
        return desc

    def _set(self, desc: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", desc, attribute, ctypes.byref(value), size)

    def _forget(self, shape: tuple) -> None:
        product = self._products.pop(shape)
        self._call("cublasLtMatmulDescDestroy", product.desc)
        for layout in (product.a, product.b, product.c):
            self._call("cublasLtMatrixLayoutDestroy", layout)

    def _layout(self, rows: int, columns: int, count: int, dtype: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(layout), dtype,
            ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows),
        )  # fmt: skip
        if count > 1:
            for attribute, value in (
                (LAYOUT_BATCH_COUNT, ctypes.c_int32(count)),
                (LAYOUT_BATCH_OFFSET, ctypes.c_int64(rows * columns)),
            ):
                size = ctypes.c_size_t(ctypes.sizeof(value))
                self._call("cublasLtMatrixLayoutSetAttribute", layout, attribute, ctypes.byref(value), size)
        return layout

    def _heuristics(self, product: Product, count: int) -> list[Heuristic]:
        """Return up to `count` algorithms that can run, the most promising first."""
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_uint64(WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute", preference, PREFERENCE_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(8)
        )
        results, found = (Heuristic * count)(), ctypes.c_int()
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle, product.desc, product.a, product.b, product.c, product.c, preference,
            ctypes.c_int(count), results, ctypes.byref(found),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        if status not in (0, NOT_SUPPORTED):
            raise RuntimeError(f"cublasLtMatmulAlgoGetHeuristic failed with status {status}")
        return [result for result in results[: found.value] if result.status == 0]

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with status {status}")


def _shape(x: Tensor, weight: Tensor, in_out: bool) -> tuple:
    """Return (problems, rows N, outputs M, inputs K, whether the weight is [M, K])."""
    count = x.shape[0] if x.dim() == 3 else 1
    m = weight.shape[-1] if in_out else weight.shape[-2]
    return (count, x.shape[-2], m, x.shape[-1], 0 if in_out else 1)


def _library() -> ctypes.CDLL:
    for name in NAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return library
    raise RuntimeError(f"none of {', '.join(NAMES)} can be loaded")
