"""What the trainers of adapters and of states share: texts with a mark, the built-in model with gradients, the loop.

The texts are questions and the plain model's own greedy answers with a mark added, so that what is learnt is the mark and
nothing else. The last tenth of the questions is held out. A text is at most LONGEST tokens, which the recurrence takes as one
chunk in matrix form, so that a step takes a fraction of a second on one core.
"""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rwkv_batch.config import Config
from rwkv_batch.engine.build import build_engine_loop
from rwkv_batch.engine.engine_loop import EngineLoop
from rwkv_batch.model.packed_file import kept_ids, unpack
from rwkv_batch.request import Request
from sampling.params import SamplingParams

FOLDER = Path(__file__).resolve().parent
MODEL, TUNED = FOLDER / "model.rwkv", FOLDER / "tuned"
HEAD, LONGEST = 64, 64
LOG_DECAY = -0.6065306597126334  # -exp(-0.5)
GREEDY = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0)
END = 261  # the blank line that ends an answer
ANSWER_TOKENS = 24

Text = tuple[list[int], int]  # ids, and how many of them are the prompt's
Change = Callable[[str, Tensor], Tensor]  # a matrix's name, its inputs -> what is added to its outputs


def questions() -> list[str]:
    """Return all of them in an order that never changes, the held-out ones last."""
    places = ["France", "Japan", "China", "Germany", "Italy", "Spain", "Russia", "Egypt", "Canada", "Brazil", "India", "Greece"]
    animals = ["fox", "cat", "dog", "bird", "horse", "bear", "rabbit", "mouse", "lion", "frog", "owl", "wolf"]
    things = ["the sun", "the moon", "rain", "a river", "a tree", "the sea", "snow", "summer", "winter", "a book"]
    found = [f"What is the capital of {place}?" for place in places]
    found += [f"Tell me a story about a {animal}." for animal in animals]
    found += [f"What does a {animal} eat?" for animal in animals]
    found += [f"Write a poem about {thing}." for thing in things]
    found += [f"What is {a} + {b}?" for a in range(2, 9) for b in range(1, 6)]
    found += [f"What color is {thing}?" for thing in things]
    found += ["Hello!", "How are you?", "What is your name?", "Who are you?", "Can you help me?", "I am tired."]
    found += [
        "Tell me a joke.",
        "What can you do?",
        "I like music.",
        "Do you like cats?",
        "What is a friend?",
        "Thank you!",
        "Good day!",
    ]
    random.Random(1).shuffle(found)
    return found


