"""The budget for prompts beside rows that decode, on a GPU: what the loop learns of steps is what they take."""

import time

import pytest
import torch
from test_gpu_state import GpuHarness
from test_worker import GREEDY, Memory

from rwkv_batch.request import Request, Sequence
from rwkv_batch.scheduling.pace import PrefillPace
from rwkv_batch.scheduling.plan import Plan, Row

pytestmark = pytest.mark.gpu

STEPS = 8  # timed together


def harness_of(budget_ms: float) -> GpuHarness:
    harness = GpuHarness(Memory(), shared=False)
    pace = PrefillPace(budget_ms, budget=512, mixed=False, captured=harness.engine.prefills.sizes)
    harness.scheduler.pace = harness.worker._pace = pace
    return harness


def run(harness: GpuHarness) -> tuple[str, str]:
    """A row that decodes, and a long prompt."""
    harness.submit("early", [[5, 6, 7]], max_tokens=200, sampling=GREEDY)
    harness.submit("late", [[1 + number % 4000 for number in range(20_000)]], max_tokens=4, sampling=GREEDY)
    harness.run()
    return harness.texts["early"][0], harness.texts["late"][0]


def milliseconds(harness: GpuHarness, num_tokens: int) -> float:
    """What a step of prefill takes among others, as the loop submits them: alone, a small model's would be the host's time."""
    sequence, times = Sequence(Request(id="timed", prompts=[[1]], sampling=GREEDY, max_tokens=1), 0), []
    sequence.slot = 0
    for _ in range(9):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            harness.engine.submit(Plan([Row(sequence, ids=[1] * num_tokens, sample=False, start=True)]))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3 / STEPS)
    return sorted(times)[4]


def test_what_is_learned_is_what_steps_take():
    harness = harness_of(1000.0)
    num_eager = harness.engine.num_eager_decodes
    run(harness)
    took = milliseconds(harness, 512)
    stats = harness.worker.stats()
    assert stats["prefill_allowance_tokens"] == 512
    assert 0.5 * took <= stats["prefill_ms_per_1000_tokens"] * 0.512 <= 2 * took
    assert harness.engine.num_eager_decodes == num_eager


def test_a_small_budget_means_small_steps_and_no_starving():
    harness = harness_of(1e-6)
    num_replays = harness.engine.prefills.num_replays
    assert all(run(harness))
    assert harness.worker.stats()["prefill_allowance_tokens"] == 32
    assert harness.engine.prefills.num_replays - num_replays >= 200  # one between two tokens of the other row
