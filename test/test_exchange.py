"""What ranks tell each other: the kernels' bodies run by threads of a CPU, and what a rank on a card would launch."""

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_recorder import Answer, make_launcher
from models import random_tensors

from rwkv_batch.config import Config
from rwkv_batch.engine.prefill_graphs import step_rows
from rwkv_batch.engine.tensor_parallel import build as tensor_parallel
from rwkv_batch.errors import EngineFailed, UsageError
from rwkv_batch.kernels.autotune import Autotuner
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.tensor_parallel.exchange import FLAGS, ExchangeArgs, KernelExchange
from rwkv_batch.kernels.tensor_parallel.links import BUS, NONE, NVLINK, check_cards
from rwkv_batch.kernels.tensor_parallel.ops import ShardOps
from rwkv_batch.kernels.variants import GEMV, GEMV_RKV, LoraPlacement
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.state import State
from rwkv_batch.model.tensor_parallel.forward import Rank, ShardedModel, ShardedWeights
from rwkv_batch.model.tensor_parallel.shard import Shard, columns_of
from rwkv_batch.model.tensor_parallel.state import ShardedState
from sampling.reference import ReferenceSampler

HALF = torch.float16
SOURCE = Path(__file__).parent / "rank_threads.cpp"
SIZES = (1, 3, 4, 5, 8, 16, 17, 64, 70, 128)
NUMBERS = (
    "ranks",
    "threads",
    "blocks",
    "steps",
    "sums",
    "values",
    "rows",
    "columns",
    "slow",
    "dead",
    "dead_step",
    "first_step",
    "seed",
)
LAST_STEP = (2**32 - 1) // 4 - 1  # of four sums each
long = pytest.mark.long


class Plan(ctypes.Structure):
    """`Plan` of rank_threads.cpp."""

    _fields_ = (*((name, ctypes.c_int32) for name in NUMBERS), ("patience", ctypes.c_int64))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, to run ranks on a CPU")
    built = tmp_path_factory.mktemp("ranks") / "ranks.so"
    command = [compiler, "-std=c++20", "-O0", "-w", "-fPIC", "-shared", "-pthread", SOURCE, "-o", built]
    if subprocess.run(command, capture_output=True, timeout=100).returncode:
        pytest.skip("needs a C++ compiler that knows C++20")
    return ctypes.CDLL(str(built))


def run(library: ctypes.CDLL, **plan) -> tuple[int, list[list[int]]]:
    """Run steps; return the line of what came out wrong, 0 = nothing, and what each rank waited for in vain."""
    usual = {"ranks": 2, "threads": 2, "blocks": 2, "steps": 8, "sums": 4, "values": 64, "rows": 5, "columns": 16}
    usual |= {"slow": -1, "dead": -1, "seed": 1, "patience": 60 * 10**9}
    trouble = (ctypes.c_int32 * 32)()
    wrong = library.run_ranks(ctypes.byref(Plan(**usual | plan)), trouble)
    return wrong, [list(trouble[4 * rank : 4 * rank + 4]) for rank in range(8)]


@pytest.mark.parametrize(
    "plan",
    [
        {"ranks": 2, "steps": 16, "slow": 1},
        {"ranks": 3, "threads": 3, "blocks": 1, "first_step": LAST_STEP - 3},
        pytest.param({"ranks": 4, "threads": 4, "blocks": 2, "steps": 50, "slow": 2}, marks=long),
        *(pytest.param({"ranks": 4, "threads": 4, "blocks": 1, "steps": 30, "seed": seed}, marks=long) for seed in range(8)),
    ],
    ids=str,
)
def test_sums_ids_and_logits_are_right_however_late_and_mixed_up_words_arrive(library, plan):
    """Words are delivered one by one in any order; sums of both kinds and of two sizes take turns; epochs come round."""
    assert run(library, **plan) == (0, [[0] * 4] * 8)


def test_a_rank_that_ends_is_missed_by_name(library):
    _, trouble = run(library, ranks=3, threads=3, blocks=1, dead=1, dead_step=3, patience=10**9)
    told = [line for line in trouble if line[0]]
    assert any(rank != 1 and missing >> 1 & 1 for _, rank, missing, _ in told), told


def test_the_arguments_are_described_twice_alike(library):
    assert library.ranks_size() == ctypes.sizeof(ExchangeArgs)
    text = (SOURCE.parent.parent / "cuda" / "exchange.cuh").read_text()
    lines = [line.split() for line in text.splitlines() if line.startswith("constexpr int ")]
    number = {name: int(value.rstrip(";")) for _, _, name, _, value, *_ in lines}
    assert number["FLAG_SETS"] * number["MAX_EXCHANGE_BLOCKS"] * number["MAX_RANKS"] == FLAGS


# What a rank on a card launches.


