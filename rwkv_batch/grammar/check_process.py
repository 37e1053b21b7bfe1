"""A process that compiles grammars to see whether they can be, and ends itself when one takes too long or too much memory.

    python -m rwkv_batch.grammar.check_process SECONDS

The seconds are those of a core, so that a busy machine refuses nothing that an idle one takes. Compiling some grammars takes
exponential time and nothing can stop a thread that does; a process can. Over its standard input and output come and go frames:
4 bytes of length, big endian, and msgpack; a `Grammar` in, what is wrong with it out, or nil. It ends with its standard input.
"""

import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Grammar

MAX_BYTES = 2**30  # of address space
NICE = 10  # a check gives way to everything else
STARVED = 8  # times SECONDS by the clock, where other processes take the cores

LENGTH = struct.Struct(">I")


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame's content, None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Send a frame."""
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def main() -> None:
    """Check what comes until nothing more does."""
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; the parent says when to end
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # ends the process wherever it is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    from rwkv_batch.grammar import compiler  # takes 0.1 s: after the above
    from rwkv_batch.text.tokenizer import ByteTokenizer

    tokens = compiler.vocabulary(ByteTokenizer(), range(256))  # a grammar is the same over any vocabulary

    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    decode = msgspec.msgpack.Decoder(Grammar).decode
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    write_frame(outbox, msgspec.msgpack.encode(None))  # ready
    while (data := read_frame(inbox)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, STARVED * seconds)
        try:
            compiler.matcher(decode(data), tokens)
            answer = None
        except InvalidRequest as error:
            answer = error.message
        except Exception as error:
            answer = type(error).__name__
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        write_frame(outbox, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
