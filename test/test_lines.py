"""Lines reach whoever reads, and who does not read holds up nobody."""

import fcntl
import logging
import os
import subprocess
import sys
import threading

import pytest
from models import ROOT

from rwkv_batch.server import lines
from rwkv_batch.server.lines import Handler, Lines


@pytest.fixture
def pipe():
    """A pipe that takes one page."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    ends = [reader, writer]
    yield ends
    for end in ends:
        os.close(end)


def read_all(reader: int, last: bytes) -> bytes:
    data = b""
    while not data.endswith(last):
        data += os.read(reader, 65536)
    return data


@pytest.mark.parametrize("blocking", [True, False])
def test_lines_wait_for_a_reader_and_come_in_order(pipe, blocking):
    reader, writer = pipe
    os.set_blocking(writer, blocking)
    written = Lines(writer)
    texts = [f"line {number} {'ä' * (number % 97)}" for number in range(2000)]
    for text in texts:
        written.write(text)
    written.flush(0.05)
    assert read_all(reader, b"1999 " + "ä".encode() * (1999 % 97) + b"\n").decode().splitlines() == texts
    written.flush(30)
    assert written._num_bytes == 0


def test_what_nobody_reads_is_dropped_and_counted(pipe, monkeypatch):
    monkeypatch.setattr(lines, "MAX_BYTES", 10_000)
    reader, writer = pipe
    written = Lines(writer)
    for _ in range(1000):
        written.write("x" * 99)
    assert written._num_bytes <= 10_000
    num_read = num_dropped = 0
    while num_read + num_dropped < 1000:  # there may be several notes
        for line in read_all(reader, b"\n").decode().splitlines():
            if line.endswith("in time"):
                num_dropped += int(line.split()[0])
            else:
                assert line == "x" * 99
                num_read += 1
    assert num_read + num_dropped == 1000
    assert num_read >= 100
    assert num_dropped > 0
    written.write("again")
    assert read_all(reader, b"again\n") == b"again\n"


def test_a_line_longer_than_a_pipe_takes_is_whole(pipe):
    reader, writer = pipe
    written = Lines(writer)
    written.write("a" * 100_000)
    written.write("b")
    assert read_all(reader, b"b\n") == b"a" * 100_000 + b"\nb\n"


def test_a_reader_that_has_gone_costs_nothing(pipe):
    reader, writer = pipe
    written = Lines(writer)
    end = os.dup(reader)
    os.dup2(writer, reader)  # closes the end that reads, and leaves something to close
    os.close(end)
    for _ in range(100):
        written.write("x")
    written.flush(30)
    assert written._num_bytes == 0


def test_records_become_lines_from_any_thread(pipe):
    reader, writer = pipe
    log = logging.Logger("test")
    log.addHandler(Handler(Lines(writer)))
    threads = [threading.Thread(target=lambda: [log.warning("one %s", "line") for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.warning("%d", "no number")
    log.warning("last")
    assert read_all(reader, b"last\n") == b"one line\n" * 400 + b"last\n"


LAST_WORDS = "import sys; from rwkv_batch.server import lines; [lines.ERR.write('x' * 999) for _ in range(100)]; "


@pytest.mark.parametrize("end", ["sys.exit(3)", "lines.leave(3)"])
def test_a_process_that_ends_says_its_last_words_but_waits_for_nobody(pipe, end):
    command = [sys.executable, "-c", LAST_WORDS + end]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (3, (b"x" * 999 + b"\n") * 100)
    assert subprocess.run(command, cwd=ROOT, stderr=pipe[1], timeout=30, check=False).returncode == 3
