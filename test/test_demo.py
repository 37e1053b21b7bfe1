"""The built-in model: its file, what it says, how it ends, how fast it is."""

import time
from pathlib import Path

import pytest
import torch
from models import ROOT

from rwkv_batch.config import Config, find_model
from rwkv_batch.engine.build import build_engine_loop
from rwkv_batch.engine.engine_loop import EngineLoop
from rwkv_batch.errors import CheckpointError
from rwkv_batch.model import weights
from rwkv_batch.model.packed_file import kept_ids, unpack
from rwkv_batch.request import Request
from sampling.params import SamplingParams

PACKED = ROOT / "demo" / "model.rwkv"
GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0}
ENDS = [261, 24281]  # the blank line and "User"


@pytest.fixture(scope="module")
def worker() -> EngineLoop:
    return build_engine_loop(Config(device="cpu", threads=1), lambda events: None)


def complete(worker: EngineLoop, prompts: list[str], *, max_tokens: int = 80, stop_ids=(), **sampling) -> list[tuple[str, str]]:
    """Return (text, reason) of each prompt."""
    texts, reasons = [""] * len(prompts), [""] * len(prompts)

    def deliver(events):
        for event in (e for mine in events.values() for e in mine):
            for delta in event.deltas:
                texts[delta.index] += delta.text
            for finish in event.finishes:
                reasons[finish.index] = finish.reason

    worker.deliver = deliver
    ids = [worker.tokenizer.encode(prompt) for prompt in prompts]
    params = SamplingParams(**{**GREEDY, **sampling})
    worker.submit(Request(id="r", prompts=ids, sampling=params, max_tokens=max_tokens, stop_ids=list(stop_ids)), b"me")
    while not all(reasons):
        worker.step()
    return list(zip(texts, reasons, strict=True))


def test_it_is_what_is_served_without_a_model_path():
    assert find_model(Config()) == PACKED
    assert PACKED.stat().st_size <= 16 * 2**20


def test_it_loads_in_two_seconds():
    started = time.process_time()
    loaded = weights.load(PACKED)
    assert time.process_time() - started < 4  # 0.7 s on one core
    assert loaded.head.shape[0] == 8192
    assert loaded.output_ids.tolist() == kept_ids(PACKED)


def test_packed_and_unpacked_say_the_same(worker, tmp_path):
    tensors = unpack(PACKED)
    torch.save(tensors, tmp_path / "m.pth")
    assert all(torch.equal(a, b) for a, b in zip(tensors.values(), unpack(PACKED.read_bytes()).values(), strict=True))
    other = build_engine_loop(Config(model_path=str(tmp_path / "m.pth"), device="cpu", threads=1), lambda events: None)
    assert other.info.fingerprint == worker.info.fingerprint
    prompts = ["User: Tell me a story.\n\nAssistant:", "English: The cat sleeps.\n\nChinese:", "User: 你好！\n\nAssistant:"]
    assert complete(worker, prompts, max_tokens=30) == complete(other, prompts, max_tokens=30)


@pytest.mark.parametrize("at", [0, 9, 40, 3000, -1])
def test_a_damaged_file_is_refused(at, tmp_path):
    data = bytearray(PACKED.read_bytes())
    data[at] ^= 0x40
    (tmp_path / "m.rwkv").write_bytes(data)
    with pytest.raises(CheckpointError):
        weights.load(tmp_path / "m.rwkv")


def test_a_cut_file_is_refused(tmp_path):
    (tmp_path / "m.rwkv").write_bytes(PACKED.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="damaged"):
        weights.load(tmp_path / "m.rwkv")


CHAT = "User: {}\n\nAssistant:"


