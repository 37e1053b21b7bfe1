"""The worker with a real tiny model: rows in company, stops, kept states, failures, and what it costs on the host."""

import codecs
import contextlib
import random
import time
from collections import defaultdict

import pytest
import torch
from models import TINY, random_weights, tokenizer_for
from test_model import greedy, run

from rwkv_batch.config import Config
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.engine_loop import EngineLoop
from rwkv_batch.engine.memory import CHECKPOINTS
from rwkv_batch.engine.pipeline.build import Pipeline
from rwkv_batch.engine.pipeline.copies import StagedCopies
from rwkv_batch.errors import Overloaded, Unavailable
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import Snapshot, State
from rwkv_batch.request import Failure, Request
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.session_messages import CommitResult, Session
from sampling.params import SamplingParams
from sampling.reference import ReferenceSampler

GREEDY = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0, ignore_eos=True)


class Memory:
    """Sessions in a dict."""

    def __init__(self):
        self.states: dict[str, Snapshot] = {}
        self.released: list[str] = []

    def use(self, compute, telling):
        pass

    def lease(self, request, ready):
        memory, name = self, request.session.name

        class Lease:
            newlines, replay, revoked, ids, logs = 0, None, False, [], False

            def initial(self):
                return memory.states.get(name)

            def commit(self, snapshot, newlines, answer, done, **_):
                memory.states[name] = snapshot
                done(CommitResult(name, 1, None, snapshot.elapsed, False))

            def release(self, **_):
                memory.released.append(name)

        ready(Lease())

    def cancel(self, request_id):
        pass

    def together(self):
        return contextlib.nullcontext()

    def stats(self):
        return {}

    def close(self):
        pass


class Harness:
    """A worker turned by hand, and what it delivered by request."""

    def __init__(self, *, vocab=256, slots=8, budget=256, mixed=True, queue=512, shape=TINY, seed=0, stages=1):
        weights = random_weights(shape, vocab, seed)
        self.tokenizer = tokenizer_for(vocab)
        self.copies = None
        if stages == 1:
            self.engine = Engine(Model(weights), ReferenceSampler(slots, weights.output_ids), State(weights.shape, slots))
            states = [self.engine.state]
        else:
            self.engine = in_stages(weights, slots, budget, stages)
            states = [stage.state for stage in self.engine.model.stages]
            self.copies = StagedCopies(self.engine.state, self.engine.model.stages)
        for tensor in (tensor for state in states for tensor in (state.shift, state.wkv)):
            tensor.fill_(float("nan"))
        self.sessions = Memory()
        self.scheduler = Scheduler(num_slots=slots, prefill_budget=budget, mixed=mixed, num_groups=stages)
        self.worker = EngineLoop(self.engine, self.scheduler, self.tokenizer, self.deliver, sessions=self.sessions, queue=queue)
        self.texts = defaultdict(lambda: defaultdict(str))
        self.finishes = defaultdict(dict)
        self.failures = {}

    def deliver(self, batch):
        for owner, events in batch.items():
            assert owner == b"test"
            for event in events:
                if isinstance(event, Failure):
                    self.failures[event.request_id] = event
                    continue
                for delta in event.deltas:
                    assert delta.index not in self.finishes[event.request_id]
                    self.texts[event.request_id][delta.index] += delta.text
                for finish in event.finishes:
                    assert finish.index not in self.finishes[event.request_id]
                    self.finishes[event.request_id][finish.index] = finish

    def submit(self, id, prompts, **fields):
        fields.setdefault("sampling", GREEDY)
        fields.setdefault("max_tokens", 20)
        self.worker.submit(Request(id=id, prompts=prompts, **fields), b"test")

    def run(self, limit=100_000):
        for _ in range(limit):
            if not (self.worker._active or self.worker._flight or self.worker._inbox._queue.qsize()):
                return
            self.worker.step()
        raise AssertionError("the worker does not come to an end")


def in_stages(weights, slots, budget, stages):
    """An engine of a pipeline on so many CPUs."""
    pipeline = Pipeline.over([torch.device("cpu")] * stages, Config(), weights.shape, weights.dtype)
    return pipeline.build_engine(Config(), weights, slots, max_tokens=budget)