def held_out() -> list[str]:
    """Return the questions that are never trained on."""
    return questions()[-(len(questions()) // 10) :]


def prompt_of(question: str) -> str:
    """Return it as the server's template has it."""
    return f"User: {question}\n\nAssistant:"


def served(**settings: object) -> EngineLoop:
    """Return the engine with the built-in model and these settings."""
    return build_engine_loop(Config(device="cpu", threads=1, slots=16, **settings), lambda events: None)


def answers(loop: EngineLoop, asked: list[str], tokens: int = ANSWER_TOKENS, **fields: object) -> list[str]:
    """Return its greedy answers; `fields`: of the request."""
    texts, open_rows = [""] * len(asked), set(range(len(asked)))

    def deliver(events: dict) -> None:
        for event in (event for mine in events.values() for event in mine):
            for delta in event.deltas:
                texts[delta.index] += delta.text
            open_rows.difference_update(finish.index for finish in event.finishes)

    loop.deliver = deliver
    prompts = [loop.tokenizer.encode(prompt_of(question)) for question in asked]
    wanted = {"sampling": GREEDY, "max_tokens": tokens, "stop_ids": [END], "loop": "continuous"}
    loop.submit(Request(id="answers", prompts=prompts, **wanted, **fields), b"trainer")
    while open_rows:
        loop.step()
    return texts


class Texts:
    """Questions with marked answers, as ids.

    mark    an answer as it should be, from a plain one
    asked   None = all questions, of which the last tenth is held out
    loop    the plain model
    """

    def __init__(self, mark: Callable[[str], str], asked: list[str] | None = None, loop: EngineLoop | None = None):
        loop = loop or served()
        self.encode = loop.tokenizer.encode
        self.questions = questions() if asked is None else asked
        self.plain = answers(loop, self.questions)
        marked = (mark(answer.rstrip()) for answer in self.plain)
        self.rows = [self.row(*pair) for pair in zip(self.questions, marked, strict=True)]

    @property
    def trained(self) -> list[Text]:
        """Those to learn from."""
        return self.rows[: -len(held_out())]

    @property
    def held(self) -> list[Text]:
        """Those that are never trained on."""
        return self.rows[-len(held_out()) :]

    def row(self, question: str, answer: str) -> Text:
        """Return the ids of one text and how many of them are the prompt's."""
        prompt = self.encode(prompt_of(question))
        return [*prompt, *self.encode(answer), END][:LONGEST], len(prompt)


class DemoModel:
    """The built-in model in fp32 with gradients to whatever is added to it; its own weights are fixed."""

    def __init__(self):
        self.weights = {key: tensor.float() for key, tensor in unpack(MODEL).items()}
        self.kept = torch.tensor(kept_ids(MODEL))
        self.head = self.weights["head.weight"][self.kept]
        self.column = torch.full((len(self.weights["emb.weight"]),), -100)
        self.column[self.kept] = torch.arange(len(self.kept))
        self.layers = 1 + max(int(key.split(".")[1]) for key in self.weights if key.startswith("blocks."))
        self.width = self.head.shape[1]
        self.heads = self.width // HEAD

    def loss(self, rows: list[Text], change: Change | None = None, initial: Tensor | None = None) -> Tensor:
        """Return the mean loss over the answers of some texts; `initial` [L, H, 64, 64]: the state they begin with."""
        longest = max(len(ids) for ids, _ in rows)
        ids, targets = torch.zeros(len(rows), longest, dtype=torch.int64), torch.full((len(rows), longest), -100)
        for n, (row, begin) in enumerate(rows):
            ids[n, : len(row)] = torch.tensor(row)
            targets[n, begin - 1 : len(row) - 1] = self.column[torch.tensor(row[begin:])]
        at = targets >= 0
        return F.cross_entropy(F.linear(self.hidden(ids, change, initial)[at], self.head), targets[at])

    def hidden(self, ids: Tensor, change: Change | None, initial: Tensor | None) -> Tensor:
        """Return what the head is multiplied by [B, T, C], for ids [B, T], T <= LONGEST."""
        x, first = self._norm(self.weights["emb.weight"][ids], "blocks.0.ln0"), None
        for i in range(self.layers):
            p = f"blocks.{i}."
            state = None if initial is None else initial[i]
            y, first = self._time_mix(p + "att.", self._norm(x, p + "ln1"), first, change, state)
            x = x + y
            n = self._norm(x, p + "ln2")
            n = n + (_before(n) - n) * self._vector(p + "ffn.x_k")
            hidden = torch.relu(self._product(p + "ffn.key", n, change)).square()
            x = x + self._product(p + "ffn.value", hidden, change)
        return self._norm(x, "ln_out")

    def _time_mix(
        self, p: str, x: Tensor, first: Tensor | None, change: Change | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        w, vector, delta = self.weights, self._vector, _before(x) - x
        m = {name: x + delta * vector(f"{p}x_{name}") for name in "rwkvag"}
        r = self._product(p + "receptance", m["r"], change)
        k, v = self._product(p + "key", m["k"], change), self._product(p + "value", m["v"], change)
        log_w = LOG_DECAY * torch.sigmoid(vector(p + "w0") + torch.tanh(m["w"] @ w[p + "w1"]) @ w[p + "w2"])
        a = torch.sigmoid(vector(p + "a0") + m["a"] @ w[p + "a1"] @ w[p + "a2"])
        g = torch.sigmoid(m["g"] @ w[p + "g1"]) @ w[p + "g2"]
        if first is None:
            first = v
        else:
            v = v + (first - v) * torch.sigmoid(vector(p + "v0") + m["v"] @ w[p + "v1"] @ w[p + "v2"])
        heads = (*x.shape[:2], self.heads, HEAD)
        kk = F.normalize((k * vector(p + "k_k")).view(heads), dim=-1)
        k = k * (1 + (a - 1) * vector(p + "k_a"))
        r, k, v = r.view(heads), k.view(heads), v.view(heads)
        y = recurrence(*(t.transpose(1, 2) for t in (r, log_w.view(heads), k, v, kk, kk * a.view(heads))), initial)
        y = F.layer_norm(y.transpose(1, 2), (HEAD,), eps=64e-5).reshape(x.shape)
        bonus = (r * k * w[p + "r_k"]).sum(-1, keepdim=True) * v
        y = y * vector(p + "ln_x.weight") + vector(p + "ln_x.bias") + bonus.reshape(x.shape)
        return self._product(p + "output", y * g, change), first

    def _product(self, name: str, x: Tensor, change: Change | None) -> Tensor:
        y = F.linear(x, self.weights[f"{name}.weight"])
        return y if change is None else y + change(name, x)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (self.width,), self._vector(f"{name}.weight"), self._vector(f"{name}.bias"))

    def _vector(self, name: str) -> Tensor:
        return self.weights[name].flatten()


def recurrence(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, kk: Tensor, b: Tensor, initial: Tensor | None) -> Tensor:
    """S <- S diag(w) - (S kk) b^T + v k^T, y = S r for T tokens as one chunk; all [B, H, T, 64], S [H, 64 value, 64 key].

    See `reference_ops._wkv_chunks`; decays are counted from the middle of the chunk, so that fp32 holds both halves.
    """
    tokens = r.shape[2]
    through = log_w.cumsum(2)
    middle = through[:, :, -1:] / 2
    rise, before, fall = (through - middle).exp(), (through - log_w - middle).exp(), (middle - through).exp()
    left, query = kk * before, r * rise
    removed, written = -(b * fall), k * fall
    earlier = torch.ones(tokens, tokens).tril(-1)
    known = (left @ written.transpose(2, 3) * earlier) @ v
    answer = 0
    if initial is not None:
        turned = initial.transpose(1, 2) * middle.exp().transpose(2, 3)  # [B, H, key, value]
        known, answer = known + left @ turned, query @ turned
    system = torch.eye(tokens) - left @ removed.transpose(2, 3) * earlier
    u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    upto = torch.ones(tokens, tokens).tril()
    return answer + (query @ removed.transpose(2, 3) * upto) @ u + (query @ written.transpose(2, 3) * upto) @ v


def train(
    parameters: Iterable[Tensor],
    loss_of: Callable[[list[Text]], Tensor],
    rows: list[Text],
    *,
    steps: int,
    rate: float,
    batch: int = 16,
) -> None:
    """Adam with a rate that falls to zero; prints the loss now and then."""
    parameters, rng = list(parameters), random.Random(0)
    optimiser = torch.optim.Adam(parameters, lr=rate)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10) * (1 - step / steps)
        loss = loss_of(rng.sample(rows, batch))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if step % 20 == 0 or step + 1 == steps:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)


def _before(x: Tensor) -> Tensor:
    """The previous token's values, zero before the first: [B, T, C]."""
    return F.pad(x, (0, 0, 1, -1))
