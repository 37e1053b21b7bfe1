"""Matrix products of many rows on Hopper GPUs: out = x W^T, weights on the tensor cores' tall side.

The kernels are in cuda/linear/gemm.cu; those of r, k, v and the low-rank pairs of more than 16 rows in cuda/grouped/inputs.cu.
"""

import ctypes
import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer
from rwkv_batch.kernels.linear import Lora

BK = 64  # k of a stage; sizes must be multiples of 64
TILES = {64: (8, 16, 32, 64, 128), 128: (8, 16, 32, 64, 128, 160, 256)}  # weight rows of a tile: rows of x of a tile
MAX_STAGES = 16
SMALL_WEIGHTS = 10 << 20  # bytes that multiprocessors may well read several times
LEAST_RESERVED = 8  # multiprocessors that are worth being left free
MAX_MASKED = 16  # rows of x of which `Gemm.gemm` leaves an active mask
PLANES = 6  # of what `project` reads: r, k, v, w, a, g
FEW_INPUTS = 16  # rows of x up to which `inputs` is one kernel, and beyond which another
MAX_RANK = 512  # of a pair, of few rows
INPUTS_UNIT = 256  # what C is a multiple of there
MAX_INPUTS_WIDTH = 4096
INPUTS_STAGES = (5, 7, 11)  # fewer leave the low-rank pairs, which wait more than they read, shorter queues before memory
RIVALS_OF_MANY = 6  # configs to be timed for more than 64 rows
INPUTS_CUTS = {64: (32, 64, 128), 128: (32, 64, 128, 160, 256)}  # of more rows: as TILES
MAX_INPUTS_STAGES = 8
INPUTS_STAGED = 32 * 144  # bytes of 64 weight rows' results on their way out
PAIR_ROWS = 3 * 8  # first halves' rows that a thread block of the pairs holds at once
SHARED_MEMORY = 225 << 10  # bytes of a multiprocessor that one thread block may take, or several together
NOT_SUPPORTED = 801  # cudaErrorNotSupported
MAX_MAPS = 4096  # descriptions of x kept; beyond that they are made anew


class TileConfig(NamedTuple):
    """How a product is cut up.

    height    weight rows of a tile
    tile      rows of x of a tile
    split     thread blocks that share a tile's K and add their sums in a fixed order: 1, 2, 4 or 8; of 8-bit weights up to 8
    stages    stages of K on the way at once
    clusters  tiles worked on at once, each by `split` thread blocks; where split > 1, all are
    cast      of products with 8-bit weights: tiles whose thread blocks fetch for each other what they share, see cuda/quant/
    """

    height: int
    tile: int
    split: int
    stages: int
    clusters: int
    cast: int = 1

    def leaves_mask(self, N: int, matrix: "GemmMatrix") -> bool:
        """Return whether the product can tell which of its columns are not all zeros: each is then seen by one thread block."""
        return self.split == 1 and matrix.batch == 1 and N <= self.tile <= MAX_MASKED


@dataclass(eq=False)
class GemmMatrix:
    """A weight and how the copy engine reads it for tiles of each height. `transposed`: stored [batch, K, M].

    tiled   a copy that is read instead where there is one, see `tiled.py`
    turned  a copy [M, K] of a transposed weight for other products than this, see there too
    """

    weight: Tensor
    batch: int
    M: int
    K: int
    transposed: bool
    stacked: bool
    maps: dict[int, ctypes.Array]
    tiled: Tensor | None = None
    turned: Tensor | None = None

    def pointers(self, config: TileConfig) -> tuple[int, int | None]:
        """Return where the kernel finds the map for tiles so high, and the copy."""
        return ctypes.addressof(self.maps[config.height]), pointer(self.tiled)


@dataclass(frozen=True)
class GemmLora:
    """The first halves of a layer's low-rank pairs [R, K], and how the copy engine reads them."""

    weight: Tensor
    ranks: tuple[int, int, int, int]
    maps: dict[int, ctypes.Array]

    def tiles(self, height: int) -> int:
        """Return how many tiles they are."""
        return sum(math.ceil(rank / height) for rank in self.ranks)


