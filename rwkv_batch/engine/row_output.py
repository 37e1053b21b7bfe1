"""The text side of rows: from sampled ids to what is delivered, and how far a kept state must reach."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from rwkv_batch.engine.admission import NOBODY, Accepted, ActiveRequest, Lease, Owner, stops_of
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.model.state import Snapshot, Together
from rwkv_batch.request import Delta, Event, Failure, Finish, Progress, Reason, Request, Sequence, Text, TokenLogprob
from rwkv_batch.session_messages import Answer
from rwkv_batch.text.detokenizer import IncrementalDetokenizer, StopMatcher
from rwkv_batch.text.tokenizer import Tokenizer

NOT_FINITE = "the model's output for this row was not finite"
NEWLINE = ord("\n")
NO_STOPS = StopMatcher()  # until min_tokens ids were sampled


@dataclass(eq=False, slots=True)
class RowOutput:
    """The text side of one row.

    count         sampled ids seen
    undelivered   text safe to show that was not delivered yet, of the last `num_undelivered` ids
    generated     all ids seen, only of rows whose state is kept
    checkpoints   (n, snapshot after the prompt and n generated ids), only of such rows: the newest and, before it, the last
                  one all of whose ids were shown when the newest was made
    reason        why the row ended, while it is finalized
    logprobs      of sampled ids, not delivered yet, and how many were; only of rows that asked
    num_scored    tokens of the prompt that were scored
    prompt        ids of the prompt, with the separator from the session's text before
    delivered     text delivered, only of rows whose answer is kept for an idempotency key
    armed_at      how many ids are sampled before stops count, 0: they do from the first
    quick_until   how many ids may be fed by `feed_quickly`: not the last one, and none where an id is more than text
    due_at        how many ids are delivered together
    """

    active: ActiveRequest
    detokenizer: IncrementalDetokenizer
    lease: Lease | None
    prompt: list[int]
    count: int = 0
    undelivered: str = ""
    num_undelivered: int = 0
    generated: list[int] = field(default_factory=list)
    checkpoints: list[tuple[int, Snapshot]] = field(default_factory=list)
    reason: Reason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_reported: int = 0
    num_scored: int = 0
    delivered: list[str] = field(default_factory=list)
    armed_at: int = 0
    quick_until: int = field(init=False)
    due_at: float = field(init=False)

    def __post_init__(self) -> None:
        request = self.active.request
        self.due_at = request.chunk_size or math.inf
        asks_more = request.sampling.logprobs is not None or request.grammar is not None or self.armed_at > 0
        self.quick_until = 0 if asks_more else request.max_tokens - 1

    def feed_quickly(self, id: int | None) -> bool:
        """Do what `feed` does, if the id is plain text and the row goes on; else nothing, and return False."""
        lease = self.lease
        if lease is not None and lease.revoked:
            return False
        text = self.detokenizer.feed_plain(id)
        if not text:
            return False
        if lease is not None:
            self.generated.append(id)
        self.count += 1
        self.num_undelivered += 1
        self.undelivered += text
        return True

    def feed(self, id: int, logprobs: TokenLogprob | None) -> bool:
        """Take one sampled id; returns whether the text stops with it."""
        text, stopped = self.detokenizer.feed(id)
        self.count += 1
        self.num_undelivered += 1
        if text:
            self.undelivered += text
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.lease is not None:
            self.generated.append(id)
        if self.count == self.armed_at:
            request = self.active.request
            self.detokenizer.arm(stops_of(tuple(request.stop_ids), tuple(request.stop_texts)))
        return stopped

    def may_be_fed(self) -> bool:
        """Whether ids may be fed to the row as if it had sampled them: nobody asks how likely each was, or for the state."""
        request = self.active.request
        return self.lease is None and request.sampling.logprobs is None and request.prompt_logprobs is None

    def add_checkpoint(self, num_generated: int, snapshot: Snapshot) -> None:
        """Keep the state after `num_generated` generated ids, and the last one before it that may still be needed."""
        newest = self.checkpoints[-1:]
        self.checkpoints = newest if newest and newest[0][0] <= self.detokenizer.num_shown else self.checkpoints[:1]
        self.checkpoints.append((num_generated, snapshot))

    def remainder(self, tokenizer: Tokenizer) -> tuple[Snapshot, list[int]]:
        """A state inside the visible text, and the ids that bring it to the end of that text."""
        num_visible, rest = self.detokenizer.visible()
        num_generated, snapshot = next(c for c in reversed(self.checkpoints) if c[0] <= num_visible)
        return snapshot, self.generated[num_generated:num_visible] + (tokenizer.encode_bytes(rest) if rest else [])

    def turn(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids of the prompt and of the visible text: what the kept state has seen since the one before."""
        num_visible, rest = self.detokenizer.visible()
        return self.prompt + self.generated[:num_visible] + (tokenizer.encode_bytes(rest) if rest else [])

    def newlines(self, tokenizer: Tokenizer) -> int:
        """Return how many newlines, two at most, the text of prompt and answer ends in."""
        num_visible, rest = self.detokenizer.visible()
        if (
            not rest
            and num_visible
            and (last := tokenizer.token_bytes[self.generated[num_visible - 1]])
            and last[-1] != NEWLINE
        ):
            return 0  # nearly all of them
        ids = chain(reversed(self.generated[:num_visible]), reversed(self.prompt))
        count = 0
        for data in chain((rest,), (tokenizer.token_bytes[id] for id in ids)):
            stripped = data.rstrip(b"\n")
            count += len(data) - len(stripped)
            if stripped or count >= 2:
                return min(count, 2)
        return min(count + self.lease.newlines, 2)

    def release(self, *, nonfinite: bool = False) -> None:
        """Leave the session as it was, if there is one; `nonfinite`: its numbers were not finite."""
        if self.lease is not None:
            self.lease.release(nonfinite=nonfinite)

    def finish(self, sequence: Sequence, reason: Reason) -> Finish:
        """How the row ended."""
        error = NOT_FINITE if reason == "error" else None
        stop = self.detokenizer.stop_text
        stop_text = stop.decode(errors="replace") if stop is not None and reason == "stop" else None
        return Finish(sequence.index, reason, len(self.prompt), self.count, error, sequence.cached, stop_text=stop_text)

    def answer(self, finish: Finish) -> Answer:
        """What the row said, to say it again."""
        return Answer(
            "".join(self.delivered), self.reason, finish.prompt_tokens, finish.completion_tokens, finish.cached_tokens
        )

    def take_logprobs(self, reason: Reason | None) -> list[TokenLogprob]:
        """Return those of the ids that became visible; at the row's end the rest, without what a stop text hides."""
        num_visible, rest = self.detokenizer.visible()
        count = num_visible - self.num_reported
        if reason is not None:
            last, request = self.logprobs[-1].id, self.active.request
            by_text = reason == "stop" and last != 0 and last not in request.stop_ids
            count = count + bool(rest) if by_text else len(self.logprobs)
        taken, self.logprobs = self.logprobs[:count], self.logprobs[count:]
        self.num_reported += count
        return taken