def alone(prompt, **fields):
    """Return the text of one row with the worker to itself."""
    harness = Harness(slots=1, vocab=fields.pop("vocab", 256))
    harness.submit("alone", [prompt], **fields)
    harness.run()
    return harness.texts["alone"][0]


def margins(prompt, count):
    """Return the difference between the two best logits at each of `count` greedy tokens."""
    return greedy(Model(random_weights(TINY, 256)), prompt, count)[1]


@pytest.mark.parametrize("loop", ["sync", "continuous"])
@pytest.mark.parametrize(
    ("budget", "mixed", "num_rows"),
    [
        (1, True, 8), (16, False, 10), (256, True, 10),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((16, False, 64), (256, True, 64), (256, False, 64))),
    ],
)  # fmt: skip
def test_a_row_alone_equals_the_row_in_company(loop, budget, mixed, num_rows):
    """Random joins and cancels, fewer slots than rows, poisoned free slots: every row's greedy text is what it is alone."""
    rng = random.Random(f"{loop}{budget}{mixed}")
    longest = 300 if budget > 1 else 40
    prompts = [[rng.randrange(1, 256) for _ in range(rng.choice((1, 2, 15, 16, 17, 31, 33, rng.randrange(1, longest))))]
               for _ in range(num_rows)]  # fmt: skip
    expected = [alone(prompt, max_tokens=16) for prompt in prompts]
    harness = Harness(slots=9, budget=budget, mixed=mixed)
    waiting = list(enumerate(prompts))
    groups, cancelled = {}, set()
    while waiting or harness.worker._active:
        if waiting and rng.random() < 0.2:
            size = rng.randrange(1, 14)
            group, waiting = waiting[:size], waiting[size:]
            name = f"r{len(groups)}"
            groups[name] = group
            harness.submit(name, [p for _, p in group], max_tokens=16, loop=loop, chunk_size=rng.choice((0, 1, 4)))
            if rng.random() < 0.3:  # a companion that will be cancelled
                harness.submit(f"c{name}", [[5] * 30] * 3, max_tokens=1000, loop=loop)
                cancelled.add(f"c{name}")
        for name in [c for c in cancelled if rng.random() < 0.05 or not waiting]:
            cancelled.discard(name)
            harness.worker.cancel(name)
        poisoned = poison_free_slots(harness)
        harness.worker.step() if harness.worker._active or harness.worker._inbox._queue.qsize() else None
        check_poison(harness, poisoned)
    harness.run()
    assert harness.scheduler.num_free == 9
    close = 0
    for name, group in groups.items():
        for index, (number, prompt) in enumerate(group):
            finish = harness.finishes[name][index]
            assert (finish.reason, finish.completion_tokens, finish.prompt_tokens) == ("length", 16, len(prompt))
            if harness.texts[name][index] != expected[number]:
                assert min(margins(prompt, 16)) < 1e-3
                close += 1
    assert close <= 1


def poison_free_slots(harness):
    """Overwrite free slots with NaN and return them with their bits."""
    state, owned = harness.engine.state, {s.slot for s in harness.worker._rows}
    free = [slot for slot in range(harness.engine.state.num_slots) if slot not in owned]
    state.wkv[:, free] = float("nan")
    state.shift[:, :, free] = float("nan")
    return free, state.wkv[:, free].view(torch.int32).clone(), state.shift[:, :, free].view(torch.int32).clone()


def check_poison(harness, poisoned):
    """Slots that were free before and after the turn hold the same bits."""
    free, wkv, shift = poisoned
    state, owned = harness.engine.state, {s.slot for s in harness.worker._rows}
    for i, slot in enumerate(free):
        if slot not in owned and not torch.isfinite(state.wkv[:, slot]).any():
            assert torch.equal(state.wkv[:, slot].view(torch.int32), wkv[:, i])
            assert torch.equal(state.shift[:, :, slot].view(torch.int32), shift[:, :, i])


def test_seeded_rows_do_not_depend_on_their_neighbours():
    params = SamplingParams(seed=7, temperature=1.0, top_k=0, top_p=1.0, alpha_presence=0.5, alpha_frequency=0.1)
    prompt = list(b"a seeded row")
    texts = set()
    for neighbours in (0, 1, 6):
        harness = Harness(slots=8)
        harness.submit("noise", [[9 + i] * (5 + i) for i in range(neighbours)] or [[3]], sampling=SamplingParams(top_p=1.0))
        harness.submit("seeded", [prompt, prompt], sampling=params, max_tokens=40)
        harness.run()
        texts.add((harness.texts["seeded"][0], harness.texts["seeded"][1]))
    assert len(texts) == 1
    first, second = texts.pop()
    assert first != second  # n equal prompts differ: the choice index is in the key


