"""Products of many rows with matrices of 8 bits on Hopper GPUs (cuda/quant/quant_gemm.cuh): out = x W^T."""

import ctypes
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.gemm import MAX_STAGES, NOT_SUPPORTED, SHARED_MEMORY, TileConfig
from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer
from rwkv_batch.kernels.quant.matrix import QuantMatrix
from rwkv_batch.kernels.quant.rows import E4M3, Order, QuantRows

BK = 128  # k of a stage
BOX_ROWS = 64  # of weights that one copy takes
TILES = {128: (16, 32, 64), 256: (16, 32, 64, 128)}  # rows of x of a tile, which are fp16
FP8_TILES = {256: (64, 80, 96, 128, 160)}  # which are e4m3
FORMATS = ("int8", "fp8")
MAX_MAPS = 4096  # descriptions of x kept; beyond that they are made anew
MAX_CLUSTER = 8  # thread blocks
SPLITS = (1, 2, 3, 4, 6, 7, 8)
CLUSTER_SMS = 15  # multiprocessors that share clusters, at least
MAX_CONFIGS, MAX_CONFIGS_OF_MANY = 16, 8  # offered for a product, and above 64 rows, where the estimate is better


@dataclass(frozen=True, eq=False)
class QuantGemmMatrix:
    """A matrix and how the copy engine reads its tiles."""

    source: QuantMatrix
    map: ctypes.Array


