"""Figures that processes share through files, on full and damaged disks too."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from models import ROOT

from rwkv_batch import metrics

# A process that serves requests, then dies as some do.
SERVE = """
import os, sys
from pathlib import Path
from rwkv_batch import metrics
folder, name, room = sys.argv[1:]
if room == "full":
    def full(self, data):
        raise OSError(28, "No space left on device")
    Path.write_bytes = full
metrics.use_folder(folder, name)
http, engine = metrics.HttpMetrics(), metrics.EngineMetrics()
for reason in ("stop", "length", "error"):
    http.success.labels(reason).inc()
for status in range(400, 440):
    http.refused.labels(str(status)).inc()
http.streams.inc()
http.latency.observe(0.5)
engine.update({f"some_long_figure_{number}_total": 1 for number in range(40)})
engine.update({f"another_long_figure_{number}": 1 for number in range(80)})
print(metrics.page().decode())
sys.stdout.flush()
os._exit(9)
"""


def serve(folder: Path, name: str, room: str = "room") -> dict[str, float]:
    """What /metrics says after a process of this name has served."""
    command = [sys.executable, "-c", SERVE, str(folder), name, room]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 9, done.stderr
    assert ("No space left" in done.stderr) == (room == "full")
    lines = [line.rpartition(" ") for line in done.stdout.splitlines() if line.startswith(metrics.PREFIX)]
    return {name.removeprefix(metrics.PREFIX): float(value) for name, _, value in lines}


STOPS, STREAMS = 'request_success_total{finished_reason="stop"}', "sse_streams_open"


def test_a_successor_goes_on_with_the_totals_in_the_same_files(tmp_path):
    for turn in range(1, 4):
        found = serve(tmp_path, "http-0")
        assert (found[STOPS], found["e2e_request_latency_seconds_count"], found[STREAMS]) == (turn, turn, 1)
        metrics.forget(tmp_path, "http-0")
        assert {file.name for file in tmp_path.iterdir()} == {f"{kind}_http-0.db" for kind in metrics.KINDS}
    found = serve(tmp_path, "http-1")
    assert (found[STOPS], found[STREAMS]) == (4, 1)


def test_files_have_all_their_blocks_and_never_grow(tmp_path):
    """A block that the disk cannot give when it is written to ends the process: SIGBUS."""
    serve(tmp_path, "http-0")
    for file in tmp_path.iterdir():
        assert file.stat().st_size == metrics.FILE_BYTES
        assert file.stat().st_blocks * 512 >= metrics.FILE_BYTES
        assert int.from_bytes(file.read_bytes()[:4], sys.byteorder) <= metrics.FILE_BYTES / 2


def test_a_full_disk_costs_the_figures_of_the_processes_that_are_new(tmp_path):
    serve(tmp_path, "http-0")
    metrics.forget(tmp_path, "http-0")
    assert serve(tmp_path, "http-1", "full")[STOPS] == 1
    assert {file.name for file in tmp_path.iterdir()} == {f"{kind}_http-0.db" for kind in metrics.KINDS}


def test_a_successor_finds_room_on_a_full_disk(tmp_path, monkeypatch):
    serve(tmp_path, "http-0")

    def full(self, data):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "write_bytes", full)
    for kind in metrics.KINDS:
        metrics._reserve(tmp_path / f"{kind}_http-0.db")
    with pytest.raises(OSError, match="full"):
        metrics._reserve(tmp_path / "counter_http-1.db")


@pytest.mark.parametrize("junk", [b"", b"\xff" * 64, b"\x40\0\0\0\0\0\0\0\x04\0\0\0\xff\xff\xff\xff" + bytes(100)])
def test_damaged_files_begin_anew(tmp_path, junk):
    for kind in metrics.KINDS:
        (tmp_path / f"{kind}_http-0.db").write_bytes(junk)
    assert serve(tmp_path, "http-0")[STOPS] == 1
