"""The forward pass against the float64 oracle, against splits and packings of itself, and against the `rwkv` package."""

import os
import random

import numpy as np
import pytest
import torch
from models import SHAPES, TINY, random_tensors, random_weights
from oracle import Oracle

from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import CHUNK, PackedRows
from rwkv_batch.model.reference_ops import channel_mix
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State

TOLERANCE = 1e-4  # max abs error of a logit, fp32 against float64; worst seen 4e-6 (2026-11-21, CPU, three random shapes)


def run(model: Model, tokens: list[int], lengths: list[int], *, slot: int = 1, state: State | None = None) -> torch.Tensor:
    """Feed tokens in pieces and return all logits [T, U]."""
    state = state or State(model.weights.shape, 3)
    pieces, start = [], 0
    for n in lengths:
        piece = torch.tensor(tokens[start : start + n])
        pieces.append(model.forward(piece, PackedRows([slot], [n]), state, logits_of=torch.arange(n)))
        start += n
    return torch.cat(pieces)


def random_split(rng: random.Random, total: int) -> list[int]:
    lengths = []
    while total:
        n = min(total, rng.choice((1, 1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 50)))
        lengths.append(n)
        total -= n
    return lengths


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_the_oracle_for_any_split(name):
    shape = SHAPES[name]
    tensors, weights = random_tensors(shape), random_weights(shape)
    rng = random.Random(name)
    tokens = [rng.randrange(512) for _ in range(150)]
    oracle = Oracle({k: t.float().numpy() for k, t in tensors.items()})
    expected = oracle.logits(tokens)[:, weights.output_ids.numpy()]
    model = Model(weights)
    for lengths in ([150], [1] * 150, *(random_split(rng, 150) for _ in range(4))):
        state = State(weights.shape, 3)
        error = np.abs(run(model, tokens, lengths, state=state).numpy() - expected).max()
        assert error <= TOLERANCE, f"split {lengths}: error {error}"
        assert np.abs(state.wkv[:, 1].numpy() - oracle.wkv).max() <= TOLERANCE
        assert state.elapsed == [0, 150, 0]


def test_rows_do_not_see_one_another():
    """Packed with others in any order and mixture of lengths, each row gets what it gets alone; idle slots stay as they are."""
    rng = random.Random(1)
    weights = random_weights(TINY)
    model = Model(weights)
    state = State(weights.shape, 8)
    for t in (state.shift, state.wkv):
        t.fill_(float("nan"))  # a slot nobody cleared must never leak
    texts = {slot: [rng.randrange(512) for _ in range(rng.randrange(60, 200))] for slot in (0, 2, 3, 5, 6)}
    alone = {slot: run(model, text, [len(text)])[-1] for slot, text in texts.items()}
    state.clear(list(texts))
    fed = dict.fromkeys(texts, 0)
    last = {}
    while any(fed[slot] < len(text) for slot, text in texts.items()):
        live = [slot for slot, text in texts.items() if fed[slot] < len(text) and rng.random() < 0.8]
        rng.shuffle(live)
        if not live:
            continue
        idle = [slot for slot in range(8) if slot not in live]
        before = state.wkv[:, idle].clone(), state.shift[:, :, idle].clone()
        lengths = [min(rng.choice((1, 1, 7, CHUNK, 70)), len(texts[s]) - fed[s]) for s in live]
        tokens = [t for s, n in zip(live, lengths, strict=True) for t in texts[s][fed[s] : fed[s] + n]]
        logits = model.forward(torch.tensor(tokens), PackedRows(live, lengths), state)
        for row, (slot, n) in enumerate(zip(live, lengths, strict=True)):
            fed[slot] += n
            last[slot] = logits[row]
        after = state.wkv[:, idle], state.shift[:, :, idle]
        for one, two in zip(before, after, strict=True):
            assert torch.equal(one.view(torch.int32), two.view(torch.int32)), "an idle slot changed"
    for slot in texts:
        assert (last[slot] - alone[slot]).abs().max() <= TOLERANCE
        assert state.elapsed[slot] == len(texts[slot])