class Ranks:
    """A small model on ranks whose launches are noted."""

    def __init__(self, monkeypatch, count: int):
        monkeypatch.setattr(torch, "empty", torch.zeros)
        launcher, self.recorder = make_launcher(monkeypatch)
        launcher.library.rwkv_exchange_args_size = Answer(ctypes.sizeof(ExchangeArgs))
        tensors = random_tensors((2, 256, 32, 16, 16, 48, 1.15))
        shape = weights_module.shape_of(tensors, "random")
        shards = [weights_module.from_tensors(dict(tensors), dtype=HALF, shard=Shard(rank, count)) for rank in range(count)]
        for own in shards:
            own.dtype = HALF
        ops = [ShardOps(own, launcher, max_tokens=160, max_rows=140) for own in shards]
        self.ranks = [Rank(own, one) for own, one in zip(shards, ops, strict=True)]
        self.weights = ShardedWeights(shape, shards)
        states = [State(own.shape, 130, shift_dtype=HALF, wkv_dtype=HALF) for own in shards]
        self.state = ShardedState(shape, states)
        columns = columns_of(len(self.weights.output_ids), count)
        parts = [one.part for one in ops]
        self.exchange = KernelExchange([launcher] * count, parts, columns, num_sums=4, max_rows=140, patience=1)
        self.model = ShardedModel(self.weights, self.ranks, self.exchange)
        self.recorder.clear()

    def exchanges(self) -> list[tuple]:
        return [note for note in self.recorder.take() if note[0].startswith("rwkv_exchange")]


@pytest.fixture(params=[2, 4])
def ranks(request, monkeypatch) -> Ranks:
    return Ranks(monkeypatch, request.param)


def test_every_variant_of_every_product_of_a_rank_takes_its_shapes(ranks):
    """Each launch checks the shapes of its arguments."""
    rank, state = ranks.ranks[0], ranks.state.ranks[0]
    slots = torch.arange(130)

    def decode_step(size: int) -> None:
        for _ in rank.steps(None, CapturedRows.decode(slots[:size]), state, None):
            pass

    for size in SIZES:
        decode_step(size)
        for name in ("rkv", "output", "ffn_key", "ffn_value", "head"):
            for variant in rank.ops.variants(name, size, rank.ops.prepared.layers[-1]):
                assert variant != GEMV_RKV
                assert variant.lora is not LoraPlacement.FUSED
                rank.ops.choose(name, size, variant)
                decode_step(size)
            rank.ops.choose(name, size, None)
    assert GEMV in rank.ops.variants("rkv", 1, rank.ops.prepared.layers[0])
    Autotuner(rank.ops, decode_step).tune([1, 16, 70])
    for other in ranks.ranks[1:]:
        other.ops.take_choices(rank.ops)
        assert other.ops._chosen["rkv", 1] == rank.ops._chosen["rkv", 1]


def test_all_ranks_of_a_step_exchange_the_same_in_the_same_order(ranks):
    count = len(ranks.ranks)
    for lengths in ([40, 1, 7], [1, 1]):
        tokens = torch.ones(sum(lengths), dtype=torch.int64)
        logits = ranks.model.forward(tokens, PackedRows(list(range(len(lengths))), lengths), ranks.state)
        assert logits.shape == (len(lengths), len(ranks.weights.output_ids))
        notes = ranks.exchanges()
        assert [note[0] for note in notes] == (
            ["rwkv_exchange_begin"] * count + ["rwkv_exchange_sum"] * 4 * count + ["rwkv_exchange_join"] * count
        )
        sums = [note for note in notes if note[0].endswith("sum")]
        assert [note[-3] for note in sums] == [number for number in range(4) for _ in range(count)]
        assert {note[-5:-3] for note in sums} == {(sum(lengths) * 256, 0)}, "how much, and that it is little"
        assert len({note[2] for note in sums}) == count, "each with its own arguments"
    columns = [note[-6:-3] for note in notes if note[0].endswith("join")]
    assert [column for _, column, _ in columns] == [part.start for part in ranks.exchange.columns]
    with pytest.raises(ValueError, match="not where the other ranks look"):
        ranks.exchange.add_one(0, torch.zeros(3, 256, dtype=HALF))


def test_large_sums_are_shared_out(ranks):
    part = ranks.exchange.parts[0]
    ranks.exchange._few_bytes = 8 * 512
    for tokens, many in ((8, 0), (9, 1), (160, 1)):
        ranks.exchange.begin_one(0)
        ranks.exchange.add_one(0, part[:tokens])
        assert ranks.exchanges()[-1][-5:] == (tokens * 256, many, 0, 4, 1)


