"""The process of the command `batch`, in the place of the HTTP processes."""

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

from routes.offline.answer_file import AnswerFile
from routes.offline.offline_app import OfflineApp
from routes.offline.pipeline import Pipeline
from routes.offline.progress import ProgressReport, say
from routes.offline.request_file import RequestFile
from rwkv_batch import metrics
from rwkv_batch.errors import UsageError
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.server.control import BEAT_SECONDS, Control
from rwkv_batch.server.exit_codes import EXIT_ERRORS, EXIT_LOST, EXIT_UNFINISHED, EXIT_USAGE

log = logging.getLogger(__name__)


def run(control: Control) -> int:
    """Answer the lines of one file into another; returns the exit code."""
    source, target = map(Path, control.birth.arguments)
    threading.Thread(target=beat, args=(control,), daemon=True).start()
    control.report("ready")
    try:
        with source.open("rb") as file:
            answers = AnswerFile(target)
            requests = RequestFile(file, control.config.max_body_bytes)
            progress = ProgressReport(os.fstat(file.fileno()).st_size)
            answers.resume(requests)
            progress.resumed(answers)
            code = asyncio.run(answer_all(control, requests, answers, progress))
            answers.sync()
            return code
    except UsageError as error:
        say(f"error: {error.message}")
        return EXIT_USAGE
    except OSError as error:
        say(f"error: {error.filename or target}: {error.strerror}; the same command goes on when that is mended")
        return EXIT_LOST


async def answer_all(control: Control, requests: RequestFile, answers: AnswerFile, progress: ProgressReport) -> int:
    """Connect to the engine and run the pipeline; returns the exit code. Raises OSError."""
    pace = {"heartbeat": control.config.heartbeat, "peer_seconds": control.config.peer_seconds}
    client = EngineClient(control.birth.seats, **pace)
    app = OfflineApp(control.config, client, metrics.HttpMetrics(), control.folder)
    pipeline = Pipeline(app, requests, answers, progress, lambda: control.report("found"))
    control.listen(
        {"drain": lambda: setattr(pipeline, "stopping", True), "stop": lambda: setattr(pipeline, "aborted", True)},
    )
    client.start()
    try:
        complete = await pipeline.run()
    finally:
        client.close()
    progress.end(app, requests, answers, complete=complete)
    if not complete:
        return EXIT_UNFINISHED
    return EXIT_ERRORS if answers.num_errors else 0


def beat(control: Control) -> None:
    """Give the supervisor signs of life."""
    while True:
        control.beat()
        time.sleep(BEAT_SECONDS)
