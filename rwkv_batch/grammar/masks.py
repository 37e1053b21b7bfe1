"""Which tokens a row may sample by its grammar: one matcher a row, whose masks are made in threads of their own.

The loop's thread takes masks and tells ids, and never waits. After a step it hands over what was sampled, all at once
(`Grammars.flush`); one thread tells the matchers, and llguidance makes the masks of some at a time on several cores, without
Python's lock, so that most are there when the last one comes too late. Where the grammar leaves one text only, the tokens of
that text are known at once: their masks allow one token each, so the row runs in every step until there is something to choose
again.
"""

import itertools
import logging
import os
import queue
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.errors import EngineFailed, NotInstalled, RwkvBatchError
from rwkv_batch.request import Grammar, Request
from rwkv_batch.request import Sequence as Row
from rwkv_batch.text.grammar import installed, missing
from rwkv_batch.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger("rwkv_batch.engine")

WORD = 32
END_BIT = 1  # of the first word: the end token
COMPILED = 32  # grammars that are kept compiled
COMPILED_BYTES = 2**20  # of their sources: what is compiled may take a hundred times as much
MAX_THREADS = 8
MASKS_AT_ONCE = 16  # that are known together: two for each thread
SWITCH_SECONDS = 0.0005  # that the loop's thread keeps Python's lock while masks wait for it: what they need it for is short


