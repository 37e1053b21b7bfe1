"""The command `batch IN OUT`: an engine, and one process that sends it the lines of a file, with no address to listen on."""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rwkv_batch.config import MAX_QUEUE
from rwkv_batch.config_sources import from_layers, make_parser, read_flags
from rwkv_batch.errors import RwkvBatchError, UsageError
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.server.child import Child
from rwkv_batch.server.exit_codes import EXIT_UNFINISHED, EXIT_USAGE
from rwkv_batch.server.supervisor import Supervisor, begin, own_folder

log = logging.getLogger(__name__)


CRASHES = 4  # end the batch, at least: three of them find a line that ends the engine


class BatchSupervisor(Supervisor):
    """Keeps the engine alive while one process, whose end is the end of all, has it answer the lines of a file."""

    front = "batch"
    num_fronts = 1

    def announce(self, infos: list[EngineInfo]) -> None:
        """The process of the batch tells what there is to tell."""

    def hear(self, child: Child, report: dict[str, Any]) -> None:
        """See Supervisor. The crashes by which a line was found that ends the engine are no more of its faults."""
        super().hear(child, report)
        if report["event"] == "found":
            for engine in self.engines.values():
                engine.crashes.clear()

    def bury(self, child: Child, status: int) -> int | None:
        """See Supervisor. A batch process that was killed has left whole answers behind, so the same command goes on."""
        if child.role != self.front:
            return super().bury(child, status)
        self.retire(child)
        if status < 0:
            log.error("the batch process was ended by signal %d; the same command goes on", -status)
        return status if status >= 0 else EXIT_UNFINISHED

    def stop(self) -> int:
        """End both; returns how the batch process has ended."""
        fronts = [child for child in self.children if child.role == self.front]
        code = super().stop()
        return max([child.process.poll() or 0 for child in fronts], default=code)


def answer_file(argv: Sequence[str], environ: Mapping[str, str], program: Sequence[str]) -> int:
    """Answer the lines of IN into OUT; returns the exit code. `program` is the command that starts a child, given its role."""
    try:
        flags = read_flags(batch_parser(), argv)
        files = [flags.pop("source"), flags.pop("target")]
        check_files(*map(Path, files))
        config = begin(from_layers(flags, environ))
        with own_folder() as folder:
            # No session is kept, so none needs memory, and nobody else can fill the queue.
            nowhere = {"state_url": None, "snapshots": None}
            without_sessions = nowhere | {"state_db": str(folder / "sessions.db"), "l1_sessions": 1, "l2_sessions": 0}
            crashes = max(config.max_crashes, CRASHES)
            config = replace(config, queue=MAX_QUEUE, max_crashes=crashes, **without_sessions)
            return BatchSupervisor(config, folder, program, files).run()
    except RwkvBatchError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE


def batch_parser() -> argparse.ArgumentParser:
    """The command line: two files, and what the server takes too."""
    parser = make_parser()
    parser.prog += " batch"
    parser.description = (
        "Answers the requests in a file of OpenAI's batch format, one JSON object a line, in their order. Given again after it "
        "was stopped or killed, it goes on behind the last line of OUT. Flags about HTTP and sessions change nothing."
    )
    parser.epilog = None
    parser.add_argument("source", metavar="IN", help="requests: custom_id, method, url and body in each line")
    parser.add_argument("target", metavar="OUT", help="their answers, one a line; made, or gone on with")
    return parser


def check_files(source: Path, target: Path) -> None:
    """Raise UsageError for files that cannot be those of a batch, before the model is loaded."""
    try:
        with source.open("rb"):
            pass
        if target.exists() and target.samefile(source):
            raise UsageError("OUT is the same file as IN")
        with target.open("ab"):
            pass
    except OSError as error:
        raise UsageError(f"cannot open {error.filename}: {error.strerror}") from None
