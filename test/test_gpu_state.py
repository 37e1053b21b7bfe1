"""Sessions on a GPU: every level gives the same bits, copies keep their place among the steps, rows continue from them."""

import time
from collections import defaultdict

import pytest
import torch
from test_gpu_engine import engine_of
from test_state_pool import ANSWER, Pool, same, take
from test_worker import GREEDY, Harness

from rwkv_batch.errors import EngineFailed
from rwkv_batch.prefix_cache import PrefixCache
from rwkv_batch.scheduler import Scheduler
from rwkv_batch.session_db import SessionDatabase
from rwkv_batch.sessions import Session, Status
from rwkv_batch.state import Snapshot, State
from rwkv_batch.state_file import StateFile
from rwkv_batch.tokenizer import ByteTokenizer
from rwkv_batch.weights import ModelShape
from rwkv_batch.worker import Worker
from state_pool import StatePool

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
        held = pool.pool._levels["l2"]["", "s4"].snapshot
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

    def __init__(self, sessions, slots=16):
        self.engine = engine_of("768", slots)
        self.tokenizer = ByteTokenizer()
        self.tokenizer.token_bytes = [b"", *(b"%d " % i for i in range(1, 4096))]
        self.sessions = sessions
        self.scheduler = Scheduler(num_slots=slots, prefill_budget=512, mixed=False, prefixes=PrefixCache(2**30))
        self.worker = Worker(self.engine, self.scheduler, self.tokenizer, self.deliver, sessions=sessions)
        self.texts, self.finishes, self.failures = defaultdict(lambda: defaultdict(str)), defaultdict(dict), {}

    def run(self, limit=100_000):
        worker = self.worker
        while worker._ongoing or worker._step or worker._leasing or worker._inbox._queue.qsize():
            worker.turn()


def pool_for(engine, path, **options):
    weights = engine.model.weights
    return StatePool(SessionDatabase(path), StateFile(weights.fingerprint, weights.shape), DEVICE, **options)


def test_turns_continue_alike_from_every_level(tmp_path):
    texts = set()
    prompt = list(range(1, 40))
    for name, limits in {"l1": (9, 9), "l2": (1, 9), "db": (1, 0)}.items():
        sessions = pool_for(engine_of("768", 16), tmp_path / f"{name}.db", l1_sessions=limits[0], l2_sessions=limits[1])
        harness = GpuHarness(sessions)
        for turn, session in enumerate(("s", "x", "y", "z", "s")):
            harness.submit(f"{turn}", [prompt], session=Session(name=session, separate=False), max_tokens=20, sampling=GREEDY)
            harness.run()
        assert harness.finishes["4"][0].session.version == 2
        stats = sessions.stats()
        assert stats[f"state_loads_{name}_total"] >= 1
        texts.add(harness.texts["4"][0])
        sessions.close()
    assert len(texts) == 1


def test_shared_prefixes_are_fed_once(tmp_path):
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
