"""Sessions with a real tiny model: turns equal one row over the joined text, on every level and after a restart."""

import queue
import random
import threading
import time

import pytest
import torch
from models import TINY, random_weights
from test_model import greedy
from test_worker import GREEDY, STOPS, Harness, alone, visible_ids

from rwkv_batch.engine.engine_loop import checkpoint_distance
from rwkv_batch.errors import InvalidRequest, StorageFailed
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.state import Snapshot, State
from rwkv_batch.request import Request
from rwkv_batch.session_messages import Delete, Export, Import, Session, Status
from rwkv_batch.sessions.pool import StatePool
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.state_file import StateFile
from sampling.params import SamplingParams


class SessionHarness(Harness):
    """A worker turned by hand whose sessions are in a real pool."""

    def __init__(self, path, *, vocab=65536, pool=None, **fields):
        super().__init__(vocab=vocab, **fields)
        weights = self.engine.model.weights
        file = StateFile(weights.fingerprint, weights.shape)
        self.sessions = StatePool(SessionDatabase(path), file, torch.device("cpu"), copies=self.copies, **(pool or {}))
        self.sessions.use(self.worker.compute)
        self.worker.sessions = self.sessions

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sessions.close()

    def run(self, limit=100_000):
        worker, until = self.worker, time.monotonic() + 60
        while worker._active or worker._flight or worker._preparing or worker._inbox._queue.qsize():
            assert time.monotonic() < until
            if worker._rows or worker._flight or worker._inbox._queue.qsize():
                worker.step()
            else:  # a session is loaded, or a turn is written: the loop would sleep until something comes in
                time.sleep(0.001)

    def turn(self, name, prompt, *, id=None, **fields):
        """Run one turn of a session and return (text, Finish)."""
        id = id or f"{name}-{len(self.finishes)}"
        session = {k: fields.pop(k) for k in ("key", "node", "expect_version", "separate", "keep") if k in fields}
        self.submit(id, [prompt], session=Session(name=name, **session), **fields)
        self.run()
        return (self.texts[id][0], self.finishes[id][0]) if id in self.finishes else self.failures[id]

    def lease(self, name):
        """A lease of a session that changes nothing."""
        request = Request(id=name, prompts=[[1]], sampling=GREEDY, max_tokens=1, session=Session(name=name, keep=False))
        found = queue.SimpleQueue()
        self.sessions.lease(request, found.put)
        return found.get(timeout=60)

    def kept(self, name):
        """What a session goes on from: a state, and ids that lead to its own."""
        lease = self.lease(name)
        return lease.initial(), lease.ids

    def whole(self, name):
        """The state of a session."""
        initial, ids = self.kept(name)
        state = State(self.engine.model.weights.shape, 1)
        state.clear([0])
        if initial is not None:
            state.put(0, initial)
        if ids:
            self.engine.model.forward(torch.tensor(ids), PackedRows([0], [len(ids)]), state)
        return state.take(0)

    def crash(self):
        """End as a killed server does, but for what is being written."""
        self.sessions._thread._finish_seconds = 0.0
        self.sessions.close()

    def order(self, action):
        """What comes of an order."""
        found = queue.SimpleQueue()
        self.sessions.execute(action, found.put)
        return found.get(timeout=60)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sessions.db"


TURNS = [*((256, 1, ends_by) for ends_by in STOPS), (65536, 1, "stop inside a token")]
MORE_TURNS = [pytest.param(65536, 10, ends_by, marks=pytest.mark.long) for ends_by in STOPS]


@pytest.mark.parametrize(("vocab", "num_cases", "ends_by"), [*TURNS, *MORE_TURNS])
def test_two_turns_equal_one_with_the_joined_text(path, vocab, num_cases, ends_by):
    """Contract 9, line 19. The second turn begins behind exactly one blank line, whatever newlines both texts have."""
    rng = random.Random(f"{vocab}{ends_by}")
    with SessionHarness(path, vocab=vocab) as harness:
        tokenizer, model = harness.tokenizer, harness.engine.model
        for case in range(num_cases):
            first = tokenizer.encode("User: " + "".join(rng.choice("abc de\n") for _ in range(rng.randrange(1, 60))) + "\n\nA:")
            count = rng.randrange(2, 40)
            ids, _ = greedy(model, first, count)
            data = b"".join(tokenizer.token_bytes[i] for i in ids)
            fields = {"max_tokens": count}
            if ends_by == "stop id":
                fields["stop_ids"] = [ids[-1]]
            elif ends_by == "stop text":
                fields["stop_texts"] = [data[-min(len(data), 9) :]]
            elif ends_by == "stop inside a token":
                at = rng.randrange(len(data))
                fields["stop_texts"] = [data[at : at + 1]]
            elif ends_by == "end token":
                fields["sampling"] = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0)
            lead = rng.choice(("", "\n", "\n\n"))
            text, finish = harness.turn(f"s{case}", first, **fields)
            assert finish.session.version == 1
            joined = first + visible_ids(tokenizer, ids, fields)
            assert finish.session.tokens == len(joined)
            ends = tokenizer.decode_bytes(joined)
            newlines = min(2, len(ends) - len(ends.rstrip(b"\n")))
            again = tokenizer.encode("User: go on" + "\n\nAssistant:")
            expected = alone(joined + tokenizer.encode("\n" * (2 - newlines)) + again, max_tokens=12, vocab=vocab)
            text, finish = harness.turn(f"s{case}", tokenizer.encode(lead) + again, max_tokens=12)
            assert text == expected
            assert finish.session.version == 2