class Columns:
    """From sets of ids to sets of columns, as `TokenMask` gives them. Column j is id `output_ids[j]`."""

    def __init__(self, output_ids: Sequence[int], vocab_size: int):
        self.num_words = -(-len(output_ids) // WORD)
        self.id_words = -(-vocab_size // WORD)
        self._ids = np.asarray(output_ids)
        self._places = {id: place for place, id in enumerate(output_ids)}
        self._are_ids = bool((self._ids == np.arange(len(output_ids))).all())

    def of(self, allowed: np.ndarray) -> Tensor:
        """Return the columns [num_words] int32 of a set of ids [id_words] int32, both as words of bits."""
        if self._are_ids:
            return torch.from_numpy(allowed[: self.num_words])
        flags = np.unpackbits(allowed.view(np.uint8), bitorder="little")[self._ids]
        words = np.zeros(self.num_words, dtype=np.int32)
        packed = np.packbits(flags, bitorder="little")
        words.view(np.uint8)[: len(packed)] = packed
        return torch.from_numpy(words)

    def only(self, id: int) -> Tensor:
        """Return the columns where one id is allowed."""
        place = self._places[id]
        words = np.zeros(self.num_words, dtype=np.uint32)
        words[place // WORD] = 1 << place % WORD
        return torch.from_numpy(words.view(np.int32))


class GrammarMask:
    """What one row may sample: a `TokenMask`. The loop's thread calls it, another one adds what comes next.

    sequence  the row, known once it exists
    complete  whether the text ends with the tokens that are known: nothing may follow them
    error     why the row cannot go on
    """

    def __init__(self, matcher: "LLMatcher", columns: Columns, told: list[tuple["GrammarMask", int]]):
        self.matcher = matcher
        self.sequence: Row | None = None
        self.complete = False
        self.error: str | None = None
        self._columns = columns
        self._told = told
        self._coming: deque[int | Tensor] = deque()  # forced ids, and behind them the columns among which there is a choice
        self._taken: deque[int | None] = deque()  # the forced ids, or None, of draws whose ids were not read
        self.last = 0  # the id that was drawn last

    @property
    def ended(self) -> bool:
        """Whether the last token of the text was read."""
        return self.complete and not self._coming and not self._taken

    def ready(self) -> bool:
        """See TokenMask."""
        return bool(self._coming)

    def take(self) -> Tensor:
        """See TokenMask."""
        item = self._coming.popleft()
        if isinstance(item, int):
            self._taken.append(item)
            return self._columns.only(item)
        self._taken.append(None)
        return item

    def accept(self, id: int) -> None:
        """See TokenMask. What may follow comes after the next `Grammars.flush`."""
        self.last = id
        if self._taken.popleft() is None:
            self._told.append((self, id))

    def take_forced(self, limit: int, may_feed: Callable[[list[int]], bool] = bool) -> list[int]:
        """Return the ids that must come next, to be fed and not drawn: two or more, fewer than `limit`; none while draws run.

        may_feed  asked with the ids; False: they are left to be drawn
        """
        forced = list(itertools.takewhile(lambda item: isinstance(item, int), self._coming))
        if self._taken or not 2 <= len(forced) < limit or not may_feed(forced):
            return []
        for _ in forced:
            self._coming.popleft()
        self.last = forced[-1]
        return forced

    def add(self, *items: int | Tensor) -> None:
        """What may be sampled behind what is known."""
        self._coming.extend(items)


class Start(NamedTuple):
    """A compiled grammar, its first tokens if they are forced, and what may follow them, None if nothing may."""

    matcher: "LLMatcher"
    forced: list[int]
    columns: Tensor | None


class Grammars:
    """The grammars of an engine. Its threads start with the first one.

    output_ids  the ids that can be drawn, by column
    notify      called in another thread when masks are ready, with those whose rows must say something, have come to their ends
                or have failed
    """

    def __init__(self, tokenizer: Tokenizer, output_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.output_ids = output_ids
        self.notify: Callable[[list[GrammarMask]], None] = lambda masks: None
        self.columns = Columns(output_ids, tokenizer.vocab_size)
        self._told: list[tuple[GrammarMask, int]] = []  # the loop's thread only
        self._batches: queue.SimpleQueue[list[tuple[GrammarMask, int]]] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[tuple[Request, Callable[[list[GrammarMask] | RwkvBatchError], None]]] = (
            queue.SimpleQueue()
        )
        self._compiled: OrderedDict[Grammar, Start] = OrderedDict()
        self._tokens: LLTokenizer | None = None
        self._executor: Any = None
        self._started = False

    def prepare(self, request: Request, ready: Callable[[list[GrammarMask] | RwkvBatchError], None]) -> None:
        """Make the masks of a request's rows, the first one of each included; `ready` is called once, in another thread.

        Raises NotInstalled.
        """
        if not installed():
            raise NotInstalled(missing(request.grammar), param=request.grammar.param)
        if not self._started:
            self._started = True
            sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
            for run, name in ((self._compile_all, "compile"), (self._mask_all, "masks")):
                threading.Thread(target=run, name=name, daemon=True).start()
        self._wanted.put((request, ready))

    def flush(self) -> None:
        """Have the masks made that follow the ids which were accepted."""
        if self._told:
            self._batches.put(self._told.copy())
            self._told.clear()

    # --- in the thread that compiles ---

    def _compile_all(self) -> None:
        while True:
            request, ready = self._wanted.get()
            try:
                masks = self._masks(request)
            except RwkvBatchError as error:
                ready(error)
            except Exception:
                log.exception("the grammar of request %s failed", request.id)
                ready(EngineFailed("internal error", code="internal"))
            else:
                ready(masks)

    def _masks(self, request: Request) -> list[GrammarMask]:
        start = self._start(request.grammar)
        masks = []
        for _ in range(request.num_rows):
            mask = GrammarMask(start.matcher.deep_copy(), self.columns, self._told)
            mask.add(*start.forced, *(() if start.columns is None else (start.columns,)))
            mask.complete = start.columns is None
            masks.append(mask)
        return masks

    def _start(self, grammar: Grammar) -> Start:
        known = self._compiled.get(grammar)
        if known is not None:
            self._compiled.move_to_end(grammar)
            return known
        from rwkv_batch.grammar import compiler

        if self._tokens is None:
            self._tokens = compiler.vocabulary(self.tokenizer, self.output_ids)
        matcher = compiler.matcher(grammar, self._tokens)
        forced = forced_tokens(matcher)
        columns = None
        if not matcher.is_stopped():
            (allowed,) = self._allowed([matcher])
            columns = None if only_end(allowed) else self.columns.of(allowed)
        if matcher.is_error():
            raise compiler.wrong(grammar, matcher.get_error())
        start = self._compiled[grammar] = Start(matcher, forced, columns)
        while len(self._compiled) > COMPILED or sum(len(kept.source) for kept in self._compiled) > COMPILED_BYTES:
            self._compiled.popitem(last=False)
        return start

    # --- in the thread that makes masks ---

    def _mask_all(self) -> None:
        while True:
            batch = self._batches.get()
            while not self._batches.empty():
                batch += self._batches.get()
            for start in range(0, len(batch), MASKS_AT_ONCE):
                part = batch[start : start + MASKS_AT_ONCE]
                try:
                    self._advance(part)
                except Exception:
                    log.exception("masks of grammars failed")
                    for mask, _ in part:
                        mask.error = "internal error"
                    self.notify([mask for mask, _ in part])

    def _advance(self, batch: list[tuple[GrammarMask, int]]) -> None:
        """Tell matchers what was sampled, and find what may follow."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))
        self._executor.consume_token_par([(mask.matcher, id) for mask, id in batch])
        ended, choosing, forced = [], [], []
        for mask, _ in batch:
            if ids := forced_tokens(mask.matcher):
                mask.add(*ids)
                forced.append(mask)
            (ended if mask.matcher.is_stopped() else choosing).append(mask)
        for mask, allowed in zip(choosing, self._allowed([mask.matcher for mask in choosing]), strict=True):
            if mask.matcher.is_stopped() or only_end(allowed):
                ended.append(mask)
            else:
                mask.add(self.columns.of(allowed))
        for mask in ended:
            mask.error = failure(mask.matcher)
            mask.complete = True
        self.notify([*forced, *(mask for mask in ended if mask not in forced)])

    def _allowed(self, matchers: list["LLMatcher"]) -> np.ndarray:
        """Return which ids may come next, for each matcher, as words of bits [B, id_words] int32."""
        allowed = np.zeros((len(matchers), self.columns.id_words), dtype=np.int32)
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        elif matchers:
            places = [(matcher, place) for place, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(places, allowed.ctypes.data, allowed.strides[0], len(matchers))
        return allowed


def forced_tokens(matcher: "LLMatcher") -> list[int]:
    """Move a matcher over the text that must come next, and return its ids."""
    forced = matcher.compute_ff_tokens()
    if forced and not matcher.consume_tokens(forced):
        return []
    return forced


def only_end(allowed: np.ndarray) -> bool:
    """Whether nothing but the end may come next."""
    return allowed[0] == END_BIT and not allowed[1:].any()


def failure(matcher: "LLMatcher") -> str | None:
    """Return why a matcher cannot go on, None if its text is complete."""
    if not matcher.is_error():
        return None
    from rwkv_batch.grammar import compiler

    return compiler.reason(matcher.get_error())
