#!/usr/bin/env python3
"""What sessions cost: resuming from each level, a durable turn, one state in many rows, and 10,000 sessions.

    python bench/state.py --device cuda --sizes 0.1b,1.5b,7.2b [--rows 7.2b] [--out bench/results/state-gpu.json]
    python bench/state.py --device cpu --sizes 0.1b --many 10000 --out bench/results/state-cpu.json

States are random; no model is needed but for --rows. Times are milliseconds, median and 99th percentile of --iters.

    resume   from the request for a session until its state lies in a slot, the device idle otherwise
    turn     from the end of a row until its state is committed to SQLite, fsync included
    stall    of that, the engine loop's own thread: what another row's next step waits for
    rows     one state put into 320 slots; new_rows: the state before the first token
    step     of a device that is busy, alone and while 8 sessions begin and end turns

--rows times steps of the server's engine with 320 rows of a random model: decoding, and fed a token each, where the rows go on,
are new, start from one session, or start from 320 sessions.
"""

import argparse
import json
import platform
import queue
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.engine import Bench, Options
from bench.synth_checkpoint import SIZES
from rwkv_batch import __version__
from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.states.fill import StateFill
from rwkv_batch.model.state import Snapshot, State
from rwkv_batch.model.weights import DTYPES, ModelShape
from rwkv_batch.request import Request, Sequence
from rwkv_batch.scheduling.plan import Plan, Row
from rwkv_batch.session_messages import Answer, Delete, Fork, Session, Status
from rwkv_batch.sessions.pool import Lease, StatePool
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.state_file import StateFile
from sampling.params import SamplingParams

ROWS = 320
ANSWER = Answer("", "stop", 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default="0.1b,1.5b,7.2b")
    parser.add_argument("--wkv-state", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--rows", default="", help="sizes of models whose steps are timed with 320 rows, on a GPU only")
    parser.add_argument("--many", type=int, default=0, help="also measure this many sessions of tiny states")
    parser.add_argument("--folder", help="where the session files are written; default: a new one in the system's")
    parser.add_argument("--out", help="write the figures to this file")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device(args.device)
    rows, many, steps = [], [], []
    for size in args.sizes.split(","):
        if size:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                rows.append(measure_size(size, device, args, Path(folder)))
                show(rows[-1])
    if args.many:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            many = measure_many(args.many, args.iters, Path(folder))
        for row in many:
            show(row)
    for size in args.rows.split(",") if args.rows else ():
        steps.append(measure_rows(size, args))
        show(steps[-1])
    if args.out:
        write(Path(args.out), device, {"states": rows, "many_sessions": many, "steps_of_320_rows": steps})


def show(row: dict) -> None:
    """Print one line."""
    print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))


def write(path: Path, device: torch.device, tables: dict[str, list[dict]]) -> None:
    """Keep the figures."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    head = {"date": date.today().isoformat(), "device": where, "torch": torch.__version__, "rwkv_batch": __version__}
    path.write_text(json.dumps({**head, "sqlite": sqlite3.sqlite_version, **tables}, indent=1) + "\n")


class Sessions:
    """A pool, and slots to resume into."""

    def __init__(self, shape: ModelShape, device: torch.device, path: Path, *, slots: int = 1, wkv=torch.float16, **options):
        self.device = device
        fill = StateFill(Launcher(compiler.library(device.index), device)) if device.type == "cuda" else None
        self.state = State(shape, slots, shift_dtype=torch.float16, wkv_dtype=wkv, device=device, fill=fill)
        self.pool = StatePool(SessionDatabase(path), StateFile("bench", shape), device, **options)
        self.num_requests = 0

    def random(self) -> Snapshot:
        """A state on the device."""
        shift = torch.randn_like(self.state.shift[:, :, 0].contiguous(), dtype=torch.float32).to(self.state.shift.dtype)
        wkv = torch.randn_like(self.state.wkv[:, 0].contiguous(), dtype=torch.float32).to(self.state.wkv.dtype)
        return Snapshot(shift, wkv, 100)

    def request(self, name: str, *, keep: bool = True) -> Request:
        """A turn."""
        self.num_requests += 1
        session = Session(name=name, keep=keep)
        return Request(id=str(self.num_requests), prompts=[[1]], sampling=SamplingParams(), max_tokens=1, session=session)

    def lease(self, name: str, *, keep: bool = True):
        """A session's lease."""
        answers: queue.SimpleQueue = queue.SimpleQueue()
        self.pool.lease(self.request(name, keep=keep), answers.put)
        return answered(answers)

    def resume(self, name: str) -> float:
        """Put a session into slot 0; seconds."""
        self.synchronize()
        began = time.perf_counter()
        lease = self.lease(name, keep=False)
        self.state.put(0, lease.initial())
        self.synchronize()
        seconds = time.perf_counter() - began
        lease.release()
        return seconds

    def turn(self, names: list[str]) -> tuple[float, float]:
        """Keep the state of slot 0 as these sessions' at once; seconds until the last is durable, and of the calling thread."""
        leases = [self.lease(name) for name in names]
        self.synchronize()
        answers: queue.SimpleQueue = queue.SimpleQueue()
        began = time.perf_counter()
        for lease in leases:
            lease.commit(self.state.take(0), 0, ANSWER, answers.put)
        own = time.perf_counter() - began
        for _ in leases:
            answered(answers)
        return time.perf_counter() - began, own

    def order(self, action) -> float:
        """Carry out an order; seconds."""
        answers: queue.SimpleQueue = queue.SimpleQueue()
        began = time.perf_counter()
        self.pool.execute(action, answers.put)
        answered(answers)
        return time.perf_counter() - began

    def timed(self, run: Callable[[], object]) -> float:
        """Seconds that `run` takes, to the end of what it gives the device."""
        self.synchronize()
        began = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def answered(answers: "queue.SimpleQueue"):
    """The answer; raised if it is an error."""
    result = answers.get(timeout=120)
    if isinstance(result, Exception):
        raise result
    return result