@pytest.mark.parametrize("level", ["l1", "l2", "db", "restart"])
def test_the_level_is_invisible(path, level):
    limits = {"l1": (8, 8), "l2": (1, 8), "db": (1, 0), "restart": (8, 8)}[level]
    options = {"l1_sessions": limits[0], "l2_sessions": limits[1]}
    with SessionHarness(path, vocab=256, pool=options) as harness:
        first, second = list(b"User: one\n\nA:"), list(b"User: two\n\nA:")
        harness.turn("same", first, max_tokens=20)
        expected, _ = harness.turn("same", second, max_tokens=20)
        harness.turn("s", first, max_tokens=20)
        state, ids = harness.kept("s")
        for other in range(3):
            harness.turn(f"other{other}", first, max_tokens=3)
        if level == "restart":
            harness.sessions.close()
            harness = SessionHarness(path, vocab=256)
        assert harness.order(Status(name="s")).sessions[0].tier == {"restart": "db"}.get(level, level)
        found, found_ids = harness.kept("s")
        assert torch.equal(found.wkv, state.wkv)
        assert torch.equal(found.shift, state.shift)
        assert found_ids == ids
        assert harness.turn("s", second, max_tokens=20, id="again")[0] == expected
        harness.sessions.close()


def test_a_turn_ends_only_when_it_is_on_disk_and_holds_up_nobody(path, monkeypatch):
    with SessionHarness(path, vocab=256) as harness:
        go = threading.Event()
        write = harness.sessions.store.write
        monkeypatch.setattr(harness.sessions.store, "write", lambda turns: (go.wait(60), write(turns)))
        harness.submit("turn", [[1, 2, 3]], session=Session(name="s"), max_tokens=4)
        harness.submit("other", [[1, 2, 3]], max_tokens=40)
        while "other" not in harness.finishes or 0 not in harness.finishes["other"]:
            harness.worker.step()
        assert harness.texts["turn"][0]  # the text is there, the end is not
        assert not harness.finishes["turn"]
        assert harness.scheduler.num_free == 8
        go.set()
        harness.run()
        assert harness.finishes["turn"][0].session.durable


class RunningStep:
    """The event behind a step that runs until the turn is told of."""

    def __init__(self, harness, go):
        self.harness = harness
        self.go = go

    def synchronize(self):
        self.go.set()
        until = time.monotonic() + 60
        while not self.harness.finishes["turn"]:
            assert time.monotonic() < until, "the step is waited for although a turn is to be told of"
            time.sleep(0.001)


def test_a_turn_that_is_kept_is_told_while_the_next_step_runs(path):
    with SessionHarness(path, vocab=256) as harness:
        submit, write, go, ends = harness.engine.submit, harness.sessions.store.write, threading.Event(), []

        def slowly(plan):
            step = submit(plan)
            running = [row.active.request.id for row in harness.worker._rows.values()]
            if harness.texts["turn"][0] and "turn" not in running and not ends:
                step.arrived = RunningStep(harness, go)
                ends.append(step)
            return step

        def when_it_runs(versions):
            go.wait(60)
            write(versions)

        harness.engine.submit, harness.sessions.store.write = slowly, when_it_runs
        harness.submit("turn", [[1, 2, 3]], session=Session(name="s"), max_tokens=4, chunk_size=1)
        harness.submit("other", [[1, 2, 3]], max_tokens=40)
        harness.run()
        assert ends
        assert harness.finishes["turn"][0].session.durable


def test_a_cancelled_turn_leaves_the_session_and_lets_the_next_one_in(path):
    with SessionHarness(path, vocab=256) as harness:
        harness.turn("s", [1, 2, 3], max_tokens=5)
        before = harness.whole("s")
        harness.submit("long", [[4, 5]], session=Session(name="s"), max_tokens=500)
        harness.submit("next", [[6, 7]], session=Session(name="s"), max_tokens=3)
        harness.submit("gone", [[6, 7]], session=Session(name="s"), max_tokens=3)
        for _ in range(5):
            harness.worker.step()
        harness.worker.cancel("gone")
        harness.worker.cancel("long")
        harness.run()
        assert harness.finishes["next"][0].session.version == 2
        assert not harness.finishes["long"]
        assert not harness.finishes["gone"]
        assert harness.worker.stats()["requests_waiting"] == 0
        assert not torch.allclose(harness.whole("s").wkv, before.wkv)