class CheckpointTimes:
    """When rows whose states are kept have generated as many ids as want another checkpoint.

    A row generates one id a step at most, so it is looked at when it may have as many, and not in each step.
    """

    def __init__(self) -> None:
        self._due: dict[int, list[tuple[Sequence, int]]] = defaultdict(list)  # by step: who may have how many ids then

    def begin(self, step: int, distance: int, sequence: Sequence) -> None:
        """A row's prompt was fed with this step."""
        self._due[step + distance].append((sequence, distance))

    def take(
        self, step: int, distance: int, rows: dict[Sequence, RowOutput], late_draws: bool
    ) -> list[tuple[Sequence, RowOutput, int]]:
        """Return those whose states behind this step are wanted, and how many generated ids they hold."""
        wanted = []
        for sequence, target in self._due.pop(step, ()):
            text = rows.get(sequence)
            if text is None or text.reason is not None:
                continue
            keeps = late_draws and sequence.mask is not None
            missing = target - (sequence.num_sampled - (not keeps))
            if missing == 0:
                wanted.append((sequence, text, target))
            while missing <= 0:
                missing, target = missing + distance, target + distance
            self._due[step + missing].append((sequence, target))
        return wanted


class Outbox:
    """What a step brought, by owner and request, until it is delivered."""

    def __init__(self) -> None:
        self._events: dict[Owner, dict[str, Event]] = defaultdict(dict)

    def progress(self, active: ActiveRequest) -> Progress:
        """Return what this step brought the request so far."""
        events = self._events[active.owner]
        request_id = active.request.id
        event = events.get(request_id)
        if event is None:
            event = events[request_id] = Progress(request_id, [], [])
        elif isinstance(event, Text):
            event = events[request_id] = Progress(request_id, list(event.deltas), [])
        return event

    def put(self, owner: Owner, event: Event) -> None:
        """All that there is to say to a request."""
        self._events[owner][event.request_id] = event

    def fail(self, request_id: str, owner: Owner, error: RwkvBatchError) -> None:
        """End a request with an error."""
        self.put(owner, Failure.of(request_id, error))

    def forget(self, active: ActiveRequest) -> None:
        """Say nothing to a request."""
        self._events[active.owner].pop(active.request.id, None)

    def add_delta(self, sequence: Sequence, row: RowOutput, reason: Reason | None = None) -> None:
        """Have the text delivered that a row still holds."""
        request = sequence.request
        logprobs = row.take_logprobs(reason) if row.logprobs else None
        events = self._events[row.active.owner]
        if logprobs is None and request.id not in events:
            events[request.id] = Text(request.id, sequence.index, row.undelivered, row.num_undelivered)
        else:
            self.progress(row.active).deltas.append(Delta(sequence.index, row.undelivered, row.num_undelivered, logprobs))
        if row.lease is not None and request.session.key is not None:
            row.delivered.append(row.undelivered)
        row.undelivered, row.num_undelivered = "", 0

    def add_rest(self, sequence: Sequence, row: RowOutput, reason: Reason) -> None:
        """The same at the row's end, if there is any."""
        if row.undelivered or row.logprobs:
            self.add_delta(sequence, row, reason)

    def end(self, sequence: Sequence, row: RowOutput, reason: Reason) -> None:
        """Have the end of a row delivered, behind what it still has to say."""
        self.add_rest(sequence, row, reason)
        self.progress(row.active).finishes.append(row.finish(sequence, reason))

    def end_turn(self, active: ActiveRequest, event: Progress | Failure) -> None:
        """The state of a row that ended is kept, or could not be: the end of its request, behind its text."""
        if isinstance(event, Failure):
            self.put(active.owner, event)
        else:
            self.progress(active).finishes.extend(event.finishes)

    def take(self) -> dict[Owner, list[Event]]:
        """Everything, by owner."""
        batch = {owner: list(events.values()) for owner, events in self._events.items() if events and owner is not NOBODY}
        self._events.clear()
        return batch