def test_the_parts_of_a_request_draw_what_the_whole_one_does():
    """On whichever engine each is: their rows have the same numbers."""
    params = SamplingParams(seed=7, temperature=1.0, top_k=0, top_p=1.0, ignore_eos=True)
    many = {"prompts": [list(text) for text in (b"one", b"two", b"three", b"four")], "copies": 2}
    for fields, cuts in (({"prompts": [list(b"alone")], "copies": 6}, (0, 1, 4, 6)), (many, (0, 2, 6, 8))):
        whole = Request(id="whole", sampling=params, max_tokens=12, **fields)
        engines = [Harness() for _ in cuts]
        engines[0].worker.submit(whole, b"test")
        for engine, begin, end in zip(engines[1:], cuts, cuts[1:], strict=False):
            engine.worker.submit(whole.part(f"from {begin}", range(begin, end)), b"test")
        for engine in engines:
            engine.run()
        parts = [(index, text) for engine in engines[1:] for part in engine.texts.values() for index, text in part.items()]
        assert sorted(parts) == sorted(engines[0].texts["whole"].items())
        assert len({text for _, text in parts}) == len(parts) == whole.num_rows


def test_rows_without_a_seed_are_fresh():
    harness = Harness(slots=4)
    params = SamplingParams(temperature=2.0, top_k=0, top_p=1.0)
    harness.submit("a", [[1, 2, 3]] * 2, sampling=params, max_tokens=30)
    harness.submit("b", [[1, 2, 3]], sampling=params, max_tokens=30)
    harness.run()
    assert len({harness.texts["a"][0], harness.texts["a"][1], harness.texts["b"][0]}) == 3


def test_length_and_stop_and_usage():
    prompt = list(b"The quick brown fox")
    harness = Harness()
    data = bytes(greedy(harness.engine.model, prompt, 30)[0])
    stop = data[8:11]
    first = data.find(stop)
    harness.submit("none", [prompt], max_tokens=0)
    harness.submit("one", [prompt], max_tokens=1)
    harness.submit("stop", [prompt], max_tokens=30, stop_texts=[stop])
    harness.run()
    assert harness.texts["none"][0] == ""
    assert harness.finishes["none"][0].completion_tokens == 0
    assert harness.finishes["one"][0].completion_tokens == 1
    assert harness.texts["stop"][0] == data[:first].decode("utf-8", "replace")
    assert harness.finishes["stop"][0].reason == "stop"


STOPS = ["length", "stop id", "stop text", "stop inside a token", "end token"]


