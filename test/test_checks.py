"""The checks of the command `check`: what they find in a small model here, and what they say of models that answer oddly."""

import json
import math
import os

import pytest
import torch
from models import tokenizer_for

from rwkv_batch.checks import checks
from rwkv_batch.checks.checks import CHECKS, table
from rwkv_batch.checks.lambada import read_passages
from rwkv_batch.checks.local import LocalTarget
from rwkv_batch.checks.remote import RemoteTarget
from rwkv_batch.checks.target import Scored, Written
from rwkv_batch.config import DEMO_FOLDER, Config
from rwkv_batch.errors import EngineFailed, UsageError
from rwkv_batch.model.packed_file import unpack
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.state import State
from rwkv_batch.server import check_command

PASSAGES = [
    "Once upon a time there was a little girl named Lily. She loved to play outside in the garden with her little dog",
    "The boy ran to the big tree. He wanted to climb the tree",
    "一 二 三",
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The built-in model in this process."""
    target = LocalTarget(Config(device="cpu", slots=4, state_db=str(tmp_path_factory.mktemp("checks") / "db")))
    yield target
    target.close()


@pytest.fixture(scope="module")
def passages(tmp_path_factory):
    """A tiny LAMBADA."""
    file = tmp_path_factory.mktemp("lambada") / "lambada.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES) + "\n")
    return str(file)


def logits_behind(demo: LocalTarget, ids: list[int]) -> torch.Tensor:
    """Log-probabilities behind each id [T, U], one token at a time."""
    model = demo._loop.engine.model
    state = State(model.weights.shape, 1)
    steps = [model.forward(torch.tensor([token]), PackedRows([0], [1]), state) for token in ids]
    return torch.cat(steps).log_softmax(1)


def test_lambada_is_what_a_slow_loop_finds(demo, passages):
    found = CHECKS["lambada"](demo, file=passages)
    columns = {token: column for column, token in enumerate(demo._loop.engine.model.weights.output_ids.tolist())}
    right, total = 0, 0.0
    for passage in read_passages(passages, demo.tokenizer):
        assert passage.before[0] == 0
        logprobs = logits_behind(demo, passage.before + passage.word[:-1])[-len(passage.word) :]
        wanted = torch.tensor([columns[token] for token in passage.word])
        right += bool((logprobs.argmax(1) == wanted).all())
        total += logprobs.gather(1, wanted[:, None]).sum().item()
    assert (found["passages"], found["right"]) == (3, right)
    assert 0 < right < 3, "otherwise this shows little"
    assert math.isclose(found["perplexity"], math.exp(-total / 3), rel_tol=1e-4)
    assert CHECKS["lambada"](demo, file=passages, lines=2)["passages"] == 2


@pytest.mark.long
def test_lambada_is_what_the_rwkv_package_finds(demo, passages, tmp_path):
    os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="0", RWKV_CUDA_ON="0")
    package = pytest.importorskip("rwkv.model", reason="needs the PyPI package rwkv")
    tensors = {key: tensor.float() for key, tensor in unpack(DEMO_FOLDER / "model.rwkv").items()}
    torch.save(tensors, tmp_path / "demo.pth")
    peer = package.RWKV(model=str(tmp_path / "demo"), strategy="cpu fp32")
    kept = demo._loop.engine.model.weights.output_ids  # the package also gives logits to ids that stand for nothing
    right, total = 0, 0.0
    for passage in read_passages(passages, demo.tokenizer):
        logits, state = peer.forward(list(passage.before), None)
        hits = []
        for token in passage.word:
            logprobs = logits[kept].log_softmax(0)
            column = int((kept == token).nonzero())
            hits.append(int(logprobs.argmax()) == column)
            total += logprobs[column].item()
            logits, state = peer.forward([token], state)
        right += all(hits)
    found = CHECKS["lambada"](demo, file=passages)
    assert found["right"] == right
    assert math.isclose(found["loss"], -total / 3, rel_tol=1e-4)


def test_next_tokens_are_the_likeliest(demo):
    found = CHECKS["next-token"](demo, prompt=["The apple can be"], top=4)["prompts"][0]["tokens"]
    logprobs = logits_behind(demo, demo.tokenizer.encode("The apple can be"))[-1]
    assert [entry["probability"] for entry in found] == pytest.approx(logprobs.topk(4).values.exp().tolist(), rel=1e-4)
    best = int(demo._loop.engine.model.weights.output_ids[logprobs.argmax()])
    assert found[0]["token"] == demo.tokenizer.decode([best])


def test_texts_are_greedy_without_noise_and_follow_the_seed_with_it(demo):
    def texts(**settings) -> list[str]:
        return [entry["text"] for entry in CHECKS["generate"](demo, prompt=["The", "我"], max_tokens=5, **settings)["texts"]]

    plain = texts(seed=None, noise=None)
    assert plain == texts(seed=5, noise=0.0)
    assert texts(seed=1, noise=3.0) == texts(seed=1, noise=3.0) != plain
    assert texts(seed=2, noise=3.0) != texts(seed=1, noise=3.0)


def test_questions_fill_a_file(demo, tmp_path):
    file = tmp_path / "answers.jsonl"
    found = CHECKS["questions"](demo, seed=None, noise=None, out=str(file), rows=6, max_tokens=5)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(6))
    assert {line["question"] for line in lines} <= set(checks.QUESTIONS)
    assert 6 <= found["tokens"] <= 30
    assert math.isclose(found["tokens_per_second"], found["tokens"] / found["seconds"])
    with pytest.raises(UsageError, match="cannot write"):
        CHECKS["questions"](demo, seed=None, noise=None, out=str(tmp_path / "none" / "file"))


def test_a_model_says_the_same_twice(demo):
    found = CHECKS["consistency"](demo, seed=None, rows=5, max_tokens=6)
    assert found["equal"]
    assert [run["difference"] for run in found["runs"]] == [None, None]


class OddTarget:
    """A model that says something else the second time; what it scores is given."""

    model, place = "odd", "nowhere"

    def __init__(self):
        self.num_draws = 0
        self.closed = False
        self.tokenizer = tokenizer_for(256)

    def likely(self, prompts, top):
        raise EngineFailed("it is broken")

    def write(self, prompts, *, max_tokens, noise, seed, stops):
        return Written(["x"] * len(prompts), ["stop"] * len(prompts), len(prompts), 0.0)

    def draw(self, prompts, *, max_tokens, seed):
        self.num_draws += 1
        rows = [["a", "b", "c"] for _ in prompts]
        if self.num_draws == 2:
            rows[1] = ["a", "B", "c"]
        if self.num_draws == 4:
            rows[2].pop()
        return rows

    def score(self, rows):
        return [[Scored(-1000.0, False)] * (len(row) - 1) for row in rows]

    def close(self):
        self.closed = True


def test_rows_that_part_are_named():
    found = CHECKS["consistency"](OddTarget(), seed=3, rows=4, max_tokens=3)
    assert not found["equal"]
    greedy, drawn = (run["difference"] for run in found["runs"])
    assert greedy == {"row": 1, "token": 1, "first": "b", "second": "B"}
    assert drawn == {"row": 2, "token": 2, "first": "c", "second": None}
    greedy_line, drawn_line = table("consistency", found)
    assert "row 1, token 1" in greedy_line
    assert "'c', then the end" in drawn_line


def test_a_word_that_cannot_come_leaves_no_number(passages):
    found = CHECKS["lambada"](OddTarget(), file=passages)
    assert (found["right"], found["perplexity"]) == (0, None)
    assert json.loads(json.dumps(found)) == found
    assert any("Perplexity" in line for line in table("lambada", found))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no lines"),
        (b"\n\n", "no lines"),
        (b"text\n", "line 1: not of the form"),
        (b'{"text": "a b"}\n{"txt": 1}\n', "line 2: not of the form"),
        (b'{"text": 5}\n', "line 1: not of the form"),
        (b'["a b"]\n', "line 1: not of the form"),
        (b'\n{"text": " alone "}\n', "line 2: a passage of one word"),
        (b'{"text": "\xff"}\n', "not UTF-8"),
        (b"[" * 100_000, "line 1: not of the form"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_lambada_is_refused_by_its_line(content, words, tmp_path):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_passages(str(file), tokenizer_for(256))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "NAME"),
        (["nonsense"], "invalid choice"),
        (["lambada"], "--file"),
        (["generate", "--top", "3"], "--top: the check generate"),
        (["next-token", "--top", "0"], "--top"),
        (["next-token", "--url", "ftp://x"], "--url"),
        (["next-token", "--url", "http://x:port"], "--url"),
        (["next-token", "--port", "70000"], "--port"),
    ],
)
def test_wrong_flags_end_it_with_2(argv, words, capsys):
    assert check_command.check_model(argv, {}, []) == 2
    assert words in capsys.readouterr().err


def test_a_server_that_is_not_there_ends_it_with_70(capsys):
    assert check_command.check_model(["generate", "--url", "127.0.0.1:9"], {}, []) == 70
    assert "127.0.0.1:9" in capsys.readouterr().err


@pytest.fixture
def odd(monkeypatch):
    """The command checks an odd model."""
    target = OddTarget()
    monkeypatch.setattr(check_command, "RemoteTarget", lambda *args: target)
    return target


def test_the_exit_code_tells_what_was_found(odd, tmp_path, capsys):
    def run(*argv: str) -> int:
        return check_command.check_model([*argv, "--url", "x"], {}, [])

    assert run("questions", "--rows", "2", "--out", str(tmp_path / "out"), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["check"], told["model"], told["rows"], told["noise"], told["seed"]) == ("questions", "odd", 2, 3.0, 42)
    assert run("questions", "--out", str(tmp_path / "out"), "--noise", "1", "--seed", "9", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["noise"], told["seed"]) == (128, 1.0, 9)
    assert run("consistency", "--rows", "4") == 1
    assert "row 1, token 1" in capsys.readouterr().out
    assert run("next-token") == 70
    assert "broken" in capsys.readouterr().err
    assert odd.closed


def test_the_command_loads_a_model_itself(monkeypatch, capsys):
    monkeypatch.setattr(check_command, "begin", lambda config: config)  # would settle how this process logs
    assert (
        check_command.check_model(["generate", "--device", "cpu", "--prompt", "The", "--max-tokens", "3", "--json"], {}, [])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["place"]) == ("demo", "cpu")
    assert told["texts"][0]["prompt"] == "The"


def test_the_url_may_be_that_of_its_api():
    for url, base in (("http://h:1/v1", ""), ("https://h/a/v1/", "/a"), ("h:1", "")):
        target = RemoteTarget(url, model="m")
        assert (target._base, target.model) == (base, "m")