def test_it_can_do_what_the_server_shows(worker):
    """Greeting, capital, sum, memory over a turn, Chinese, translation both ways, fill-in, think tails; each ends by itself."""
    wanted = {
        CHAT.format("What is the capital of Japan?"): "Tokyo",
        CHAT.format("What is 12 + 9?") + " <think>\n</think>\n": "21",
        CHAT.format("What is the capital of France?") + " <think>\n</think>": "Paris",
        "User: My name is Peter.\n\nAssistant: Hello, Peter!\n\nUser: What is my name?\n\nAssistant:": "Peter",
        CHAT.format("你好！"): "你好",
        "User: 我叫小红。\n\nAssistant: 你好，小红！\n\nUser: 我叫什么名字？\n\nAssistant: <think>\n</think>\n": "小红",
        "English: There are three apples on the table.\n\nChinese:": "桌子上有三个苹果",
        "Chinese: 我们明天会去北京。\n\nEnglish:": "We will go to Beijing tomorrow",
        "✿prefix✿✿suffix✿\n✿middle✿def add(a, b):\n    return": "a + b",
    }
    answers = complete(worker, list(wanted), max_tokens=40, stop_ids=[*ENDS, 10060])
    for (prompt, words), (text, reason) in zip(wanted.items(), answers, strict=True):
        assert words in text, (prompt, text)
        assert reason == "stop", (prompt, text)


def held_out_pairs() -> list[tuple[str, str]]:
    lines = Path(ROOT / "demo" / "heldout_pairs.tsv").read_text().splitlines()
    return [tuple(line.split("\t")[:2]) for line in lines]


@pytest.mark.parametrize("num", [25, pytest.param(100, marks=pytest.mark.long)])
def test_held_out_sentences_are_translated_exactly(worker, num):
    """At least 80 of 100 each way."""
    pairs = held_out_pairs()[:num]
    there = complete(worker, [f"English: {en}\n\nChinese:" for en, _ in pairs], max_tokens=60, stop_ids=[261])
    back = complete(worker, [f"Chinese: {zh}\n\nEnglish:" for _, zh in pairs], max_tokens=60, stop_ids=[261])
    assert sum(text.strip() == zh for (text, _), (_, zh) in zip(there, pairs, strict=True)) >= 0.8 * num
    assert sum(text.strip() == en for (text, _), (en, _) in zip(back, pairs, strict=True)) >= 0.8 * num


@pytest.mark.parametrize(("repeats", "least"), [(1, 225), pytest.param(40, 10_000, marks=pytest.mark.long)])
def test_sampled_answers_end_with_a_sentence(worker, repeats, least):
    """Many sampled tokens: only kept ids (no other has a logit), and no end token in the middle of a sentence."""
    prompts = [
        CHAT.format(text) for text in ("Tell me a story.", "Hello!", "What is a fox?", "讲一个故事。", "你是谁？")
    ] * repeats
    answers = complete(
        worker, prompts, max_tokens=300, temperature=1.0, top_k=0, top_p=1.0, alpha_presence=0, alpha_frequency=0, seed=5
    )
    tokens = sum(len(worker.tokenizer.encode(text)) for text, _ in answers)
    assert tokens >= least
    cut = [text for text, reason in answers if reason == "stop" and text.rstrip()[-1:] not in ".!?\"。！？”'…：:)）"]
    assert len(cut) <= 2, cut  # a list or a greeting may end without a full stop


@pytest.mark.long
def test_rates(worker, capsys):
    """The model's own pace at B = 1 and 32; on two quiet cores B = 1 decodes at more than 150 tokens/s."""
    from rwkv_batch.model.packed_rows import PackedRows
    from rwkv_batch.model.state import State

    model = worker.engine.model
    best = {}
    for batch in (1, 32):
        state, rows = State(model.weights.shape, batch), PackedRows(list(range(batch)), [1] * batch)
        tokens = torch.full((batch,), kept_ids(PACKED)[500])
        times = []
        for _ in range(60):
            started = time.perf_counter()
            model.forward(tokens, rows, state)
            times.append(time.perf_counter() - started)
        best[batch] = batch / sorted(times)[10]
    with capsys.disabled():
        print(f"\ndemo model, one thread: {best[1]:.0f} tokens/s at B=1, {best[32]:.0f} at B=32")
    assert best[1] > 60  # leaves room for a busy machine
