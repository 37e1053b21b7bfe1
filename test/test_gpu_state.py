"""Sessions on a GPU: every level gives the same bits, copies keep their place among the steps, rows continue from them."""

import queue
import time
from collections import defaultdict

import pytest
import torch
from test_gpu_engine import engine_of
from test_state_pool import ANSWER, Pool, same, take
from test_worker import GREEDY, Harness

from rwkv_batch.engine.engine_loop import EngineLoop
from rwkv_batch.errors import EngineFailed
from rwkv_batch.model.state import Snapshot, State
from rwkv_batch.model.weights import ModelShape
from rwkv_batch.request import Request
from rwkv_batch.scheduling.prefix_cache import PrefixCache
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.session_messages import Export, Session, Status
from rwkv_batch.sessions.pool import StatePool
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.state_file import StateFile
from rwkv_batch.text.tokenizer import ByteTokenizer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SHAPE = ModelShape(32, 4096, 16384, 65536, 8, 8, 8, 8)  # states of the 7.2B model


class GpuPool(Pool):
    """A pool of large states on the GPU, and slots beside it."""

    def __init__(self, path, **options):
        self.database = SessionDatabase(path)
        self.pool = StatePool(self.database, StateFile("gpu", SHAPE), DEVICE, **options)
        self.num_requests = 0
        self.slots = State(SHAPE, 4, shift_dtype=torch.float16, wkv_dtype=torch.float16, device=DEVICE)

    def random(self, seed: int) -> Snapshot:
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def values(like: torch.Tensor) -> torch.Tensor:
            return torch.randn(like.shape, generator=generator, device=DEVICE).half()

        return Snapshot(values(self.slots.shift[:, :, 0]), values(self.slots.wkv[:, 0]), seed)


def busy() -> None:
    """Give the GPU some 50 ms of work without waiting for it."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.float16)
    for _ in range(30):
        a = a @ a * 1e-3


def test_every_level_gives_the_same_bits(tmp_path):
    with GpuPool(tmp_path / "s.db", l1_sessions=2, l2_sessions=3) as pool:
        for i in range(8):
            pool.turn(f"s{i}", pool.random(i))
        tiers = {entry.name: entry.tier for entry in pool.order(Status()).sessions}
        assert [tiers[f"s{i}"] for i in range(8)] == ["db"] * 3 + ["l2"] * 3 + ["l1"] * 2
        with pool.pool.shared.lock:
            held = pool.pool.shared.tiers.l2.sessions["", "s4"].snapshot
        assert not held.wkv.is_cuda
        assert held.wkv.is_pinned()
        for i in (7, 4, 0, 3, 7):
            busy()
            lease = pool.lease(f"s{i}", keep=False)
            pool.slots.put(1, lease.initial())
            busy()
            assert same(pool.slots.take(1), pool.random(i))
            lease.release()
    with GpuPool(tmp_path / "s.db") as pool:
        assert same(pool.state("s5"), pool.random(5))


def test_a_commit_keeps_what_the_slot_held_when_it_was_made(tmp_path):
    """The slot is overwritten at once, behind much work, while the copy to the host waits for its turn."""
    with GpuPool(tmp_path / "s.db", l1_sessions=1, l2_sessions=1) as pool:
        answers = []
        for i in range(6):
            lease = pool.lease(f"s{i}")
            busy()
            pool.slots.put(0, pool.random(i))
            answers.append(pool.commit_later(lease, pool.slots.take(0)))
            pool.slots.put(0, pool.random(100 + i))
        for answer in answers:
            assert take(answer).durable
        for i in range(6):
            assert same(pool.state(f"s{i}"), pool.random(i))


def test_a_commit_does_not_hold_up_the_thread_that_makes_it(tmp_path):
    with GpuPool(tmp_path / "s.db") as pool:
        pool.turn("s", pool.random(0))
        lease, snapshot = pool.lease("s"), pool.random(1)
        torch.cuda.synchronize()
        busy()
        began = time.perf_counter()
        done = pool.commit_later(lease, snapshot)
        assert time.perf_counter() - began < 0.005
        take(done)


class GpuHarness(Harness):
    """The server's own engine, turned by hand."""

    def __init__(self, sessions, slots=16, *, shared=True):
        self.engine = engine_of("768", slots)
        self.tokenizer = ByteTokenizer()
        self.tokenizer.token_bytes = [b"", *(b"%d " % i for i in range(1, 4096))]
        self.sessions = sessions
        self.scheduler = Scheduler(num_slots=slots, prefill_budget=512, mixed=False)
        self.scheduler.prefixes = PrefixCache(2**30) if shared else None
        self.worker = EngineLoop(self.engine, self.scheduler, self.tokenizer, self.deliver, sessions=sessions)
        self.texts, self.finishes, self.failures = defaultdict(lambda: defaultdict(str)), defaultdict(dict), {}

    def run(self, limit=100_000):
        worker = self.worker
        while worker._active or worker._flight or worker._preparing or worker._inbox._queue.qsize():
            if worker._rows or worker._flight or worker._inbox._queue.qsize():
                worker.step()
            else:  # a session is loaded, or a turn is written: the loop would sleep until something comes in
                time.sleep(0.001)

    def turn(self, id, name, prompt, **fields):
        """Run one turn of a session and return its text."""
        self.submit(id, [prompt], session=Session(name=name, separate=False, **fields), max_tokens=20, sampling=GREEDY)
        self.run()
        return self.texts[id][0]


