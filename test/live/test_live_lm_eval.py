"""lm-evaluation-harness against a live server: its numbers are those of the model in this process. Run by `make test-lm-eval`,
which has the harness in an environment of its own, and instructor with it; LM_EVAL names the harness's program.
"""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from server_process import ROOT, ServerProcess

from rwkv_batch.engine.build import valid_ids
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.text import prompts
from rwkv_batch.text.prompts import Turn
from rwkv_batch.text.tokenizer import for_vocab

pytestmark = [pytest.mark.lm_eval, pytest.mark.timeout(900)]

LM_EVAL = os.environ.get("LM_EVAL", "lm_eval")
TASKS = ROOT / "test" / "eval_tasks"
DEMO = ROOT / "demo" / "model.rwkv"
WINDOW = 96  # tokens of one request of the harness: the longer texts take several
TOLERANCE = 1e-3
MODES = {
    "text": ("local-completions", "/v1/completions", "tokenized_requests=False"),
    "ids": ("local-completions", "/openai/v1/completions", "tokenized_requests=True", "--batch_size=4"),
    "chat template": ("rwkv-completions", "/v1/completions", "tokenized_requests=False", "--apply_chat_template"),
}


class Scorer:
    """The model in plain torch."""

    def __init__(self):
        weights = weights_module.load(DEMO, valid_ids=lambda vocab_size: valid_ids(for_vocab(vocab_size)))
        self.model = Model(weights)
        self.tokenizer = for_vocab(weights.shape.vocab_size)
        self.encode = self.tokenizer.encode
        self.output_ids = weights.output_ids.tolist()
        self.columns = {token: column for column, token in enumerate(self.output_ids)}

    def logprobs(self, ids: list[int]) -> list[float]:
        """Of each token behind the first."""
        logits = self.model.forward(
            torch.tensor(ids), PackedRows([0], [len(ids)]), State(self.model.weights.shape, 1), logits_of=torch.arange(len(ids))
        )
        values = logits.float().log_softmax(-1)
        return [float(values[place, self.columns[token]]) for place, token in enumerate(ids[1:])]

    def greedy(self, prompt: str, count: int) -> str:
        """The likeliest text behind a prompt, up to the end token or a next turn."""
        state, ids, fed = State(self.model.weights.shape, 1), [], self.encode(prompt)
        while len(ids) < count:
            logits = self.model.forward(torch.tensor(fed), PackedRows([0], [len(fed)]), state)
            fed = [self.output_ids[int(logits[0].argmax())]]
            if fed == [0]:
                break
            ids += fed
        return self.tokenizer.decode(ids).partition("\nUser:")[0]

    def continuation(self, context: str, text: str) -> float:
        """How likely `text` is behind `context`, whose blanks and newlines at the end the harness counts as its own."""
        ids = self.encode(context + text)
        return sum(self.logprobs(ids)[len(self.encode(context.rstrip())) - 1 :])

    def whole(self, text: str) -> float:
        """How likely a text is behind the end token, in windows as the harness cuts them."""
        ids = self.encode(text)
        most = WINDOW - 2  # the harness keeps one for a token to generate, and one for what stands before the window
        total, done = sum(self.logprobs([0, *ids[:most]])), most
        while done < len(ids):
            end = min(len(ids), done + most)
            total += sum(self.logprobs(ids[max(0, end - most - 1) : end])[-(end - done) :])
            done = end
        return total


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the harness runs: the data of the tasks."""
    folder = tmp_path_factory.mktemp("lm_eval")
    pairs = [line.split("\t") for line in (ROOT / "demo" / "heldout_pairs.tsv").read_text(encoding="utf-8").splitlines()]
    dice = random.Random(0)
    with (folder / "choices.jsonl").open("w") as file:
        for english, chinese in pairs[:5]:
            choices = [chinese, *dice.sample([other for _, other in pairs if other != chinese], 3)]
            dice.shuffle(choices)
            file.write(json.dumps({"english": english, "choices": choices, "label": choices.index(chinese)}) + "\n")
    english, chinese = (" ".join(pair[side] for pair in pairs[:20]) for side in (0, 1))
    texts = [
        pairs[0][0],
        english,
        chinese,
        "\n".join("\n\n".join(pair) for pair in pairs[40:50]),
        " She is a driver.",
        f"\n\n{pairs[0][0]}\n",
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="module")
def demo_server(folder):
    with ServerProcess("--http-workers", "1", folder=folder, model=DEMO) as running:
        yield running


def evaluate(server: ServerProcess, folder: Path, tasks: str, model: str, path: str, *more: str) -> dict[str, list[dict]]:
    """Run the harness; returns the samples of each task, in the order of the data."""
    if not shutil.which(LM_EVAL):
        pytest.skip("lm_eval is not installed; make test-lm-eval does that")
    program = [LM_EVAL]
    if model == "rwkv-completions":
        program = [str(Path(shutil.which(LM_EVAL)).with_name("python")), str(TASKS / "run.py")]
    args = [f"base_url=http://127.0.0.1:{server.port}{path}", "model=demo", "num_concurrent=4", f"max_length={WINDOW}"]
    args += [text for text in more if not text.startswith("--")]
    out = Path(folder, "out", str(len(list(folder.glob("out/*")))))
    offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    command = [
        *program, "--model", model, "--model_args", ",".join(args), "--tasks", tasks, "--include_path", str(TASKS),
        "--output_path", str(out), "--log_samples", *(text for text in more if text.startswith("--")),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for task in tasks.split(","):
        (file,) = out.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        found[task] = sorted(samples, key=lambda sample: sample["doc_id"])
    return found


@pytest.mark.parametrize("mode", MODES)
def test_choices_and_texts_are_as_likely_as_in_this_process(demo_server, folder, scorer, mode):
    tasks = "heldout_choices" if "--apply_chat_template" in MODES[mode] else "heldout_choices,heldout_rolling"
    found = evaluate(demo_server, folder, tasks, *MODES[mode])
    for sample in found["heldout_choices"]:
        pairs = [(arguments["arg_0"], arguments["arg_1"]) for _, arguments in sorted(sample["arguments"].items())]
        assert len(pairs) == 4
        assert ("User: English:" in pairs[0][0]) == ("chat" in mode)
        for (context, text), answer in zip(pairs, sample["resps"], strict=True):
            assert float(answer[0][0]) == pytest.approx(scorer.continuation(context, text), abs=TOLERANCE)
    for sample in found.get("heldout_rolling", ()):
        text = sample["doc"]["text"]
        assert float(sample["resps"][0][0]) == pytest.approx(scorer.whole(text), abs=TOLERANCE), text


@pytest.mark.parametrize(
    "mode",
    [("local-chat-completions", "/v1/chat/completions"), ("rwkv-completions", "/v1/completions", "tokenized_requests=False")],
)
def test_chats_are_answered_greedily(demo_server, folder, scorer, mode):
    """What temperature 0 gives is the likeliest token at each place, as the model in this process finds it."""
    found = evaluate(demo_server, folder, "heldout_generate", *mode, "--apply_chat_template")
    for sample in found["heldout_generate"]:
        said = Turn("user", f"English: {sample['doc']['english']}\n\nChinese:")
        prompt = prompts.conversation([said], prompts.chat_tail(think=False))
        assert sample["resps"][0][0] == scorer.greedy(prompt, 24).partition("\n")[0]


def test_instructor_gets_what_it_asks_for(demo_server):
    if not shutil.which(LM_EVAL):
        pytest.skip("instructor is not installed; make test-lm-eval does that")
    python = Path(shutil.which(LM_EVAL)).with_name("python")
    command = [str(python), str(ROOT / "test" / "live" / "instructor_check.py"), f"http://127.0.0.1:{demo_server.port}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("right\n"), done.stderr[-4000:]