@pytest.mark.parametrize(
    ("vocab", "num_cases", "ends_by"),
    [
        *((256, 3, ends_by) for ends_by in STOPS),
        (65536, 2, "stop inside a token"),  # bytes have no inside
        *(pytest.param(65536, 6, ends_by, marks=pytest.mark.long) for ends_by in STOPS),
    ],
)
def test_kept_state_is_the_state_of_the_visible_text(vocab, num_cases, ends_by):
    """Whatever ended the row, its kept state is that of prompt and visible text and nothing more."""
    rng = random.Random(f"{vocab}{ends_by}")
    harness = Harness(vocab=vocab, slots=4)
    model = harness.engine.model
    for case in range(num_cases):
        prompt = [rng.randrange(1, min(vocab, 60000)) for _ in range(rng.randrange(1, 40))]
        count = rng.randrange(1, 60)
        ids, _ = greedy(model, prompt, count)
        data = b"".join(harness.tokenizer.token_bytes[i] for i in ids)
        fields = {"max_tokens": count}
        if ends_by == "stop id":
            fields["stop_ids"] = [ids[-1]]
        elif ends_by == "stop text":
            fields["stop_texts"] = [data[-min(len(data), 9) :], b"never appears in it"]
        elif ends_by == "stop inside a token":
            at = rng.randrange(len(data))
            fields["stop_texts"] = [data[at : at + 1]]
        elif ends_by == "end token":
            fields["max_tokens"] = count + 5
            fields["sampling"] = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0)
            end = ids[count // 2]  # play that this id is the end: as a stop id it behaves alike
            fields["stop_ids"] = [end]
        name = f"{case}"
        harness.submit(name, [prompt], session=Session(name=name), **fields)
        harness.submit(f"other{case}", [prompt[:3] or [1]], max_tokens=10)
        harness.run()
        visible = visible_ids(harness.tokenizer, ids, fields)
        state = State(model.weights.shape, 1)
        run(model, prompt + visible, [len(prompt + visible)], slot=0, state=state)
        kept = harness.sessions.states[name]
        assert kept.elapsed == len(prompt + visible)
        assert (kept.wkv - state.wkv[:, 0]).abs().max() < 1e-4
        assert (kept.shift - state.shift[:, :, 0]).abs().max() < 1e-4
    assert harness.scheduler.num_free == 4


def visible_ids(tokenizer, ids, fields):
    """Return the ids of the visible text by the letter: cut at the earliest stop, re-encode a partly visible last token."""
    stop_ids, stop_texts = {0, *fields.get("stop_ids", [])}, fields.get("stop_texts", [])
    ids = ids[: next((i for i, id in enumerate(ids) if id in stop_ids), len(ids))][: fields["max_tokens"]]
    data = b"".join(tokenizer.token_bytes[i] for i in ids)
    ends = [(data.find(t) + len(t), -len(t)) for t in stop_texts if t in data]
    if ends:
        end, length = min(ends)
        data = data[: end + length]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    data = data[: len(data) - len(decoder.getstate()[0])]  # an incomplete character at the end is not shown
    kept, size = [], 0
    for id in ids:
        piece = tokenizer.token_bytes[id]
        if size + len(piece) > len(data):
            break
        kept.append(id)
        size += len(piece)
    return kept + tokenizer.encode_bytes(data[size:])


@pytest.mark.parametrize(("count", "num_visible"), [(100, 100), (300, 0)])
def test_a_row_holds_two_checkpoints_however_much_text_is_held_back(count, num_visible):
    """Every token may yet be part of the stop text; at last it is, or there were too few of them."""
    harness, prompt = Harness(slots=2), [66, 67]
    params = SamplingParams(logit_bias=((97, 100.0),), temperature=0, alpha_presence=0, alpha_frequency=0)
    names = ["a", "b"]
    for name in names:
        harness.submit(name, [prompt], sampling=params, max_tokens=count, stop_texts=[b"a" * 256], session=Session(name=name))
    most = 0
    while harness.worker._active or harness.worker._inbox._queue.qsize():
        harness.worker.step()
        most = max([most, *(len(row.checkpoints) for row in harness.worker._rows.values())])
    assert most == CHECKPOINTS
    state, ids = State(harness.engine.model.weights.shape, 1), prompt + [97] * num_visible
    run(harness.engine.model, ids, [len(ids)], slot=0, state=state)
    for name in names:
        kept = harness.sessions.states[name]
        assert kept.elapsed == len(ids)
        assert (kept.wkv - state.wkv[:, 0]).abs().max() < 1e-4


def test_a_second_turn_continues_the_first():
    """Two turns equal one row over the joined text."""
    harness = Harness(vocab=65536)
    prompt, more = harness.tokenizer.encode("User: hi\n\nAssistant:"), harness.tokenizer.encode("\n\nUser: go on\n\nAssistant:")
    harness.submit("1", [prompt], session=Session(name="s", separate=False), max_tokens=10)
    harness.run()
    ids, _ = greedy(harness.engine.model, prompt, 10)
    harness.submit("2", [more], session=Session(name="s", separate=False), max_tokens=10)
    harness.run()
    assert harness.texts["2"][0] == alone(prompt + ids + more, max_tokens=10, vocab=65536)


def test_cancelled_and_failed_turns_leave_the_session_alone():
    harness = Harness()
    harness.submit("1", [[1, 2, 3]], session=Session(name="s", separate=False), max_tokens=5)
    harness.run()
    before = harness.sessions.states["s"]
    harness.submit("2", [[4, 5]], session=Session(name="s", separate=False), max_tokens=500)
    for _ in range(5):
        harness.worker.step()
    harness.worker.cancel("2")
    harness.run()
    assert harness.sessions.states["s"] is before
    assert harness.sessions.released == ["s"]
    assert harness.scheduler.num_free == 8


def test_a_row_that_is_not_finite_fails_alone():
    harness = Harness()
    expected = alone(list(b"fine"), max_tokens=12)
    harness.submit("r", [list(b"fine"), list(b"sick"), list(b"fine")], max_tokens=12)
    for _ in range(3):
        harness.worker.step()
    sick = next(s for s in harness.worker._rows if s.index == 1)
    harness.engine.state.wkv[:, sick.slot] = float("nan")
    harness.run()
    reasons = [harness.finishes["r"][i].reason for i in range(3)]
    assert reasons == ["length", "error", "length"]
    assert "not finite" in harness.finishes["r"][1].error
    assert [harness.texts["r"][i] for i in (0, 2)] == [expected, expected]
    harness.submit("next", [list(b"fine")], max_tokens=12)  # whoever gets the slot next is well
    harness.run()
    assert harness.texts["next"][0] == expected


def test_a_cancelled_row_frees_its_slot_at_the_next_step():
    harness = Harness(slots=1)
    harness.submit("long", [[1]], max_tokens=10_000)
    harness.submit("next", [[2]], max_tokens=3)
    for _ in range(4):
        harness.worker.step()
    harness.worker.cancel("long")
    harness.worker.step()
    assert [s.request.id for s in harness.worker._rows if s.slot == 0] == ["next"]
    harness.run()
    assert not harness.finishes["long"]
    assert harness.finishes["next"][0].reason == "length"


def test_cancel_of_an_owner_spares_the_others():
    harness = Harness()
    harness.submit("mine", [[1]], max_tokens=5)
    harness.worker.submit(Request(id="theirs", prompts=[[1]] * 3, sampling=GREEDY, max_tokens=100), b"gone")
    harness.worker.cancel_owner(b"gone")
    harness.run()
    assert list(harness.finishes) == ["mine"]


def test_a_fatal_error_reaches_every_caller():
    harness = Harness(slots=2)
    for i in range(4):
        harness.submit(f"{i}", [[i + 1]] * 2, max_tokens=100)
    harness.worker.step()

    def broken(*args, **kwargs):
        raise RuntimeError("device lost")

    harness.engine.model.forward = broken
    harness.submit("in the inbox", [[1]], max_tokens=5)
    with pytest.raises(RuntimeError, match="device lost"):
        harness.worker.run()
    assert {f.error for f in harness.failures.values()} == {"EngineFailed"}
    assert set(harness.failures) == {"0", "1", "2", "3", "in the inbox"}
    with pytest.raises(Unavailable):
        harness.submit("late", [[1]])


def test_what_ended_before_a_fatal_error_has_ended():
    harness = Harness()
    harness.submit("short", [[1]], max_tokens=1)
    harness.submit("long", [[2]], max_tokens=100)
    plain = harness.engine.read

    def broken(step):
        yield from plain(step)
        raise RuntimeError("device lost")

    harness.engine.read = broken
    with pytest.raises(RuntimeError, match="device lost"):
        harness.worker.run()
    assert harness.finishes["short"][0].reason == "length"
    assert set(harness.failures) == {"long"}


@pytest.mark.parametrize("where", ["start", "text", "commit", "memory"])
def test_an_error_inside_one_request_ends_it_alone(where, monkeypatch):
    """A state that cannot be read, text that cannot be made, a state that cannot be given away, no memory for a copy of one."""
    harness = Harness(slots=4)
    expected = alone(list(b"fine"), max_tokens=40)
    harness.submit("before", [list(b"fine")] * 2, max_tokens=40)
    for _ in range(3):
        harness.worker.step()

    def broken(*args):
        raise torch.OutOfMemoryError("no room") if where == "memory" else ValueError("a defect")

    plain = harness.sessions.lease

    def lease(request, ready):
        def spoil(given):
            given.initial = broken if where == "start" else given.initial
            given.commit = broken if where == "commit" else given.commit
            ready(given)

        plain(request, spoil)

    harness.sessions.lease = lease
    if where == "memory":
        monkeypatch.setattr(harness.engine.state, "take", broken)
    harness.submit("bad", [list(b"bad")], max_tokens=10, session=Session(name="s"))
    harness.submit("after", [list(b"fine")], max_tokens=40)
    harness.worker.step()
    if where == "text":
        next(row for s, row in harness.worker._rows.items() if s.request.id == "bad").detokenizer = None
    harness.run()
    assert set(harness.failures) == {"bad"}
    failure = harness.failures["bad"]
    known = ("Unavailable", "out_of_memory") if where == "memory" else ("EngineFailed", "internal")
    assert (failure.error, failure.code) == known
    assert "defect" not in failure.message
    assert harness.sessions.released == ["s"]
    assert [harness.texts["before"][0], harness.texts["before"][1], harness.texts["after"][0]] == [expected] * 3
    assert harness.scheduler.num_free == 4
    assert harness.worker.stats()["requests_waiting"] == 0


def test_requests_that_wait_for_their_session_count_as_waiting():
    harness = Harness()
    harness.submit("runs", [[1]], max_tokens=50)
    harness.worker.step()
    harness.sessions.lease = lambda request, ready: None  # another turn has the session
    harness.submit("waits", [[1]], session=Session(name="s"))
    stats = harness.worker.stats()
    assert (stats["requests_running"], stats["requests_waiting"]) == (1, 1)

    def broken(request, ready):
        raise ValueError("a defect")

    harness.sessions.lease = broken
    with pytest.raises(ValueError, match="a defect"):
        harness.submit("fails", [[1]], session=Session(name="s"))
    assert harness.worker.stats()["requests_waiting"] == 1


def test_queue_limit_and_drain():
    harness = Harness(slots=1, queue=2)
    harness.submit("a", [[1]], max_tokens=50)
    harness.worker.step()
    harness.submit("b", [[1]])
    harness.submit("c", [[1]])
    with pytest.raises(Overloaded):
        harness.submit("d", [[1]])
    assert harness.worker.stats()["requests_waiting"] == 2
    harness.worker.drain()
    with pytest.raises(Unavailable):
        harness.submit("e", [[1]])
    harness.run()
    assert set(harness.finishes) == {"a", "b", "c"}
    assert harness.worker.stats()["requests_waiting"] == 0


def test_nothing_is_delivered_before_the_end_with_chunk_size_zero():
    harness = Harness()
    deltas = []
    plain = harness.deliver
    harness.worker.deliver = lambda batch: (
        deltas.extend(d for es in batch.values() for e in es for d in e.deltas),
        plain(batch),
    )
    harness.submit("whole", [[1], [2]], max_tokens=30, chunk_size=0)
    harness.run()
    assert len(deltas) == 2
    assert [d.tokens for d in deltas] == [30, 30]
    deltas.clear()
    harness.submit("fours", [[1]], max_tokens=30, chunk_size=4)
    harness.run()
    assert all(d.tokens >= 4 for d in deltas[:-1])
    assert sum(d.tokens for d in deltas) == 30


@pytest.mark.long
def test_host_cost_of_64_rows(capsys):
    """Everything but the model's forward costs at most 15 % of it: 64 rows, 2 layers of width 768."""
    harness = Harness(vocab=65536, slots=64, shape=(2, 768, 64, 64, 32, 128, 1.15))
    spent = {"forward": 0.0, "sample": 0.0}
    model, sampler = harness.engine.model, harness.engine.sampler

    def timed(name, function):
        def call(*args, **kwargs):
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return call

    model.forward, sampler.sample = timed("forward", model.forward), timed("sample", sampler.sample)
    harness.submit("r", [[i + 1] for i in range(64)], max_tokens=1000, loop="continuous")
    for _ in range(4):
        harness.worker.step()
    best = float("inf")
    for _ in range(3):
        spent.update(forward=0.0, sample=0.0)
        started = time.perf_counter()
        for _ in range(4):
            harness.worker.step()
        total = time.perf_counter() - started
        host = total - spent["forward"] - spent["sample"]
        best = min(best, (total - spent["forward"]) / spent["forward"])
    with capsys.disabled():
        print(f"\n64 rows: host {host / 4 / 64 * 1e6:.1f} us a row and step, forward {spent['forward'] / 4 * 1e3:.1f} ms, "
              f"sampling {spent['sample'] / 4 * 1e3:.1f} ms, all but forward {best:.1%} of it")  # fmt: skip
    assert best <= 0.15
