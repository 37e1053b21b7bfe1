"""The process that owns the session file where several engines use it."""

import logging
import sys
import threading
import time
from functools import partial

from rwkv_batch.errors import UsageError
from rwkv_batch.server.control import BEAT_SECONDS, Control, freeze_loaded
from rwkv_batch.server.exit_codes import EXIT_ENGINE, EXIT_USAGE
from rwkv_batch.sessions.remote.messages import path_in
from rwkv_batch.sessions.remote.server import StoreServer
from rwkv_batch.sessions.sqlite import open_store

log = logging.getLogger(__name__)


def run(control: Control) -> int:
    """Answer engines until told to stop; returns the exit code."""
    try:
        server = StoreServer(path_in(control.folder), partial(open_store, control.config))
        server.use(control.config.state_db)
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    control.listen({"drain": lambda: None, "stop": server.stop})
    threading.Thread(target=_beat, args=(control,), name="beat", daemon=True).start()
    freeze_loaded(collect_rarely=True)
    control.report("ready")
    try:
        server.run()
    except Exception:
        log.exception("the store of sessions cannot go on")
        return EXIT_ENGINE
    return 0


def _beat(control: Control) -> None:
    """Give signs of life: a disk that hangs is no reason to be started again, for it would hang once more."""
    while True:
        time.sleep(BEAT_SECONDS)
        control.beat()