def test_what_a_rank_waited_for_in_vain_is_told(ranks):
    assert ranks.exchange.trouble() is None
    ranks.exchange._trouble[1] = torch.tensor([1, 1, 0b1, 77])
    assert ranks.exchange.trouble().message == "rank 1 waited in vain for a part of a sum of rank 0 (77)"


def test_cards_that_cannot_be_one_engine_are_refused():
    cards = [torch.device("cuda", index) for index in range(3)]
    alike = ["H200"] * 3
    check_cards(cards, alike, lambda a, b: NVLINK)
    for names, link, words in (
        (["H200", "H200", "H100"], NVLINK, "not alike: H100, H200"),
        (alike, BUS, "cards 0 and 1 are not linked by NVLink"),
        (alike, NONE, "card 0 does not reach the memory of card 1"),
    ):
        with pytest.raises(UsageError) as refusal:
            check_cards(cards, names, lambda a, b, link=link: link)
        assert refusal.value.message == f"--tp 3: {words}" or words in refusal.value.message


class CapturedSampler(ReferenceSampler):
    """A sampler that graphs can capture, as far as a test without a card can tell."""

    def launch(self, logits, slots, *, out_ids, out_finite) -> None:
        self.launched = (tuple(logits.shape), slots.tolist())

    def report_logprobs(self, sampled, logits, slots, needs):
        return sampled


def test_an_engine_on_cards_is_put_together_and_replays_a_graph_of_each(ranks, monkeypatch):
    count, replays, recorder = len(ranks.ranks), [], ranks.recorder

    class Graph:
        def replay(self) -> None:
            replays.append(self)

    fill = SimpleNamespace(take=None, put=None)
    for name, value in {
        "connect": lambda library, devices: None,
        "check_sums": lambda exchange: None,
        "make_sampler": lambda name, slots, ids, device, *rest, **more: CapturedSampler(slots, ids),
        "StateFill": lambda launcher: lambda slots, **parts: fill,
    }.items():
        monkeypatch.setattr(tensor_parallel, name, value)
    library = ranks.exchange.launchers[0].library
    monkeypatch.setattr(tensor_parallel.self_check, "failing", lambda *args: [])
    monkeypatch.setattr(tensor_parallel.compiler, "library_like", lambda like, index: library)
    monkeypatch.setattr(Launcher, "time", lambda self, run, rounds=4: (self.use_current_stream(), run(), 1.0)[2])
    monkeypatch.setattr("rwkv_batch.engine.tensor_parallel.graphs.Staging", lambda length, device: Sends())
    for name, value in {
        "CUDAGraph": Graph, "graph": lambda graph, **options: nullcontext(), "synchronize": lambda device=None: None,
        "graph_pool_handle": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    engine = tensor_parallel.build_sharded(
        Config(tp=count), ranks.weights, 6, max_tokens=64, wkv_dtype=HALF, library=library, graph_sizes=[2, 6]
    )
    assert engine.model.ops_name == f"kernels on {count} cards"
    notes = [note[0] for note in recorder.take() if note[0].startswith("rwkv_exchange")]
    steps = count * 2 * (2 + 3 * 2)  # each size of decode steps, and of prefill steps of one row and of six, twice
    assert notes.count("rwkv_exchange_begin") == notes.count("rwkv_exchange_join") == steps
    assert notes.count("rwkv_exchange_sum") == steps * 4
    (sampled, logits) = engine.graphs.replay([4, 1, 3], 2)
    assert (len(sampled.ids), logits.shape[0], len(set(replays))) == (2, 3, count)
    assert engine.graphs._drawn_slots.of[0].tolist() == [4, 1, -1, -1, -1, -1]
    assert all(slots.tolist() == [4, 1, 3, -1, -1, -1] for slots in engine.graphs._slots.of)
    assert engine.state.elapsed == [0, 1, 0, 1, 1, 0]
    assert engine.prefills.sizes == [16, 32, 64]
    assert engine.prefills.fits(64, 1)
    assert not engine.prefills.fits(65, 1)
    engine.prefills.replay([2], [[5, 6, 7]], 1)
    for inputs in engine.prefills._inputs.of:
        tokens, rows, sampled = step_rows(inputs, 16, 1)
        assert (tokens.tolist()[:4], rows.slot_tensor.tolist(), sampled.tolist()) == ([5, 6, 7, 0], [2], [2])
    assert engine.state.elapsed[2] == 3
    assert engine.sampler.launched[1] == [-1], "slot 0 is not sampled while graphs are captured"
    engine._exchange._trouble[0] = torch.tensor([3, 0, 2, 5])
    with pytest.raises(EngineFailed, match="waited in vain for the ids of a step of rank 1"), engine._told():
        raise RuntimeError("CUDA error")


class Sends:
    """In the place of `Staging`: what is sent is there at once."""

    def send(self, values: list[int], target: torch.Tensor) -> None:
        target[: len(values)] = torch.tensor(values)