def pool_for(engine, path, **options):
    weights = engine.model.weights
    return StatePool(SessionDatabase(path), StateFile(weights.fingerprint, weights.shape), DEVICE, **options)


def kept(sessions: StatePool, name: str) -> Snapshot:
    """The state of a session, on the host."""
    found: queue.SimpleQueue = queue.SimpleQueue()
    session = Session(name=name, keep=False)
    sessions.lease(Request(id=f"kept {name}", prompts=[[1]], sampling=GREEDY, max_tokens=1, session=session), found.put)
    state = found.get(timeout=10).initial()
    return Snapshot(state.shift.cpu(), state.wkv.cpu(), state.elapsed)


def test_turns_continue_alike_from_every_level(tmp_path):
    """The same bits and the same text, from device memory, host memory, disk, and after a restart."""
    texts, states, prompt = set(), [], list(range(1, 40))
    for name, limits in {"l1": (9, 9), "l2": (1, 9), "db": (1, 0), "restart": (9, 9)}.items():
        options = {"l1_sessions": limits[0], "l2_sessions": limits[1]}
        sessions = pool_for(engine_of("768", 16), tmp_path / f"{name}.db", **options)
        harness = GpuHarness(sessions)
        for session in ("s", "x", "y", "z"):
            harness.turn(session, session, prompt)
        if name == "restart":
            sessions.close()
            sessions = pool_for(engine_of("768", 16), tmp_path / f"{name}.db", **options)
            harness = GpuHarness(sessions)
        texts.add(harness.turn("again", "s", prompt))
        assert harness.finishes["again"][0].session.version == 2
        assert sessions.stats()[f"state_loads_{'db' if name == 'restart' else name}_total"] >= 1
        states.append(kept(sessions, "s"))
        sessions.close()
    assert len(texts) == 1
    assert all(same(state, states[0]) for state in states)


def test_a_replayed_state_is_the_kept_one_up_to_rounding(tmp_path):
    """Nothing but ids is on disk after a crash; they are fed as a prefill."""
    states, prompt = [], list(range(1, 40))
    for crash in (False, True):
        sessions = pool_for(engine_of("768", 16), tmp_path / f"{crash}.db")
        harness = GpuHarness(sessions)
        for number in range(4):
            harness.turn(f"{number}", "s", prompt)
        if crash:
            sessions._thread._finish_seconds = 0.0
            sessions.close()
            sessions = pool_for(engine_of("768", 16), tmp_path / f"{crash}.db")
            harness = GpuHarness(sessions)
        found: queue.SimpleQueue = queue.SimpleQueue()
        out = tmp_path / f"{crash}.state"
        sessions.execute(Export(name="s", path=str(out)), found.put)
        until = time.monotonic() + 60
        while found.empty():
            assert time.monotonic() < until
            harness.worker.step()
        states.append(sessions.file.decode([out.read_bytes()]).snapshot)
        sessions.close()
    kept, replayed = states
    assert kept.elapsed == replayed.elapsed
    for one, other in ((kept.wkv, replayed.wkv), (kept.shift, replayed.shift)):
        assert (one.float() - other.float()).norm() < 1e-2 * one.float().norm()