def rows_of(
    active: ActiveRequest, sequences: list[Sequence], accepted: Accepted, tokenizer: Tokenizer
) -> dict[Sequence, RowOutput]:
    """Return the text side of a request's rows, which start from the session's state if it has one."""
    request, lease = active.request, accepted.lease
    initial, ids = (lease.initial(), lease.ids) if lease is not None else (None, [])
    continues = initial is not None or ids != []
    begin = begin_of(request, accepted) if not continues else None
    stops = NO_STOPS if request.sampling.min_tokens > 0 else accepted.stops
    kept = lease if lease is not None and request.session.keep else None
    rows = {}
    for sequence in sequences:
        prompt = sequence.prompt
        sequence.initial, sequence.continues = initial if continues else begin, continues
        sequence.adapter = accepted.start.adapter if accepted.start is not None else None
        if continues:
            if request.session.separate:
                prompt = separated(prompt, lease.newlines, tokenizer)
            sequence.prompt, sequence.recalled = ids + prompt, len(ids)
        if accepted.masks is not None:
            sequence.mask = mask = accepted.masks[sequence.index - sequence.request.first]
            mask.sequence = sequence
        detokenizer = IncrementalDetokenizer(tokenizer.token_bytes, stops)
        rows[sequence] = RowOutput(active, detokenizer, kept, prompt, armed_at=request.sampling.min_tokens)
    return rows


def begin_of(request: Request, accepted: Accepted) -> Snapshot | Together | None:
    """Return what a row begins with that continues no session."""
    if accepted.start is None:
        return None
    return Together(accepted.start.parts) if request.width > 1 else accepted.start.parts[0]


def begin_forced(sequence: Sequence, row: RowOutput, token_bytes: list[bytes | None]) -> None:
    """Feed what a row must say first behind its prompt, if no stop is in it."""
    request = sequence.request

    def is_no_stop(ids: list[int]) -> bool:
        data = b"".join(token_bytes[id] for id in ids)
        return set(ids).isdisjoint(request.stop_ids) and not any(text in data for text in request.stop_texts)

    ids = sequence.mask.take_forced(request.max_tokens, is_no_stop)
    for id in ids:
        row.feed(id, None)
    sequence.prompt = [*sequence.prompt, *ids]
    sequence.forced, sequence.num_sampled = ids, len(ids)


def separated(prompt: list[int], newlines: int, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt with what makes one blank line between it and a text that ends in `newlines` newlines.

    A newline and a byte other than a blank, a tab or another newline are never in one World token.
    """
    token_bytes = tokenizer.token_bytes
    for count, token in enumerate(prompt):
        if not token_bytes[token]:
            return prompt  # the end of a text separates more than a blank line would
        rest = token_bytes[token].lstrip(b"\n")
        if rest:
            partial = rest if rest != token_bytes[token] else b""
            separator = b"\n" * (2 - newlines)
            return [*separator_ids(tokenizer, separator + partial), *prompt[count + bool(partial) :]]
    return prompt  # nothing but newlines


@lru_cache(maxsize=256)
def separator_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The ids of newlines and what is left of a token behind them: the same few for most turns."""
    return tokenizer.encode_bytes(data)


def again(request: Request, answer: Answer) -> Progress:
    """Say again what an earlier turn with the same idempotency key said."""
    progress = Progress(request.id, [], [])
    if answer.text:
        progress.deltas.append(Delta(0, answer.text, answer.completion_tokens))
    counts = (answer.prompt_tokens, answer.completion_tokens, None, answer.cached_tokens)
    progress.finishes.append(Finish(0, answer.reason, *counts, answer.kept))
    return progress