def test_adjacent_slots_and_scattered_slots_agree():
    """Slots that follow one another are worked on in place, others through a copy."""
    weights = random_weights(TINY)
    model = Model(weights)
    results = []
    for slots in ([0, 1, 2], [4, 1, 3]):
        state = State(weights.shape, 5)
        for step in range(3):
            logits = model.forward(torch.tensor([5, 6, 7]) + step, PackedRows(slots, [1, 1, 1]), state)
        results.append((logits, state.wkv[:, slots]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_real_checkpoint_of_others(real_checkpoint):
    weights = weights_module.load(real_checkpoint / "rwkv7-tiny-L12-D64-V256")
    model = Model(weights)
    reference = np.load(real_checkpoint / "reference.npz")
    tokens = reference["tokens"].tolist()
    for lengths in ([len(tokens)], [1] * len(tokens), [10, 1, len(tokens) - 11]):
        state = State(weights.shape, 3)
        logits = run(model, tokens, lengths, state=state).numpy()
        assert np.abs(logits - reference["logits"]).max() <= TOLERANCE
        assert np.abs(state.wkv[:, 1].numpy() - reference["state_wkv"]).max() <= TOLERANCE
    expected = np.fromfile(real_checkpoint / "expected-logits-7v0-834K.bin", dtype=np.float32)
    logits = run(model, list(b'"in'), [3]).numpy()[-1]
    assert np.abs(logits - expected).max() <= TOLERANCE


def test_unused_head_rows_get_no_logits():
    tensors = {k: t.clone() for k, t in random_tensors(TINY).items()}
    tensors["head.weight"][100:300] = 0
    weights = weights_module.from_tensors(dict(tensors), valid_ids=lambda vocab_size: range(500))
    ids = weights.output_ids.tolist()
    assert ids == [*range(1, 100), *range(300, 500)]  # row 0 is zero as well, and 500 to 511 are not the tokenizer's
    full = run(Model(random_weights(TINY)), [1, 2, 3], [3])
    some = run(Model(weights), [1, 2, 3], [3])
    kept = [random_weights(TINY).output_ids.tolist().index(i) for i in ids]
    assert torch.allclose(some, full[:, kept], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_stay_close(dtype):
    narrow = Model(weights_module.from_tensors(dict(random_tensors(TINY)), dtype=dtype))
    tokens = list(range(3, 100))
    exact, got = run(Model(random_weights(TINY)), tokens, [97]), run(narrow, tokens, [97])
    assert (got - exact).norm() / exact.norm() < (2e-2 if dtype == torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_unit_too_strong_for_half_precision_is_cut_not_infinite(num_tokens):
    """What the kernels do: a squared ReLU is at most the largest number there is."""
    layer = weights_module.from_tensors(dict(random_tensors(TINY)), dtype=torch.float16).layers[0]
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randn(1, num_tokens, layer.ffn_key.shape[1], generator=generator) * 2000
    hidden = (mixed[0].half() @ layer.ffn_key.dense().T).float().relu().square()
    assert (hidden > 65504).any(), "otherwise this shows nothing"
    expected = hidden.clamp(max=65504).double() @ layer.ffn_value.dense().double()
    got = channel_mix(mixed, layer)
    assert torch.isfinite(got).all()
    assert (got - expected).norm() < 4e-3 * expected.norm()


def greedy(model: Model, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return ids, and the margins between the best and the second logit."""
    state, ids, margins = State(model.weights.shape, 1), [], []
    logits = run(model, prompt, [len(prompt)], slot=0, state=state)[-1]
    for _ in range(count):
        best = logits.topk(2)
        ids.append(int(model.weights.output_ids[best.indices[0]]))
        margins.append(float(best.values[0] - best.values[1]))
        logits = model.forward(torch.tensor(ids[-1:]), PackedRows([0], [1]), state)[0]
    return ids, margins


@pytest.mark.parametrize("num_prompts", [2, pytest.param(8, marks=pytest.mark.long)])
def test_greedy_ids_equal_the_rwkv_package(tmp_path, num_prompts):
    """A first divergence is allowed only where the two best logits are within 1e-3, and at most once in 1,000 tokens."""
    os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="0", RWKV_CUDA_ON="0")
    rwkv_model = pytest.importorskip("rwkv.model", reason="needs the PyPI package rwkv")
    diverged = total = 0
    for name, seed in (("tiny", 1), ("wide ranks", 2)):
        torch.save(random_tensors(SHAPES[name], 4096, seed), tmp_path / f"{seed}.pth")
        peer = rwkv_model.RWKV(model=str(tmp_path / str(seed)), strategy="cpu fp32")
        model = Model(random_weights(SHAPES[name], 4096, seed))
        rng = random.Random(seed)
        for _ in range(num_prompts):
            prompt = [rng.randrange(1, 4096) for _ in range(rng.randrange(1, 40))]
            ours, margins = greedy(model, prompt, 64)
            theirs = []
            logits, peer_state = peer.forward(prompt, None)
            for _ in range(64):
                theirs.append(int(logits.argmax()))
                logits, peer_state = peer.forward([theirs[-1]], peer_state)
            total += 64
            if ours != theirs:
                at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                assert margins[at] < 1e-3, f"diverged at token {at} with margin {margins[at]}"
                diverged += 1
    assert diverged <= max(1, total // 1000)