def test_a_poisoned_turn_is_not_kept(path):
    with SessionHarness(path, vocab=256) as harness:
        harness.turn("s", [1, 2, 3], max_tokens=5)
        before = harness.whole("s")
        harness.submit("sick", [[4, 5]], session=Session(name="s"), max_tokens=50)
        while not harness.worker._rows:
            harness.worker.step()
        for _ in range(3):
            harness.worker.step()
        harness.engine.state.wkv[:, next(iter(harness.worker._rows)).slot] = float("nan")
        harness.run()
        assert harness.finishes["sick"][0].reason == "error"
        assert harness.finishes["sick"][0].session is None
        assert (harness.whole("s").wkv - before.wkv).abs().max() < 1e-5


def test_delete_ends_the_turn_in_progress(path):
    with SessionHarness(path, vocab=256) as harness:
        harness.turn("s", [1, 2, 3], max_tokens=5)
        harness.submit("turn", [[4, 5]], session=Session(name="s"), max_tokens=100_000)
        while not harness.worker._rows:
            harness.worker.step()
        assert harness.order(Delete(name="s")).found
        harness.run()
        assert harness.failures["turn"].code == "session_deleted"
        assert harness.scheduler.num_free == 8


def test_checkpoints_lie_closer_where_states_are_large():
    found = [checkpoint_distance(2**20 * mib) for mib in (1, 6, 16, 64)]
    assert found == [64, 42, 16, 16]


@pytest.mark.parametrize("distance", [1, 5, 64])
def test_what_is_kept_does_not_depend_on_the_checkpoints(path, distance):
    states = []
    for number in (16, distance):
        with SessionHarness(path.with_name(f"{number}.db"), vocab=256) as harness:
            harness.worker.checkpoint_tokens = number
            for count in (40, 7, 20):
                harness.turn("s", list(b"User: go on\n\nA:"), max_tokens=count)
            harness.turn("s", list(b"User: and now\n\nA:"), max_tokens=50, stop_texts=[b"e"])
            states.append(harness.whole("s"))
    assert states[0].elapsed == states[1].elapsed
    assert (states[0].wkv - states[1].wkv).norm() < 1e-5 * states[0].wkv.norm()


def test_idempotency_key(path):
    with SessionHarness(path, vocab=256) as harness:
        text, finish = harness.turn("s", [1, 2, 3], max_tokens=9, key="k", chunk_size=1)
        again, replayed = harness.turn("s", [1, 2, 3], max_tokens=9, key="k", chunk_size=0)
        assert (again, replayed.completion_tokens, replayed.session.version) == (text, 9, 1)
        assert (finish.session.replayed, replayed.session.replayed) == (False, True)
        assert harness.turn("s", [1, 2, 4], max_tokens=9, key="k").code == "idempotency_key_reused"
        assert harness.turn("s", [1, 2, 3], max_tokens=9)[1].session.version == 2