class Gemm:
    """The matrix product on one device.

    available  False where the device is not a Hopper; then nothing but the constructor works
    pdl        programmatic dependent launch: start, and fetch weights, while the kernel before in the stream ends
    """

    def __init__(self, launcher: Launcher, *, pdl: bool = True):
        self.launcher = launcher
        self.pdl = pdl
        self._gemm = launcher.bind("rwkv_gemm", *(POINTER,) * 5, *(INT,) * 12)
        self._project = launcher.bind("rwkv_gemm_project", *(POINTER,) * 6, *(INT,) * 13)
        self._few_inputs = launcher.bind("rwkv_gemm_inputs", *(POINTER,) * 16, *(INT,) * 12)
        self._many_inputs = launcher.bind("rwkv_inputs", *(POINTER,) * 15, *(INT,) * 12)
        self._encode = launcher.library.rwkv_gemm_map
        self._encode.argtypes = (POINTER, POINTER, INT, POINTER, POINTER, POINTER)
        self._maps: dict[tuple[int, ...], ctypes.Array] = {}
        with torch.cuda.device(launcher.device):
            error = launcher.library.rwkv_gemm_setup()
        if error not in (0, NOT_SUPPORTED):
            raise RuntimeError(f"rwkv_gemm_setup failed with CUDA error {error}")
        self.available = error == 0
        self.num_sms = torch.cuda.get_device_properties(launcher.device).multi_processor_count
        # What thread blocks of `inputs` count, of few rows and of more.
        self._arrived = torch.zeros(self.num_sms + 1, dtype=torch.int64, device=launcher.device)
        self._written = torch.zeros(2, dtype=torch.int32, device=launcher.device)

    def prepare(self, weight: Tensor, transposed: bool = False) -> GemmMatrix:
        """Describe a weight [M, K], or [batch, M, K] for several products at once; `transposed`: [K, M] or [batch, K, M].

        fp16, contiguous; the handle keeps it alive. ValueError when a size is no multiple of 64.
        """
        batch = weight.shape[0] if weight.dim() == 3 else 1
        M, K = weight.shape[-2:] if not transposed else weight.shape[:-3:-1]
        check("weight", weight, self.launcher.device, torch.float16, weight.shape)
        if M % 64 or K % 64:
            raise ValueError(f"weight: sizes must be multiples of 64, got {list(weight.shape)}")
        if transposed:
            sizes, strides = (64, K, M // 64, batch), (2 * M, 128, 2 * M * K)
            maps = {height: self._map(weight, sizes, strides, (64, BK, height // 64, 1)) for height in TILES}
        else:
            maps = self._maps_of(weight, M, K, batch)
        return GemmMatrix(weight, batch, M, K, transposed, weight.dim() == 3, maps)

    def prepare_lora(self, weight: Tensor, ranks: tuple[int, int, int, int]) -> GemmLora:
        """Describe the first halves of the low-rank pairs [R, K], for `project`; ranks of w, a, v, g, multiples of 8."""
        check("weight", weight, self.launcher.device, torch.float16, (sum(ranks), weight.shape[-1]))
        if weight.shape[1] % 64 or any(rank % 8 for rank in ranks):
            raise ValueError(f"weight: K {weight.shape[1]} must be a multiple of 64, ranks {ranks} of 8")
        return GemmLora(weight, ranks, self._maps_of(weight, *weight.shape, 1))

    def _maps_of(self, weight: Tensor, M: int, K: int, batch: int) -> dict[int, ctypes.Array]:
        return {height: self._map(weight, (K, M, batch), (2 * K, 2 * M * K), (BK, height, 1)) for height in TILES}

    def gemm(
        self,
        x: Tensor,
        matrix: GemmMatrix,
        out: Tensor,
        relu_square: bool = False,
        config: TileConfig | None = None,
        active_mask: Tensor | None = None,
    ) -> Tensor:
        """out [N, M] = x [N, K] W^T, fp16 with sums in fp32; stacked: x [batch, N, K], out [batch, N, M].

        relu_square applies max(., 0)^2 to the sums, at most 65,504. A row of out depends on its row of x alone.

        active_mask  [ceil(M / 32)] int32: where to leave a bit for each column of out that is not all zeros; for configs that
                     `leaves_mask` says yes to
        """
        N, lead = x.shape[-2], (matrix.batch,) if matrix.stacked else ()
        check("x", x, self.launcher.device, torch.float16, (*lead, N, matrix.K))
        check("out", out, self.launcher.device, torch.float16, (*lead, N, matrix.M))
        config = config or self.tile_config(N, matrix)
        if active_mask is not None:
            check("active_mask", active_mask, self.launcher.device, torch.int32, (math.ceil(matrix.M / 32),))
            if not config.leaves_mask(N, matrix):
                raise ValueError(f"active_mask: not made by {config} for {N} rows of x")
        x_map = self._x_map(x, N, matrix.K, matrix.batch, config.tile)
        self.launcher.launch(
            self._gemm, *matrix.pointers(config), ctypes.addressof(x_map), pointer(out), pointer(active_mask), N, matrix.M,
            matrix.K, matrix.batch, matrix.transposed, relu_square, *config[:-1], self.pdl,
        )  # fmt: skip
        return out

    def project(
        self, mixed: Tensor, matrix: GemmMatrix, lora: GemmLora, rkv: Tensor, hidden: Tensor, config: TileConfig
    ) -> None:
        """rkv [3, N, M] = r, k and v, and hidden [N, R] = tanh(x_w w1), x_a a1, x_v v1, sigmoid(x_g g1), in one launch.

        mixed [6, N, K] in the order r, k, v, w, a, g; `matrix` stacks three weights. As `gemm` otherwise.
        """
        N = mixed.shape[1]
        check("mixed", mixed, self.launcher.device, torch.float16, (PLANES, N, matrix.K))
        check("rkv", rkv, self.launcher.device, torch.float16, (3, N, matrix.M))
        check("hidden", hidden, self.launcher.device, torch.float16, (N, len(lora.weight)))
        if matrix.batch != 3 or matrix.transposed or lora.weight.shape[1] != matrix.K:
            raise ValueError("matrix: three weights [M, K] are needed, and `lora` of the same K")
        x_map = self._x_map(mixed, N, matrix.K, PLANES, config.tile)
        maps = map(ctypes.addressof, (x_map, lora.maps[config.height]))
        self.launcher.launch(
            self._project, *matrix.pointers(config), *maps, pointer(rkv), pointer(hidden), N, matrix.M, matrix.K, *lora.ranks,
            *config[:-1], self.pdl,
        )  # fmt: skip

    def project_configs(self, N: int, matrix: GemmMatrix, lora: GemmLora) -> list[TileConfig]:
        """Return ways to cut up `project` for N rows, of which timing shall choose."""
        configs = []
        for height, tile in ((h, t) for h, tiles in TILES.items() for t in tiles):
            small = tile < min(N, 64)
            if tile >= 2 * max(N, 8) or (small and not _may_be_small(N, tile, 3 * matrix.M * matrix.K)):
                continue
            tiles = math.ceil(N / tile) * (math.ceil(matrix.M / height) * 3 + lora.tiles(height))
            if small and tiles > self.num_sms:
                continue
            for split in (1, 2):
                if split == 2 and (N > 128 or tiles * 2 > 5 * self.num_sms or matrix.K < 12 * BK):
                    continue
                most = 5 if tile <= 32 else 3 if tile <= 64 else 1
                least = min(most, math.ceil(tiles * split / self.num_sms))
                for blocks in sorted({least, max(1, least - 1), min(most, least + 1)} if N <= 64 else {least}):
                    stages = _stages(height, tile, split, matrix.K // BK // split, blocks)
                    if blocks * (stages * (height + tile) * BK * 2 + _epilogue(height, tile, split) + 1024) > SHARED_MEMORY:
                        continue
                    configs.append(TileConfig(height, tile, split, stages, _even(tiles, blocks * self.num_sms)))
        return list(dict.fromkeys(configs))

    def inputs(
        self,
        mixed: Tensor,
        matrix: GemmMatrix,
        lora: Lora,
        rkv: Tensor,
        hidden: Tensor,
        gates: tuple[Tensor | None, ...],
        config: TileConfig,
    ) -> None:
        """`project` and `Linear.lora_up` in one launch: rkv [3, N, C], hidden [N, R]; `gates` w_raw, a, v_mix, g [N, C].

        mixed [6, N, C]. A token's result depends on itself alone, of more than FEW_INPUTS tokens neither on N nor on `config`;
        the order of sums is another one for few. Thread blocks wait for each other, so such launches must come one after
        another, in one stream.
        """
        N, C = mixed.shape[1:]
        check("mixed", mixed, self.launcher.device, torch.float16, (PLANES, N, matrix.K))
        check("rkv", rkv, self.launcher.device, torch.float16, (3, N, matrix.M))
        check("hidden", hidden, self.launcher.device, torch.float16, (N, lora.rank))
        for name, out in zip(("w_raw", "a", "v_mix", "g"), gates, strict=True):
            if name != "v_mix" or lora.v0 is not None:
                dtype = torch.float32 if name == "w_raw" else torch.float16
                check(name, out, self.launcher.device, dtype, (N, C))
        if matrix.batch != 3 or matrix.transposed or not matrix.M == matrix.K == lora.width == lora.outputs:
            raise ValueError("matrix: three weights [C, C] are needed, and `lora` of the same C")
        if config[:4] not in [each[:4] for each in self.inputs_configs(N, matrix, lora)] or config.clusters < 1:
            raise ValueError(f"config: {config} does not fit {N} rows of x and this matrix")
        pairs = (lora.down, lora.up, lora.w0, lora.a0, lora.v0, rkv, hidden, *gates)
        if N > FEW_INPUTS:
            tensors = (mixed, matrix.weight, matrix.tiled, *pairs, self._written)
            cut = (config.height, config.tile, config.stages, config.clusters)
            self.launcher.launch(self._many_inputs, *map(pointer, tensors), N, C, matrix.M, *lora.ranks, *cut, self.pdl)
            return
        x_map, tensors = self._x_map(mixed, N, C, PLANES, config.tile), (mixed, *pairs, self._arrived)
        self.launcher.launch(
            self._few_inputs, *matrix.pointers(config), ctypes.addressof(x_map), *map(pointer, tensors), N, C,
            *lora.ranks, *config[:-1], self.pdl,
        )  # fmt: skip

    def inputs_configs(self, N: int, matrix: GemmMatrix, lora: Lora) -> list[TileConfig]:
        """Return ways to cut up `inputs` for N rows, of which timing shall choose; none where it does not fit."""
        C = matrix.K
        if not matrix.M == C == lora.outputs:  # a shard's
            return []
        if N > FEW_INPUTS:
            return _many_inputs_configs(N, C, lora.ranks, self.num_sms)
        if C % INPUTS_UNIT or C > MAX_INPUTS_WIDTH or max(lora.ranks) > MAX_RANK:
            return []
        tile, configs = 8 if N <= 8 else 16, []
        fewest = math.ceil(lora.rank / PAIR_ROWS)  # thread blocks of the pairs; with less they would be waited for
        for height in TILES:
            tiles = math.ceil(C / height) * 3
            if tiles + fewest <= self.num_sms:
                most = _stages(height, tile, 1, C // BK, 1)
                configs += [TileConfig(height, tile, 1, min(stages, most), tiles) for stages in INPUTS_STAGES]
        return list(dict.fromkeys(configs))

    def _x_map(self, x: Tensor, N: int, K: int, planes: int, tile: int) -> ctypes.Array:
        key = (x.data_ptr(), N, K, planes, tile)
        if key not in self._maps:
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            self._maps[key] = self._map(x, (K, N, planes), (2 * K, 2 * N * K), (BK, tile, 1))
        return self._maps[key]

    def tile_config(self, N: int, matrix: GemmMatrix) -> TileConfig:
        """Return how `gemm` cuts up a product of N rows."""
        return choose_config(N, matrix.M, matrix.K, matrix.batch, self.num_sms)

    def sparing_configs(self, N: int, matrix: GemmMatrix) -> list[TileConfig]:
        """Return ways to cut up a product of N rows that leave multiprocessors for another kernel; few rows have `inputs`."""
        if N <= FEW_INPUTS:
            return []
        config, configs = self.tile_config(N, matrix), []
        for height in TILES if N <= 64 else (config.height,):  # the higher ones read x half as often
            tiles = math.ceil(matrix.M / height) * math.ceil(N / config.tile) * matrix.batch
            stages = _stages(height, config.tile, 1, matrix.K // BK, 1)
            clusters = {_even(tiles, most) for most in (self.num_sms, self.num_sms * 3 // 4)}
            configs += [TileConfig(height, config.tile, 1, stages, each) for each in sorted(clusters, reverse=True)]
        return [config for config in configs if self.reserved_sms(config) >= LEAST_RESERVED]

    def reserved_sms(self, config: TileConfig) -> int:
        """Return how many multiprocessors a product leaves free whose thread blocks take one each."""
        return self.num_sms - config.clusters * config.split

    def tile_configs(self, N: int, matrix: GemmMatrix) -> list[TileConfig]:
        """Return that config and others that timing may prefer."""
        config, shape = self.tile_config(N, matrix), (matrix.M, matrix.K, matrix.batch, self.num_sms)
        rivals = _rival_configs(N, config, *shape) if N <= 64 else _rivals_of_many(N, *shape)
        return list(dict.fromkeys([config, *rivals]))

    def _map(self, tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> ctypes.Array:
        """Return a tensor map: `sizes` and `box` in elements, innermost first; `strides` in bytes, from the second on."""
        memory = ctypes.create_string_buffer(128 + 64)  # the driver wants 64-byte alignment
        aligned = (ctypes.c_char * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
        error = self._encode(
            ctypes.addressof(aligned), pointer(tensor), len(sizes), (ctypes.c_uint64 * len(sizes))(*sizes),
            (ctypes.c_uint64 * len(strides))(*strides), (ctypes.c_uint32 * len(box))(*box),
        )  # fmt: skip
        if error:
            raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {error}")
        return aligned


@functools.lru_cache(4096)
def choose_config(N: int, M: int, K: int, batch: int, num_sms: int) -> TileConfig:
    """Return a config for N rows; the rules were found by timing all on an H200."""
    return (_config_few if N <= 64 else _config_many)(N, M, K, batch, num_sms)


def _config_few(N: int, M: int, K: int, batch: int, num_sms: int) -> TileConfig:
    """Few rows: the time is that of reading the weights, so each multiprocessor asks for an equal part and for many at once."""
    tile = next(t for t in TILES[64] if t >= N)
    tiles, steps = math.ceil(M / 64) * batch, K // BK
    split = 1
    while split < 8 and steps >= 6 * split and tiles * split < 0.7 * num_sms:
        split *= 2
    rounds = math.ceil(tiles / num_sms)
    if split == 1 and tile <= 32 and tiles < 0.75 * rounds * num_sms and rounds <= 2 and steps >= 6:
        split = 2
    steps = math.ceil(steps / split)
    blocks = min(math.ceil(tiles * split / num_sms), 3 if split > 1 else 2)
    if blocks == 1 and steps <= 64 and tile < 32 * split:  # leave room for the next kernel's first stages
        blocks = 3 if split >= 4 and tile <= 32 else 2
    return TileConfig(64, tile, split, _stages(64, tile, split, steps, blocks), _even(tiles, blocks * num_sms))


def _rival_configs(N: int, config: TileConfig, M: int, K: int, batch: int, num_sms: int) -> list[TileConfig]:
    """Other ways for few rows: tiles twice as high, which read x half as often; other splits; other stages.

    Stages suit one to three thread blocks a multiprocessor: more than there are leave room for the next kernel's first ones.
    Small matrices also have tiles with some of the rows, so that each multiprocessor has less to do.
    """
    steps, rivals = K // BK, []
    smaller = [config.tile // part for part in (2, 4)]
    tiles_of_x = [config.tile, *(tile for tile in smaller if _may_be_small(N, tile, M * K * batch))]
    for height, tile, split in itertools.product(TILES, tiles_of_x, (1, 2, 4, 8)):
        tiles = math.ceil(M / height) * math.ceil(N / tile) * batch
        least = math.ceil(tiles * split / num_sms)
        if (split > 1 and (6 * split > steps or least > 3)) or (tile < config.tile and least > 1):
            continue
        if tiles * split < 0.4 * num_sms and split * 12 <= steps:
            continue  # too few thread blocks, and more splits are to come
        for blocks in range(min(least, 2), min(least + 1, 3) + 1):
            room = SHARED_MEMORY // blocks - 1024 - _epilogue(height, tile, split)
            if room >= 3 * (height + tile) * BK * 2:
                stages = _stages(height, tile, split, math.ceil(steps / split), blocks)
                rivals.append(TileConfig(height, tile, split, stages, _even(tiles, blocks * num_sms)))
    return rivals


@functools.lru_cache(4096)
def _many_inputs_configs(N: int, C: int, ranks: tuple[int, ...], num_sms: int) -> list[TileConfig]:
    """Return ways to cut up `Gemm.inputs` for more than a few rows: a thread block for each tile, or as many as run at once."""
    configs = []
    for height, tile in ((height, tile) for height, tiles in INPUTS_CUTS.items() for tile in tiles):
        of_x = math.ceil(N / tile)
        if tile >= 2 * N or (tile < 128 and of_x > 8):
            continue
        pairs = sum(math.ceil(rank / height) + math.ceil(C / height) for rank in ranks if rank)
        tiles = of_x * (pairs + 3 * math.ceil(C / height))
        for blocks in range(1, (3 if height * tile <= 64 * 64 else 2 if height * tile <= 64 * 128 else 1) + 1):
            room = SHARED_MEMORY // blocks - 1024 - height // 64 * INPUTS_STAGED
            stages = min(room // ((height + tile) * BK * 2), MAX_INPUTS_STAGES, max(3, C // BK))
            if stages >= 3:
                grids = {tiles, min(tiles, blocks * num_sms)}
                configs += [TileConfig(height, tile, 1, stages, grid) for grid in sorted(grids, reverse=True)]
    return list(dict.fromkeys(configs))


def _epilogue(height: int, tile: int, split: int) -> int:
    """Return the bytes of shared memory that results take on their way out."""
    return min(tile, 64) * ((height + 4) * 4 if split > 1 else height // 64 * 144)


def _may_be_small(N: int, tile: int, values: int) -> bool:
    """Return whether tiles of some of the rows of x may pay: for few rows and weights, which are read once for each tile."""
    return 16 <= tile <= 64 and 4 * tile >= N and values * 2 <= SMALL_WEIGHTS


def _config_many(N: int, M: int, K: int, batch: int, num_sms: int) -> TileConfig:
    """Many rows: the config with the least estimated time."""
    configs = _estimated(N, M, K, batch, num_sms, splits=(1, 2))
    return min((time, config) for time, config in configs if config.tile >= config.height)[1]


def _rivals_of_many(N: int, M: int, K: int, batch: int, num_sms: int) -> list[TileConfig]:
    """Others for many rows, those with the least estimated time."""
    return [config for _, config in sorted(_estimated(N, M, K, batch, num_sms, splits=(1, 2, 4)))][:RIVALS_OF_MANY]


def _estimated(N: int, M: int, K: int, batch: int, num_sms: int, *, splits: tuple[int, ...]) -> list[tuple[float, TileConfig]]:
    """Return configs for many rows, and us that each may take."""
    configs = []
    for height, tile in ((h, t) for h, tiles in TILES.items() for t in tiles if t >= 64):
        tiles, steps = math.ceil(M / height) * math.ceil(N / tile) * batch, K // BK
        for split in splits:
            if split > 1 and (split * tiles > num_sms or steps < 6 * split):
                continue
            step = max(2.3e-5 * height * tile, 1.75e-3 * (height + tile))  # multiplying, loading
            time = math.ceil(tiles * split / num_sms) * (step * steps / split + 9.3e-5 * height * tile)
            time += 3.8e-4 * height * tile * (split - 1)
            blocks = 2 if tile == 64 else 1
            stages = _stages(height, tile, split, math.ceil(steps / split), blocks)
            configs.append((time, TileConfig(height, tile, split, stages, _even(tiles, blocks * num_sms))))
    return configs


def _even(tiles: int, at_once: int) -> int:
    """Return how many tiles to work on at once, at most so many, for rounds of equal size."""
    return math.ceil(tiles / math.ceil(tiles / at_once))


def _stages(height: int, tile: int, split: int, steps: int, blocks: int) -> int:
    """Return how many stages a thread block has room for when `blocks` share a multiprocessor; no more than its steps."""
    epilogue = min(tile, 64) * ((height + 4) * 4 if split > 1 else height // 64 * 144)
    room = SHARED_MEMORY // blocks - 1024 - epilogue
    return max(3, min(room // ((height + tile) * BK * 2), steps, MAX_STAGES))
