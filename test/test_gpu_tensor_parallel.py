"""A model over two cards against the same on one, and the kernels that it is added up with. Skipped where there are fewer."""

import gc
import subprocess
import sys
from functools import partial

import pytest
import torch
from models import ROOT
from test_gpu_engine import ROW_COSINE, SHAPES, tensors_of

from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.tensor_parallel.build import Spread
from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.tensor_parallel.exchange import KernelExchange
from rwkv_batch.kernels.tensor_parallel.links import check_sums, connect
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.quantized import PLAIN
from rwkv_batch.model.tensor_parallel.on_device import current
from sampling.params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards of one host, linked by NVLink"),
]

HALF = torch.float16
COSINE = 0.99999
WIDTH = 8  # values of a token in tests of sums alone
MOST = 524_288  # tokens there: 8 MiB


def cards(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


def exchange_of(count: int, *, num_sums: int, patience: float = 20.0) -> KernelExchange:
    """Ranks with nothing but sums."""
    library, devices = compiler.library(), cards(count)
    connect(library, devices)
    launchers = [Launcher(compiler.library(device.index), device) for device in devices]
    parts = [torch.zeros(MOST, WIDTH, dtype=HALF, device=device) for device in devices]
    columns = [slice(8 * rank, 8 * rank + 8) for rank in range(count)]
    found = KernelExchange(launchers, parts, columns, num_sums=num_sums, max_rows=16, patience=patience)
    for device in devices:
        torch.cuda.synchronize(device)
    return found


def test_sums_are_those_of_torch():
    check_sums(exchange_of(2, num_sums=10))


@pytest.mark.parametrize(
    ("tokens", "replays"), [(1, 4000), (3, 2000), (1024, 2000), (32_768, 1000), (32_769, 1000), (MOST, 300)]
)
@pytest.mark.parametrize("slow", [None, 0, 1])
@torch.inference_mode()
def test_sums_stay_right_in_graphs_replayed_often_with_a_slow_rank(tokens, replays, slow):
    """16 bytes to 8 MiB; every replay adds up other numbers, in halves without rounding, and counts what is wrong."""
    exchange = exchange_of(2, num_sums=4)
    graphs, wrong, bases = [], [], []  # a graph keeps what it makes, but not what it is given
    for rank, device in enumerate(cards(2)):
        with current(device):
            base = torch.arange(tokens * WIDTH, device=device).view(tokens, WIDTH)
            counter, bad = torch.zeros(2, dtype=torch.int64, device=device).unbind()
            part, graph = exchange.parts[rank][:tokens], torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                exchange.begin_one(rank)
                for number in range(exchange.num_sums):
                    counter += 1
                    given = [(base * (other + 3) + counter * (other + 1) + number) % 509 for other in range(2)]
                    part.copy_(given[rank])
                    if rank == slow and number == 1:
                        torch.cuda._sleep(20_000)
                    exchange.add_one(rank, part)
                    bad += (part != sum(given)).sum()
            graphs.append(graph)
            wrong.append(bad)
            bases.append(base)
    for _ in range(replays):
        for graph in graphs:
            graph.replay()
    for device in cards(2):
        torch.cuda.synchronize(device)
    assert [int(bad) for bad in wrong] == [0, 0]
    assert exchange.trouble() is None


def test_a_rank_that_does_not_come_ends_the_wait_with_its_name():
    """In a process of its own, which is no use afterwards."""
    program = """
import sys, torch
sys.path[:0] = ["test", "."]
from test_gpu_tensor_parallel import exchange_of
exchange = exchange_of(2, num_sums=2, patience=0.5)
exchange.begin_one(0)
exchange.add_one(0, exchange.parts[0][:1])
try:
    torch.cuda.synchronize(0)
except RuntimeError:
    print(exchange.trouble().message, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert "rank 0 waited in vain for a part of a sum of rank 1" in done.stdout, done.stderr[-2000:]


def engine_over(name: str, count: int, slots: int, sizes: list[int], *, prompts: bool, max_tokens: int = 1024) -> Engine:
    """The model of `test_gpu_engine` over so many cards; `prompts`: prefills run from graphs too, which take long to make."""
    tensors, device = tensors_of(name), torch.device("cuda", 0)
    config = Config(ops="kernels", wkv_state="fp16", tp=count, batch_invariant=not prompts, watchdog_seconds=20)
    read = partial(weights_module.from_tensors, dtype=HALF, progress=False)
    spread = Spread.of(config, device, weights_module.shape_of(tensors, name), PLAIN)
    weights = read(tensors, device=device) if spread is None else spread.load(tensors, read)
    return build.build_engine(config, weights, slots, max_tokens=max_tokens, library=compiler.library(), graph_sizes=sizes)


@pytest.mark.parametrize("name", ["768", "2048", "4096"])
@torch.inference_mode()
def test_two_cards_say_what_one_says(name):
    """Prompts, decode steps of graphs of several sizes, and states that go from one card to two and back."""
    assert name in SHAPES
    sizes, slots = [1, 4, 32], 32  # as many slots as rows in the largest captured prefills
    prompts_captured = name == "768"
    alone, both = (engine_over(name, count, slots, sizes, prompts=prompts_captured) for count in (1, 2))
    device = torch.device("cuda", 0)
    generator = torch.Generator(device="cuda").manual_seed(5)
    prompts = torch.randint(1, 4096, (600 + 1 + 33,), generator=generator, device="cuda")
    rows = PackedRows([0, 5, 9], [600, 1, 33], device)
    logits = []
    for engine in (alone, both):
        engine.state.clear(range(slots))
        engine.sampler.start_many([*range(slots)], [SamplingParams(temperature=0, ignore_eos=True)] * slots, [0] * slots)
        logits.append([engine.model.forward(prompts, rows, engine.state).float().clone()])
        engine.state.put_many([*range(1, 5)], engine.state.take(0))
        if prompts_captured:
            fed = [prompts[:70].tolist(), prompts[70:79].tolist()]
            assert engine.prefills.fits(79, 2)
            logits[-1].append(engine.prefills.replay([7, 8], fed, 2)[1].float().clone())
        for step in range(40):
            used = [[0], [0, 5, 9], [*range(slots)]][step % 3]
            forced = torch.arange(slots, device="cuda") * 7 + step + 1
            engine.state.last_ids.copy_(forced)
            logits[-1].append(engine.graphs.replay(used)[1].float().clone())
    one, two = (torch.cat(all_steps).double() for all_steps in logits)
    rows = torch.nn.functional.cosine_similarity(one, two)
    together = float(torch.nn.functional.cosine_similarity(one.flatten(), two.flatten(), dim=0))
    print(f"{name}: cosine to one card {together:.7f}, the worst row {float(rows.min()):.7f}")
    assert together >= COSINE
    assert rows.min() >= ROW_COSINE, "as against fp32: a row of random weights may amplify what fp16 rounds"
    first, second = (own.shift.cpu() for own in both.state.ranks)
    assert torch.equal(first, second), "the residual streams of both ranks"
    kept = alone.state.take(9)
    both.state.put(3, kept)
    back = both.state.take(3)
    alone.state.put(3, back)
    assert torch.equal(back.wkv, kept.wkv)
    assert torch.equal(back.shift, kept.shift)
    assert torch.equal(alone.state.take(3).wkv, kept.wkv)
    del alone, both
    gc.collect()
    torch.cuda.empty_cache()
