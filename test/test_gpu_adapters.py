"""Rows with adapters on kernels: against merged weights in plain fp32, in company, in graphs of decode and prefill."""

import pytest
import torch

from bench.served.adapters import random_lora
from bench.synth_checkpoint import synth
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.engine.engine import Engine
from rwkv_batch.kernels import compiler
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.adapters.adapter import Adapter
from rwkv_batch.model.adapters.changes import LoraChange
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.request import Request
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling.params import SamplingParams

pytestmark = pytest.mark.gpu
SHAPES = {"768": (6, 768, 64, 64, 32, 128, 1.15), "4096": (2, 4096, 128, 128, 96, 480, 1.38)}
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SLOTS, RANK, TOKENS = 16, 32, 24
DEVICE = torch.device("cuda:0")
_engines: dict[tuple[str, str], Engine] = {}


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return synth(SHAPES[name], vocab=4096, seed=7, device="cuda", place="cuda")


def engine_of(name: str, quant: str = "") -> Engine:
    if (name, quant) not in _engines:
        _engines.clear()  # one at a time is enough memory
        weights = weights_module.from_tensors(
            tensors_of(name), dtype=torch.float16, device=DEVICE, progress=False, quant=Quantisation(quant) if quant else PLAIN
        )
        config = Config(ops="kernels", adapter_ranks=4 * RANK)
        _engines[name, quant] = build.build_engine(
            config, weights, SLOTS, max_tokens=2048, library=compiler.library(), graph_sizes=[1, 8, 16]
        )
        _engines[name, quant].loaded = [_engines[name, quant].bank.load(lora_of(weights, seed)) for seed in range(4)]
    return _engines[name, quant]


def lora_of(weights: weights_module.Weights, seed: int) -> Adapter:
    """Strong enough to be seen."""
    found = random_lora(weights, RANK, seed)
    found.changes.update({key: LoraChange(change.a * 2, change.b * 2) for key, change in found.changes.items()})
    return found


def run(engine: Engine, rows: dict[int, object]) -> dict[int, list[int]]:
    """Return greedy ids of rows with adapters, or with None; prompts of different lengths."""
    scheduler = Scheduler(num_slots=SLOTS, prefill_budget=256, mixed=False, late_draws=True)
    ids, before = {number: [] for number in rows}, None
    for number, adapter in rows.items():
        prompt = [3 + (7 * number + k * k) % 4000 for k in range(1 + 40 * number)]
        request = Request(id=str(number), prompts=[prompt], sampling=GREEDY, max_tokens=TOKENS)
        (sequence,) = scheduler.add(request)
        sequence.adapter = adapter
    while True:
        plan = scheduler.next_plan()
        step = engine.submit(plan) if plan else None
        for part in (before.early, before) if before is not None else ():
            for token in engine.collect(part) if part is not None else ():
                found = ids[int(token.sequence.request.id)]
                found.append(token.id)
                if len(found) == TOKENS:
                    scheduler.finish(token.sequence)
        before = step
        if before is None:
            return {number: found[:TOKENS] for number, found in ids.items()}


@pytest.mark.parametrize(("name", "quant", "relative"), [("768", "", 1e-2), ("4096", "", 1e-2), ("4096", "int8", 0.1)])
@torch.inference_mode()
def test_logits_equal_those_of_merged_weights(name, quant, relative):
    """Decode and prefill of four rows: three adapters and none. Quantised matrices: adapters beside them, not in them."""
    engine, slots = engine_of(name, quant), [5, 0, 9, 2]
    adapters = [engine.loaded[0], engine.loaded[1], None, engine.loaded[2]]
    engine.bank.assign(slots, adapters)
    model = engine.adapted.model
    text = torch.randint(1, 4096, (4 * 70,), generator=torch.Generator(device="cuda").manual_seed(1), device="cuda")
    engine.state.clear(slots)
    last = torch.arange(69, 4 * 70, 70, device="cuda")
    first = model.forward(text, PackedRows(slots, [70] * 4, DEVICE), engine.state, logits_of=last).float().clone()
    engine.state.last_ids[torch.tensor(slots, device="cuda")] = text[:4]
    second = model.forward(None, CapturedRows.decode(torch.tensor(slots, device="cuda")), engine.state).float().clone()
    for row, number in enumerate((0, 1, None, 2)):
        judge = Model(
            weights_module.from_tensors(
                tensors_of(name), device=DEVICE, progress=False,
                adapters=[] if number is None else [lora_of(engine.model.weights, number)],
            )
        )  # fmt: skip
        state = State(judge.weights.shape, 1, device=DEVICE)
        one = judge.forward(text[70 * row : 70 * row + 70], PackedRows([0], [70], DEVICE), state)
        two = judge.forward(text[row : row + 1], PackedRows([0], [1], DEVICE), state)
        for found, wanted in ((first[row], one[0]), (second[row], two[0])):
            error = float((found - wanted).norm() / wanted.norm())
            print(f"{name} {quant} row {row}: relative RMS {error:.2e}")
            assert error < relative


@pytest.mark.parametrize("quant", ["", "int8"])
def test_rows_in_graphs_are_what_each_is_alone(quant):
    """Up to where the rounding of another batch size decides: greedy texts of random weights part sooner or later."""
    engine = engine_of("768", quant)
    rows = dict(enumerate([*engine.loaded, None, engine.loaded[0], engine.loaded[2], None]))
    replays = engine.adapted.graphs.num_replays
    together = run(engine, rows)
    assert engine.adapted.graphs.num_replays > replays
    same = sum(together[number][:8] == run(engine, {number: adapter})[number][:8] for number, adapter in rows.items())
    assert same >= len(rows) - 1
    again = run(engine, rows)
    assert again == together
    plain = run(engine, dict.fromkeys(rows))
    assert sum(plain[number] != together[number] for number in (0, 1, 2, 3, 5, 6)) == 6


def test_steps_without_adapters_run_in_the_plain_graphs():
    """An engine with room for adapters computes for other rows exactly what one without computes."""
    engine = engine_of("768")
    replays = engine.adapted.graphs.num_replays
    found = run(engine, dict.fromkeys(range(6)))
    assert engine.adapted.graphs.num_replays == replays
    weights = weights_module.from_tensors(tensors_of("768"), dtype=torch.float16, device=DEVICE, progress=False)
    plain = build.build_engine(
        Config(ops="kernels"), weights, SLOTS, max_tokens=2048, library=compiler.library(), graph_sizes=[1, 8, 16]
    )
    assert run(plain, dict.fromkeys(range(6))) == found


def test_an_adapter_is_loaded_beside_steps():
    """Rows that run see nothing of it."""
    engine = engine_of("768")
    wanted = run(engine, {1: engine.loaded[0], 2: None})
    kept = engine.loaded.pop()
    del kept
    assert engine.bank.num_free == RANK
    engine.loaded.append(engine.bank.load(lora_of(engine.model.weights, 9)))
    assert run(engine, {1: engine.loaded[0], 2: None}) == wanted
    assert run(engine, {1: engine.loaded[3]})[1] != wanted[1]
