"""Log-probabilities on a GPU: of prompts and of sampled tokens, against the reference ops in fp32 on the same weights."""

import itertools

import pytest
import torch
from test_gpu_engine import engine_of, load

from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.request import Request, TokenLogprob
from rwkv_batch.scheduling.plan import SCORED_TOKENS
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling.params import SamplingParams

pytestmark = pytest.mark.gpu

SLOTS = 16
TOLERANCE = 0.05  # fp16 weights and logits
MAX_TOKENS = 6


def run(engine: Engine, requests: list[Request]) -> dict[str, list[list[TokenLogprob]]]:
    """Run requests to their lengths and return what was reported, by request and row: the prompt's tokens, then the sampled."""
    scheduler = Scheduler(num_slots=SLOTS, prefill_budget=4096, mixed=False)
    found = {request.id: [[] for _ in request.prompts] for request in requests}
    counts: dict = {}
    for request in requests:
        scheduler.add(request)
    while plan := scheduler.next_plan():
        step = engine.submit(plan)
        if step.scoring is not None:
            assert sum(count for _, count in step.scoring.sequences) <= SCORED_TOKENS
            for sequence, tokens in step.scoring.collect():
                reported = found[sequence.request.id][sequence.index]
                reported += tokens
                if sequence.request.max_tokens == 0 and len(reported) == len(sequence.prompt) - 1:
                    scheduler.finish(sequence)
        for token in engine.collect(step):
            counts[token.sequence] = counts.get(token.sequence, 0) + 1
            if token.logprobs is not None:
                assert token.logprobs.id == token.id
                found[token.sequence.request.id][token.sequence.index].append(token.logprobs)
            if counts[token.sequence] == token.sequence.request.max_tokens:
                scheduler.finish(token.sequence)
    return found


@pytest.mark.parametrize("name", ["768", "4096"])
@torch.inference_mode()
def test_prompts_and_sampled_tokens_equal_the_reference(name):
    """PackedRows that score, rows that report and rows that do neither, in one batch; captured steps too."""
    engine = engine_of(name, SLOTS, [8, SLOTS])
    judge = Model(load(name, torch.float32))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, 4096, (length,), generator=generator).tolist() for length in (700, 1, 33, 500)]
    params = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0, ignore_eos=True, logprobs=3)
    plain = SamplingParams(temperature=0, ignore_eos=True)
    found = run(
        engine,
        [
            Request(id="scored", prompts=prompts, sampling=params, max_tokens=MAX_TOKENS, prompt_logprobs=3),
            Request(id="only scored", prompts=[prompts[0], [7]], sampling=params, max_tokens=0, prompt_logprobs=0),
            Request(id="plain", prompts=[prompts[3]] * 3, sampling=plain, max_tokens=MAX_TOKENS, loop="continuous"),
        ],
    )
    assert found["plain"] == [[], [], []]
    first = found["scored"][0][: len(prompts[0]) - 1]
    assert [token.logprob for token in found["only scored"][0]] == pytest.approx(
        [token.logprob for token in first], abs=TOLERANCE
    )
    assert found["only scored"][1] == []
    state, device = State(judge.weights.shape, 1, device="cuda"), torch.device("cuda:0")
    worst = 0.0
    for prompt, tokens in zip(prompts, found["scored"], strict=True):
        ids = [*prompt, *(token.id for token in tokens[len(prompt) - 1 :])]
        assert [token.id for token in tokens] == ids[1:]
        assert len(tokens) == len(prompt) - 1 + MAX_TOKENS
        state.clear([0])
        at = torch.arange(len(ids), device="cuda")
        logits = judge.forward(torch.tensor(ids, device="cuda"), PackedRows([0], [len(ids)], device), state, logits_of=at)
        end = torch.searchsorted(judge.weights.output_ids, 0)
        if judge.weights.output_ids[end] == 0:
            logits[len(prompt) - 1 :, end] = -torch.inf  # these rows ignore the end
        right = logits.log_softmax(-1).cpu()
        columns = torch.searchsorted(judge.weights.output_ids, torch.tensor(ids[1:], device="cuda")).cpu()
        for place, (token, column) in enumerate(zip(tokens, columns.tolist(), strict=True)):
            worst = max(worst, abs(token.logprob - float(right[place, column])))
            best = right[place].topk(3).values.tolist()
            worst = max(worst, *(abs(a - b) for (_, a), b in zip(token.top, best, strict=True)))
            assert all(a >= b for (_, a), (_, b) in itertools.pairwise(token.top))
    print(f"{name}: log-probabilities differ by at most {worst:.4f}")
    assert worst < TOLERANCE