def milliseconds(name: str, seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, which for few samples is the worst."""
    worst = sorted(seconds)[min(len(seconds) - 1, round(0.99 * len(seconds)))]
    return {f"{name}_ms": statistics.median(seconds) * 1e3, f"{name}_p99_ms": worst * 1e3}


@torch.inference_mode()
def measure_size(size: str, device: torch.device, args: argparse.Namespace, folder: Path) -> dict:
    """All figures of one size of model."""
    layers, width, *_ = SIZES[size]
    shape = ModelShape(layers, width, 4 * width, 65536, 64, 64, 32, 128)
    slots = ROWS if device.type == "cuda" else 16
    iters, wkv = args.iters, DTYPES[args.wkv_state]
    sessions = Sessions(shape, device, folder / "sessions.db", slots=slots, wkv=wkv, l1_sessions=2, l2_sessions=4)
    random = sessions.random()
    sessions.state.put(0, random)
    row = {"size": size, "wkv": args.wkv_state, "mib": random.num_bytes / 2**20}
    names = [f"s{i}" for i in range(12)]
    for name in names:  # the last two end in L1, four in L2, the others on disk only
        sessions.turn([name])
    time.sleep(0.5)
    row |= milliseconds("resume_l1", [sessions.resume(names[-1]) for _ in range(iters)])
    by_level = {"l2": 4, "db": 8}
    for level, count in by_level.items():
        for name in names[:count]:
            sessions.resume(name)
        spent = [sessions.resume(names[i % count]) for i in range(iters)]
        row |= milliseconds(f"resume_{level}", spent)
    for name, count in (("turn", 1), ("8_turns", 8)):
        group = [f"t{i}" for i in range(count)]
        sessions.turn(group)
        spent = [sessions.turn(group) for _ in range(iters)]
        row |= milliseconds(name, [seconds for seconds, _ in spent])
        if count == 1:
            row |= milliseconds("stall", [own for _, own in spent])
    state, everywhere = sessions.state, range(slots)
    row |= milliseconds(f"rows_{slots}", [sessions.timed(lambda: state.put_many(everywhere, random)) for _ in range(9)])
    row |= milliseconds(f"new_rows_{slots}", [sessions.timed(lambda: state.clear(everywhere)) for _ in range(9)])
    forks = [Fork(name="s0", copies=[f"f{k}-{i}" for i in range(320)]) for k in range(3)]
    row |= milliseconds("fork_320", [sessions.order(fork) for fork in forks])
    if device.type == "cuda":
        row |= measure_steps(sessions, iters)
    totals = sessions.pool.stats()
    assert totals["state_loads_l2_total"] >= iters or device.type == "cpu", totals
    sessions.pool.close()
    return row


def measure_steps(sessions: Sessions, iters: int) -> dict[str, float]:
    """The time of a step of some milliseconds, alone and while 8 sessions begin and end turns all the time."""
    a = torch.randn(8192, 8192, device=sessions.device, dtype=torch.float16)
    out = torch.empty_like(a)
    names = [f"b{i}" for i in range(8)]
    running: set[str] = set()
    answers: queue.SimpleQueue = queue.SimpleQueue()  # (session, its lease or what was kept)
    figures: dict[str, float] = {}
    for phase, turning in (("step_alone", []), ("step_beside_turns", names)):
        spent, num_turns = [], 0
        for _ in range(iters * 4):
            began = time.perf_counter()
            for _ in range(4):
                torch.mm(a, a, out=out)
            for name in [name for name in turning if name not in running]:
                running.add(name)
                sessions.pool.lease(sessions.request(name), lambda lease, name=name: answers.put((name, lease)))
            while not answers.empty():
                name, found = answers.get()
                if isinstance(found, Lease):
                    initial = found.initial()
                    if initial is not None:
                        sessions.state.put(1, initial)
                    found.commit(sessions.state.take(0), 0, ANSWER, lambda kept, name=name: answers.put((name, kept)))
                else:
                    num_turns += 1
                    running.discard(name)
            torch.cuda.current_stream(sessions.device).synchronize()
            spent.append(time.perf_counter() - began)
        figures |= milliseconds(phase, spent)
        if turning:
            figures["turns_a_second"] = num_turns / sum(spent)
    while running:
        name, found = answers.get(timeout=60)
        if isinstance(found, Lease):
            found.release()
        running.discard(name)
    return figures


@torch.inference_mode()
def measure_rows(size: str, args: argparse.Namespace) -> dict:
    """What it costs a step that its rows start in it."""
    engine = Bench(Options(size, wkv_state=args.wkv_state), [ROWS], [(ROWS, 1)]).engine
    params = SamplingParams(top_k=50, top_p=0.6, ignore_eos=True)
    request = Request(id="rows", prompts=[[5]], copies=ROWS, sampling=params, max_tokens=9)
    sequences = [Sequence(request, index) for index in range(ROWS)]
    session = engine.take(0)
    sessions = [engine.take(slot) for slot in range(ROWS)]

    def step(ids: list[int], start: bool, initial: list[Snapshot | None]) -> float:
        for slot, sequence in enumerate(sequences):
            sequence.slot, sequence.initial = slot, initial[slot]
        plan = Plan([Row(sequence, ids, sample=True, start=start) for sequence in sequences])
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.collect(engine.submit(plan))
        torch.cuda.synchronize()
        return time.perf_counter() - began

    nothing: list[None] = [None] * ROWS
    figures: dict = {"size": size, "wkv": args.wkv_state}
    for name, ids, start, initial in (
        ("decode", [], False, nothing),
        ("go_on", [5], False, nothing),
        ("new", [5], True, nothing),
        ("one_session", [5], True, [session] * ROWS),
        ("320_sessions", [5], True, sessions),
    ):
        figures |= milliseconds(name, [step(ids, start, initial) for _ in range(args.iters + 2)][2:])
    return figures


def measure_many(count: int, iters: int, folder: Path) -> list[dict]:
    """The cost of each operation while there are more and more sessions."""
    shape = ModelShape(1, 64, 256, 256, 8, 8, 8, 8)
    sessions = Sessions(shape, torch.device("cpu"), folder / "sessions.db", wkv=torch.float32)
    sessions.state.put(0, sessions.random())
    rows = []
    for size in (count // 100, count // 10, count):
        there = rows[-1]["sessions"] if rows else 0
        for start in range(there, size, 32):
            sessions.turn([f"s{i}" for i in range(start, min(size, start + 32))])
        stride = max(1, size // iters)
        row = {"sessions": size, "mib": (folder / "sessions.db").stat().st_size / 2**20}
        row |= milliseconds("resume_db", [sessions.resume(f"s{i * stride}") for i in range(iters)])
        row |= milliseconds("turn_and_eviction", [sessions.turn([f"s{i * stride + 1}"])[0] for i in range(iters)])
        row |= milliseconds("status_of_100", [sessions.order(Status(limit=100)) for _ in range(iters)])
        row |= milliseconds("status_of_all", [sessions.order(Status()) for _ in range(iters)])
        row |= milliseconds("turn_beside_status_of_all", [turn_beside_list(sessions) for _ in range(iters)])
        row |= milliseconds("delete", [sessions.order(Delete(name=f"s{i * stride + 2}")) for i in range(iters)])
        rows.append(row)
    sessions.pool.close()
    return rows


def turn_beside_list(sessions: Sessions) -> float:
    """Seconds of a turn that is ready to be kept while all sessions are being listed."""
    listed: queue.SimpleQueue = queue.SimpleQueue()
    sessions.pool.execute(Status(), listed.put)
    seconds, _ = sessions.turn(["s0"])
    answered(listed)
    return seconds


if __name__ == "__main__":
    main()
