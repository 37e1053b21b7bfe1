"""A model in this process, put together as the server's engine is."""

import time
from typing import Any

from rwkv_batch.checks.target import Likely, Scored, Written
from rwkv_batch.config import Config
from rwkv_batch.engine.build import build_engine_loop
from rwkv_batch.errors import EngineFailed
from rwkv_batch.request import Event, Failure, Finish, Request, TokenLogprob
from rwkv_batch.text.tokenizer import Tokenizer, token_name
from sampling.params import SamplingParams

OWNER = b"check"


class Rows:
    """What the rows of one request have brought so far."""

    def __init__(self, count: int):
        self.texts = [""] * count
        self.tokens: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self.scores: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self.finishes: dict[int, Finish] = {}

    @property
    def complete(self) -> bool:
        """Whether all have ended."""
        return len(self.finishes) == len(self.texts)

    def take(self, event: Event) -> None:
        """Keep what an event brings. Raises what the request or a row failed with."""
        if isinstance(event, Failure):
            raise event.exception()
        for scored in event.scores:
            self.scores[scored.index] += scored.tokens
        for delta in event.deltas:
            self.texts[delta.index] += delta.text
            self.tokens[delta.index] += delta.logprobs or ()
        for finish in event.finishes:
            if finish.reason not in ("stop", "length"):
                raise EngineFailed(f"row {finish.index}: {finish.error or finish.reason}")
            self.finishes[finish.index] = finish


class LocalTarget:
    """See Target. Loads the model of `config`; CheckpointError or UsageError if it cannot be."""

    def __init__(self, config: Config):
        self._events: list[Event] = []
        self._loop = build_engine_loop(config, lambda batch: self._events.extend(batch.get(OWNER, ())))
        self._num_requests = 0
        self.model = config.model_name
        self.place = self._loop.info.device

    @property
    def tokenizer(self) -> Tokenizer:
        """See Target."""
        return self._loop.tokenizer

    def likely(self, prompts: list[str], top: int) -> list[list[Likely]]:
        """See Target."""
        rows = self._run(self._encoded(prompts), _plain(None, logprobs=top), max_tokens=1)
        return [[Likely(self._name(token), logprob) for token, logprob in tokens[0].top] for tokens in rows.tokens]

    def write(self, prompts: list[str], *, max_tokens: int, noise: float, seed: int, stops: list[str]) -> Written:
        """See Target."""
        sampling = SamplingParams(rule="noise", noise=noise, alpha_presence=0.0, alpha_frequency=0.0, seed=seed)
        ids, began = self._encoded(prompts), time.monotonic()
        rows = self._run(ids, sampling, max_tokens=max_tokens, stop_texts=[stop.encode() for stop in stops])
        seconds = time.monotonic() - began
        finishes = [rows.finishes[index] for index in range(len(prompts))]
        num_tokens = sum(finish.completion_tokens for finish in finishes)
        return Written(rows.texts, [finish.reason for finish in finishes], num_tokens, seconds)

    def draw(self, prompts: list[str], *, max_tokens: int, seed: int | None) -> list[list[str]]:
        """See Target."""
        rows = self._run(self._encoded(prompts), _plain(seed, logprobs=0), max_tokens=max_tokens)
        return [[self._name(token.id) for token in tokens] for tokens in rows.tokens]

    def score(self, rows: list[list[int]]) -> list[list[Scored]]:
        """See Target."""
        found = self._run(rows, SamplingParams(), max_tokens=0, prompt_logprobs=1).scores
        return [[Scored(token.logprob, token.logprob >= token.top[0][1]) for token in tokens] for tokens in found]

    def close(self) -> None:
        """See Target."""
        self._loop.stop()
        self._loop.run()  # which ends at once, and closes the sessions

    def _encoded(self, prompts: list[str]) -> list[list[int]]:
        return [self.tokenizer.encode(prompt) or [0] for prompt in prompts]

    def _name(self, token: int) -> str:
        return token_name(self.tokenizer.token_bytes[token])

    def _run(self, prompts: list[list[int]], sampling: SamplingParams, **fields: Any) -> Rows:
        """Run one request to its end; it neither finds cached prefixes nor leaves some, so that it is the same each time."""
        self._num_requests += 1
        more = {"loop": "continuous", "chunk_size": 0, "cache": False, **fields}
        self._loop.submit(Request(id=f"check-{self._num_requests}", prompts=prompts, sampling=sampling, **more), OWNER)
        rows = Rows(len(prompts))
        while not rows.complete:
            self._loop.step()
            events, self._events = self._events, []
            for event in events:
                rows.take(event)
        return rows


def _plain(seed: int | None, *, logprobs: int) -> SamplingParams:
    """Draw from all tokens as likely as the model makes them; without a seed the likeliest."""
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(
        temperature=temperature, top_k=0, top_p=1.0, alpha_presence=0.0, alpha_frequency=0.0, seed=seed, logprobs=logprobs
    )