def test_a_cancelled_turn_leaves_the_session_as_it_was(tmp_path):
    sessions = pool_for(engine_of("768", 16), tmp_path / "s.db")
    harness, prompt = GpuHarness(sessions), list(range(1, 40))
    for name in ("s", "control"):
        harness.turn(name, name, prompt)
    before = kept(sessions, "s")
    for cut in (1, 2, 3, 20, 40):
        harness.submit("long", [prompt], session=Session(name="s", separate=False), max_tokens=100_000, sampling=GREEDY)
        for _ in range(cut):
            harness.worker.step()
        harness.worker.cancel("long")
        harness.run()
        assert same(kept(sessions, "s"), before)
    assert harness.turn("next", "s", prompt) == harness.turn("next of control", "control", prompt)
    assert harness.scheduler.num_free == 16
    sessions.close()


def test_many_rows_start_from_one_session_in_one_step(tmp_path):
    """Their prompts fit into one step, so that every row sees the same kernels and has the same bits."""
    sessions = pool_for(engine_of("768", 16), tmp_path / "s.db")
    harness = GpuHarness(sessions)
    harness.turn("s", "s", list(range(1, 40)))
    session, num_steps = Session(name="s", keep=False, separate=False), harness.worker.stats()["steps_total"]
    harness.submit("rows", [list(range(1, 21))] * 16, session=session, max_tokens=20, sampling=GREEDY, loop="sync")
    harness.run()
    assert harness.worker.stats()["steps_total"] == num_steps + 20
    assert {harness.finishes["rows"][row].reason for row in range(16)} == {"length"}
    assert len(set(harness.texts["rows"].values())) == 1
    assert sessions.stats()["state_commits_total"] == 1
    sessions.close()


def test_a_prefix_from_the_cache_gives_the_text_it_gives_without():
    """Prompts of which the last step feeds the same 32 tokens with and without the cache, so that the numbers are the same."""
    prefix = [1 + i % 4000 for i in range(512)]
    prompts = [prefix + [1 + (17 * i + 31 * k) % 4000 for i in range(32)] for k in range(12)]
    texts = []
    for shared in (False, True):
        harness = GpuHarness(None, shared=shared)
        for number, text in enumerate(prompts):
            harness.submit(f"{number}", [text], max_tokens=32, sampling=GREEDY)
            harness.run()
        texts.append([harness.texts[f"{number}"][0] for number in range(len(prompts))])
        cached = [harness.finishes[f"{number}"][0].cached_tokens for number in range(len(prompts))]
        assert cached == [0, *[512 if shared else 0] * (len(prompts) - 1)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_shared_prefixes_are_fed_once():
    harness = GpuHarness(None)
    prompt = [1 + i % 4000 for i in range(2000)]
    harness.submit("r", [prompt] * 16, max_tokens=16, sampling=GREEDY)
    harness.run()
    assert [harness.finishes["r"][i].cached_tokens for i in range(16)] == [0] + [1984] * 15
    assert {harness.finishes["r"][i].reason for i in range(16)} == {"length"}
    assert len({harness.texts["r"][i] for i in range(1, 16)}) == 1
    assert harness.worker.stats()["prompt_tokens_total"] < 3000


def test_a_poisoned_state_is_not_kept(tmp_path):
    with GpuPool(tmp_path / "s.db") as pool:
        bad = pool.random(0)
        bad.wkv[31, 63, 63, 63] = float("inf")
        done = []
        pool.lease("s").commit(bad, 0, ANSWER, done.append)
        while not done:
            time.sleep(0.001)
        assert isinstance(done[0], EngineFailed)
        assert pool.state("s") is None
