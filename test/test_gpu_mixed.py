"""Rows that mix states on a GPU: what is drawn is the mixture of what was kept, all its rows are fed it, and others go on."""

import pytest
import torch
from test_gpu_engine import engine_of

from rwkv_batch.model.state import Together
from rwkv_batch.request import Request
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling.mixture import mix_logits
from sampling.params import SamplingParams

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0, ignore_eos=True)


def state_of(engine, seed: int):
    """A random state, or the empty one for 0."""
    if seed == 0:
        return None
    generator = torch.Generator().manual_seed(seed)
    shape = engine.state.wkv[:, 0].shape
    return engine.state.snapshot_of(torch.randn(*shape, generator=generator) * 0.3)


def run(engine, jobs: dict[str, tuple[list[int], list[int], list[float]]], max_tokens: int = 24) -> dict[str, list[int]]:
    """Run rows, one step ahead of what is read: id -> (prompt, seeds of its states, their weights). Returns what they drew."""
    scheduler = Scheduler(num_slots=64, prefill_budget=512, mixed=False, late_draws=True)
    ids: dict[str, list[int]] = {id: [] for id in jobs}
    for id, (prompt, seeds, weights) in jobs.items():
        given = weights if len(seeds) > 1 else []
        request = Request(id=id, prompts=[prompt], sampling=GREEDY, max_tokens=max_tokens, state=id, weights=given)
        (sequence,) = scheduler.add(request)
        parts = tuple(state_of(engine, seed) for seed in seeds)
        sequence.initial = Together(parts) if len(parts) > 1 else parts[0]

    def read(step) -> None:
        for token in engine.collect(step):
            found = ids[token.sequence.request.id]
            if len(found) < max_tokens:
                found.append(token.id)
                if len(found) == max_tokens:
                    scheduler.finish(token.sequence)

    before = None
    for _ in range(2000):
        plan = scheduler.next_plan()
        step = engine.submit(plan) if plan else None
        if step is not None and step.early is not None:
            read(step.early)
        if before is not None:
            read(before)
        before = step
        if before is None and not scheduler.num_running:
            assert scheduler.num_free == 64
            return ids
    raise AssertionError("rows do not come to their ends")


JOBS = {
    "mix": ([5, 7, 9], [1, 2, 0], [0.3, 0.5, 0.2]),
    "minus": ([11, 12], [1, 2, 3, 4, 0], [1.5, -0.5, 0.2, 0.1, 0.3]),
    "pair": (list(range(1, 90)), [3, 0], [1.0, 2.0]),
    "plain": ([5, 7, 9], [0], []),
    "state": ([5, 7, 9], [1], []),
}


def test_what_is_drawn_is_the_mixture(monkeypatch):
    """Of the logits that were kept, by numpy; in captured graphs, with plain rows beside."""
    engine = engine_of("768", 64, [64])
    num_eager = engine.num_eager_decodes
    checked = []
    draw = engine._draw

    def judged(rows):
        kept = engine._kept[:, : len(engine.sampler.ids)].double().cpu() if rows else None
        step = draw(rows)
        for place, row in enumerate(rows):
            parts = [row.sequence, *row.sequence.followers]
            weights = row.sequence.request.weights
            mixed = sum(kept[part.slot] * (w / sum(weights)) for part, w in zip(parts, weights, strict=True))
            mixed[engine.sampler.ids.cpu() == 0] = -torch.inf  # ignore_eos
            step.arrived.synchronize()
            drawn = int(step.sampled.ids[place])
            column = int((engine.sampler.ids.cpu() == drawn).nonzero())
            assert mixed.max() - mixed[column] <= 0.02, "rounding of halves at most"
            assert {int(engine.state.last_ids[part.slot]) for part in parts} == {drawn}
            checked.append(row.sequence.request.id)
        return step

    monkeypatch.setattr(engine, "_draw", judged)
    ids = run(engine, JOBS)
    assert {id: checked.count(id) for id in ("mix", "minus", "pair")} == dict.fromkeys(("mix", "minus", "pair"), 24)
    assert engine.num_eager_decodes == num_eager, "all decode steps are graphs"
    assert all(len(found) == 24 for found in ids.values())


def test_a_mix_of_one_state_is_that_state():
    """Whatever the weights, and whoever has none; the rows of all are in captured steps of one size."""
    engine = engine_of("768", 64, [64])
    prompt = [5, 7, 9]
    jobs = {
        "first": (prompt, [1, 1], [1.0, 0.0]),
        "same": (prompt, [1, 1], [1.0, 3.0]),
        "only": (prompt, [1, 2, 0], [1.0, 0.0, 0.0]),
        "last": (prompt, [2, 1], [0.0, 3.0]),
    }
    ids = run(engine, jobs)
    assert len({tuple(found) for found in ids.values()}) == 1
    assert run(engine, {"other": (prompt, [2, 1], [1.0, 0.0])})["other"] != ids["first"]


def test_plain_rows_are_what_they_are_without_mixes():
    """Beside as many rows, so that prompts are read in steps of the same size, whose products are done alike."""
    engine = engine_of("768", 64, [64])
    parts = {f"{id} {i}": (prompt, [seed], []) for id, (prompt, seeds, _) in JOBS.items() for i, seed in enumerate(seeds)}
    alone, beside = run(engine, parts), run(engine, JOBS)
    plain = [id for id, job in JOBS.items() if len(job[1]) == 1]
    assert [alone[f"{id} 0"] for id in plain] == [beside[id] for id in plain]


def test_the_mixture_is_captured_in_a_graph():
    """No wait, static places."""
    logits = torch.randn(64, 4096, device="cuda", dtype=torch.float16)
    slots, weights = torch.randint(64, (8, 5), device="cuda"), torch.rand(8, 5, device="cuda")
    wanted = mix_logits(logits, slots, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mix_logits(logits, slots, weights)
    found.zero_()
    graph.replay()
    assert torch.equal(found, wanted)