def test_many_rows_from_one_session(path):
    with SessionHarness(path, vocab=256, slots=8) as harness:
        harness.turn("s", [1, 2, 3], max_tokens=9)
        state, _ = harness.kept("s")
        fields = {"session": Session(name="s", keep=False), "max_tokens": 10}
        harness.submit("rows", [[5, 6]] * 8, sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0), **fields)
        harness.run()
        assert len(harness.finishes["rows"]) == 8
        assert len(set(harness.texts["rows"].values())) > 4
        assert torch.equal(harness.kept("s")[0].wkv, state.wkv)
        with pytest.raises(InvalidRequest):
            harness.submit("more", [[1], [2]], session=Session(name="s"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_state_in_many_slots(dtype):
    shape = random_weights(TINY, 256).shape
    many, each = (State(shape, 6, shift_dtype=dtype, wkv_dtype=dtype) for _ in range(2))
    snapshot = Snapshot(torch.randn_like(many.shift[:, :, 0]).float(), torch.randn_like(many.wkv[:, 0]).float(), 9)
    many.put_many([4, 0, 2], snapshot)
    for slot in (4, 0, 2):
        each.put(slot, snapshot)
    assert torch.equal(many.wkv, each.wkv)
    assert torch.equal(many.shift, each.shift)
    assert many.elapsed == each.elapsed == [9, 0, 9, 0, 9, 0]


def test_nodes(path):
    with SessionHarness(path, vocab=256) as harness:
        assert harness.turn("d", [1, 2], node=0, max_tokens=5)[1].session.node == 1
        text2, finish = harness.turn("d", [3, 4], node=1, max_tokens=5)
        assert finish.session.node == 2
        text3, finish = harness.turn("d", [3, 4], node=1, max_tokens=5)
        assert (finish.session.node, text3) == (3, text2)  # both continue from 1
        assert harness.turn("d", [3, 4], node=9, max_tokens=5).code == "node_not_found"


def test_a_turn_without_tokens_feeds_its_prompt(path):
    with SessionHarness(path, vocab=256) as harness:
        text, finish = harness.turn("s", [1, 2, 3], max_tokens=0)
        assert (text, finish.session.tokens) == ("", 3)
        harness.turn("t", [1, 2, 3, 4, 5], max_tokens=0)
        harness.turn("s", [4, 5], max_tokens=0, separate=False)
        assert (harness.whole("s").wkv - harness.whole("t").wkv).abs().max() < 1e-5


def test_the_end_of_the_worker_tells_how_many_sessions_it_could_not_write(path, monkeypatch):
    with SessionHarness(path, vocab=256, pool={"durability": "shutdown"}) as harness:
        for name in "ab":
            harness.turn(name, [1, 2, 3], max_tokens=3)
        monkeypatch.setattr(harness.sessions.store, "write", lambda _: (_ for _ in ()).throw(StorageFailed("full")))
        harness.worker.stop()
        harness.worker.run()
        assert harness.worker.lost_sessions == 2


TEXTS = [b"User: My name is Tom.\n\nA:", b"User: And yours?\n\nA:", b"User: Say it again.\n\nA:"]


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_a_replayed_state_is_the_kept_one_and_says_the_same(path, durability):
    """Nothing but ids is left after a crash. The usage does not count them."""
    with SessionHarness(path, vocab=256, pool={"durability": durability}) as harness:
        finishes = [harness.turn("s", list(text), max_tokens=40)[1] for text in TEXTS]
        kept = harness.whole("s")
        harness.crash()
        lively = SessionHarness(path.with_name("other.db"), vocab=256)
        for text in TEXTS:
            lively.turn("s", list(text), max_tokens=40)
        expected, finish = lively.turn("s", [97, 98], max_tokens=40)
        lively.sessions.close()
        harness = SessionHarness(path, vocab=256, pool={"durability": durability})
        initial, ids = harness.kept("s")
        assert (initial is None, len(ids)) == ((True, finishes[-1].session.tokens) if durability == "log" else (False, 0))
        replayed = harness.whole("s")
        assert (replayed.wkv - kept.wkv).norm() < 1e-5 * kept.wkv.norm()
        assert (replayed.shift - kept.shift).norm() < 1e-5 * kept.shift.norm()
        text, again = harness.turn("s", [97, 98], max_tokens=40, id="again")
        assert text == expected
        assert (again.prompt_tokens, again.cached_tokens, again.session) == (
            finish.prompt_tokens, 0, finish.session
        )  # fmt: skip
        harness.sessions.close()


def test_the_rows_of_a_session_that_lags_wait_for_one_that_feeds_its_log(path):
    with SessionHarness(path, vocab=256) as harness:
        harness.turn("s", list(b"User: one\n\nA:" * 5), max_tokens=30)
        fields = {"session": Session(name="s", keep=False), "max_tokens": 10}
        harness.submit("before", [[5, 6]] * 8, **fields)
        harness.run()
        expected = harness.texts["before"]
        harness.crash()
        harness = SessionHarness(path, vocab=256)
        before = harness.worker.stats()["prompt_tokens_total"]
        lag = len(harness.lease("s").ids)
        harness.submit("rows", [[5, 6]] * 8, **fields)
        harness.run()
        assert harness.texts["rows"] == expected
        assert harness.worker.stats()["prompt_tokens_total"] - before < lag + 8 * 5
        assert harness.worker.stats()["requests_waiting"] == 0
        harness.sessions.close()


def test_a_file_of_a_session_that_lags_is_whole(path, tmp_path):
    out = tmp_path / "state"
    with SessionHarness(path, vocab=256) as harness:
        harness.turn("s", list(TEXTS[0]), max_tokens=30)
        kept = harness.whole("s")
        found = queue.SimpleQueue()
        harness.sessions.execute(Export(name="s", path=str(out)), found.put)
        until = time.monotonic() + 60
        while found.empty():
            assert time.monotonic() < until
            harness.worker.step()
        assert harness.order(Import(name="t", path=str(out))).sessions[0].tokens == kept.elapsed
        assert harness.kept("t")[1] == []
        assert (harness.whole("t").wkv - kept.wkv).abs().max() < 1e-5