class QuantGemm:
    """The products on one device.

    available  False where the device is not a Hopper; then nothing but the constructor works
    pdl        programmatic dependent launch: start, and fetch weights, while the kernel before in the stream ends
    """

    def __init__(self, launcher: Launcher, *, pdl: bool = True):
        self.launcher = launcher
        self.pdl = pdl
        types = (*(POINTER,) * 6, *(INT,) * 14)
        names = {("int8", False): "int8", ("fp8", False): "fp8", ("fp8", True): "fp8_fp8"}  # weights, and whether x is e4m3
        self._gemm = {key: launcher.bind(f"rwkv_quant_gemm_{name}", *types) for key, name in names.items()}
        self._encode = launcher.library.rwkv_quant_gemm_map
        self._encode.argtypes = (POINTER, POINTER, INT, POINTER, POINTER, POINTER)
        self._maps: dict[tuple[int, ...], ctypes.Array] = {}
        with torch.cuda.device(launcher.device):
            errors = {getattr(launcher.library, f"rwkv_quant_gemm_{name}_setup")() for name in names.values()}
        if errors - {0, NOT_SUPPORTED}:
            raise RuntimeError(f"rwkv_quant_gemm_*_setup failed with CUDA errors {sorted(errors)}")
        self.available = errors == {0}
        self.num_sms = torch.cuda.get_device_properties(launcher.device).multi_processor_count

    def prepare(self, matrix: QuantMatrix) -> QuantGemmMatrix | None:
        """Describe a matrix of a format in `FORMATS`; None for others, and where the copy engine cannot read it."""
        row = matrix.M if matrix.transposed else matrix.K
        if matrix.format not in FORMATS or matrix.K % 64 or row % 16:
            return None
        M, K = matrix.M, matrix.K
        sizes = (M, K, matrix.batch) if matrix.transposed else (K, M, matrix.batch)
        return QuantGemmMatrix(matrix, self._map(matrix.values, sizes, (BK, BOX_ROWS)))

    def gemm(
        self,
        x: Tensor | QuantRows,
        matrix: QuantGemmMatrix,
        out: Tensor,
        relu_square: bool = False,
        config: TileConfig | None = None,
        active_mask: Tensor | None = None,
    ) -> Tensor:
        """out [N, M'] fp16 = x [N, K] W^T, sums in fp32; stacked: x [batch, N, K], out [batch, N, M'].

        M' is M or more, a multiple of 8; columns from M on get zeros. relu_square applies max(., 0)^2 to the results, at most
        65,504. A row of out depends on its row of x alone.

        x            fp16; or, where the weights are e4m3, rows quantised in the order FRAGMENTS
        active_mask  [M / 32] int32: where to leave a bit for each column of out that is not all zeros; for configs that
                     `leaves_mask` says yes to
        """
        source, rows = matrix.source, isinstance(x, QuantRows)
        values = x.values if rows else x
        N, lead = values.shape[-2], (source.batch,) if source.stacked else ()
        check("x", values, self.launcher.device, E4M3 if rows else torch.float16, (*lead, N, source.K))
        check("out", out, self.launcher.device, torch.float16, (*lead, N, max(source.M, out.shape[-1])))
        if rows:
            check("x", x.scales, self.launcher.device, torch.float32, (*lead, N))
            if x.order is not Order.FRAGMENTS:
                raise ValueError(f"x: must be in the order FRAGMENTS, not {x.order.name}")
        config = config or self.tile_configs(N, matrix, quantised_rows=rows)[0]
        if active_mask is not None:
            check("active_mask", active_mask, self.launcher.device, torch.int32, (math.ceil(source.M / 32),))
            if not leaves_mask(config, N, matrix):
                raise ValueError(f"active_mask: not made by {config} for {N} rows of x")
        box = config.tile if rows else config.tile // config.cast  # rows of x that one copy takes
        x_map = self._x_map(values, N, source.K, source.batch, box)
        scales = (pointer(source.scales), pointer(x.scales) if rows else None)
        self.launcher.launch(
            self._gemm[source.format, rows], ctypes.addressof(matrix.map), ctypes.addressof(x_map), *scales, pointer(out),
            pointer(active_mask), N, source.M, out.shape[-1], source.K, source.batch, source.transposed, relu_square, *config,
            self.pdl,
        )  # fmt: skip
        return out

    def tile_configs(self, N: int, matrix: QuantGemmMatrix, *, quantised_rows: bool = False) -> list[TileConfig]:
        """Return ways to cut up a product of N rows, of which timing may choose, the best by estimate first."""
        source = matrix.source
        return list(configs(N, source.M, source.K, source.batch, self.num_sms, quantised_rows))

    def reserved_sms(self, N: int, matrix: QuantGemmMatrix, config: TileConfig, *, quantised_rows: bool = False) -> int:
        """Return how many multiprocessors a product of N rows surely leaves free: none where two thread blocks share one."""
        source = matrix.source
        if 2 * stage_bytes(config.height, config.tile, config.stages, quantised_rows) <= SHARED_MEMORY:
            return 0
        tiles = math.ceil(source.M / config.height) * math.ceil(N / config.tile) * source.batch
        return self.num_sms - (tiles if config.split > 1 else config.clusters * config.cast) * config.split

    def _x_map(self, x: Tensor, N: int, K: int, planes: int, tile: int) -> ctypes.Array:
        size = x.element_size()
        key = (x.data_ptr(), N, K * size, planes, tile)
        if key not in self._maps:
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            self._maps[key] = self._map(x, (K * size, N, planes), (128, tile))
        return self._maps[key]

    def _map(self, tensor: Tensor, sizes: tuple[int, int, int], box: tuple[int, int]) -> ctypes.Array:
        """Return a tensor map of bytes [planes, rows, columns]; `sizes` and `box` innermost first."""
        memory = ctypes.create_string_buffer(128 + 64)  # the driver wants 64-byte alignment
        aligned = (ctypes.c_char * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
        error = self._encode(
            ctypes.addressof(aligned), pointer(tensor), 3, (ctypes.c_uint64 * 3)(*sizes),
            (ctypes.c_uint64 * 2)(sizes[0], sizes[0] * sizes[1]), (ctypes.c_uint32 * 3)(*box, 1),
        )  # fmt: skip
        if error:
            raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {error}")
        return aligned


def leaves_mask(config: TileConfig, N: int, matrix: QuantGemmMatrix) -> bool:
    """Return whether a product can tell which of its columns are not all zeros: each is then seen by one thread block."""
    return config.split == 1 and matrix.source.batch == 1 and config.tile >= N and matrix.source.M % 32 == 0


@functools.lru_cache(4096)
def configs(N: int, M: int, K: int, batch: int, num_sms: int, fp8: bool) -> tuple[TileConfig, ...]:
    """Return configs for N rows, those with the least estimated time first."""
    found = []
    for height, tile in ((h, t) for h, tiles in (FP8_TILES if fp8 else TILES).items() for t in tiles):
        if tile >= 2 * N and tile > (64 if fp8 else 16):
            continue
        steps = math.ceil(K / BK)
        for cast, split in ((c, s) for c in (1, 2, 4) for s in SPLITS if c * s <= MAX_CLUSTER):
            across = math.ceil(N / tile) if fp8 else math.ceil(M / height)
            if cast > 1 and (across % cast or (not fp8 and tile < 8 * cast)):
                continue
            tiles = math.ceil(M / height) * math.ceil(N / tile) * batch
            if split > 1 and (steps < 4 * split or tiles * split > 4 * num_sms):
                continue
            for blocks in (1, 2) if height == 128 else (1,):
                stages = _stages(height, tile, split, math.ceil(steps / split), blocks, fp8)
                if stages < 3 and steps > stages:
                    continue
                clusters = _even(tiles // cast, max(1, blocks * num_sms // cast))
                config = TileConfig(height, tile, split, stages, clusters, cast)
                found.append((_time(config, tiles, steps, num_sms, blocks, fp8), config))
    return tuple(dict.fromkeys(config for _, config in sorted(found)))[: MAX_CONFIGS if N <= 64 else MAX_CONFIGS_OF_MANY]


def _time(config: TileConfig, tiles: int, steps: int, num_sms: int, blocks: int, fp8: bool) -> float:
    """Return the estimated us, by what an H200 multiplies, reads from memory (weights) and from the L2 cache."""
    height, tile, split, cast = *config[:3], config.cast
    cluster, at_once = split * cast, num_sms * blocks
    if cluster > 2:
        at_once = num_sms // CLUSTER_SMS * (blocks * CLUSTER_SMS // cluster * cluster)
    rounds = math.ceil(tiles * split / at_once)
    sharing = min(blocks, math.ceil(tiles * split / rounds / num_sms))  # thread blocks of a multiprocessor
    weights, rows = height * BK, tile * BK * (1 if fp8 else 2)
    cached = weights / cast + rows if fp8 else weights + rows / cast
    step = max(height * tile * BK / (5e6 if fp8 else 2.9e6), weights / 31e3 / max(1, tile / 128), cached / 54e3) * sharing
    exchange = 1.5 + 2e-5 * height * tile if split > 1 else 0
    return rounds * (step * math.ceil(steps / split) + 1.5 + exchange) + (1.5 if blocks == 1 else 0)


def _even(tiles: int, at_once: int) -> int:
    """Return how many tiles to work on at once, at most so many, for rounds of equal size."""
    return math.ceil(tiles / math.ceil(tiles / at_once))


def _stages(height: int, tile: int, split: int, steps: int, blocks: int, fp8: bool) -> int:
    """Return how many stages a thread block has room for when `blocks` share a multiprocessor; no more than its steps."""
    room = SHARED_MEMORY // blocks  # the barriers have theirs beside that
    if split > 1 and tile * (height + 4) * 4 > room:  # where sums are exchanged
        return 0
    fitting = (n for n in range(min(MAX_STAGES, max(steps, 2)), 0, -1) if stage_bytes(height, tile, n, fp8) <= room)
    return next(fitting, 0)


def stage_bytes(height: int, tile: int, stages: int, fp8: bool) -> int:
    """Return the bytes of so many stages of weights, and of those of rows of x beside them."""
    return stages * height * BK + (3 * stages + 3) // 4 * tile * BK * (1 if fp8 else 2)
