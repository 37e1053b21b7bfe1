"""Counters and histograms in Prometheus' form; names are vLLM's with our prefix, so that its dashboards need one replacement.

Every process writes its figures into files of one shared folder (prometheus-client's multiprocess mode); `page` adds them all
up, so any HTTP process can answer for the whole server, also while the engine is gone. The files of a process that ended are
taken over by its successor. Without the folder, as in tests, the figures are this process's own. Knows nothing of HTTP.
"""

import logging
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter

log = logging.getLogger(__name__)

FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported
KINDS = ("counter", "histogram", "gauge_livesum")
FILE_BYTES = 1 << 16  # of each kind and process, more than twice what is used
PREFIX = "rwkv_batch:"
CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = (1, 10, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

ENGINE_NAMES = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "generation_tokens",
    "prefix_queried_tokens_total": "prefix_cache_queries",
    "prefix_cached_tokens_total": "prefix_cache_hits",
}


def use_folder(path: str | os.PathLike, name: str) -> None:
    """Share figures through this folder, which exists; call before anything else here.

    No other process that runs has this `name`, without underscores; totals go on where the last one that had it stopped. When
    the disk has no room, the figures of this process are not shared: written to all the same, they would end it (SIGBUS).
    """
    os.environ[FOLDER] = str(path)
    from prometheus_client import values

    try:
        for kind in KINDS:
            _reserve(Path(path) / f"{kind}_{name}.db")
    except OSError as error:
        log.warning("/metrics goes without the figures of this process: %s", error)
        values.ValueClass = values.MutexValue
    else:
        values.ValueClass = values.MultiProcessValue(lambda: name)


def _reserve(file: Path) -> None:
    """Make sure that the file is there with all its blocks, and readable. Raises OSError."""
    from prometheus_client.mmap_dict import MmapedDict

    try:
        if not 0 <= int.from_bytes(file.read_bytes()[:4], sys.byteorder, signed=True) <= file.stat().st_size >= FILE_BYTES:
            raise ValueError
        list(MmapedDict.read_all_values_from_file(file))
        return
    except FileNotFoundError:
        pass
    except Exception:
        log.warning("the figures in %s cannot be read and begin anew", file.name)
    whole = file.with_suffix(".new")
    try:
        whole.write_bytes(bytes(FILE_BYTES))
        whole.replace(file)
    except OSError:
        whole.unlink(missing_ok=True)
        raise


def forget(path: str | os.PathLike, name: str) -> None:
    """The process of this name has ended: its gauges no longer count, its totals stay. Takes no room on the disk."""
    try:
        with open(Path(path) / f"gauge_livesum_{name}.db", "r+b") as file:
            file.write(bytes(8))  # so many bytes are used
    except OSError:
        pass


@cache
def process_ends() -> "Counter":
    """Children of the supervisor that ended while it wanted them; the supervisor's own figure."""
    from prometheus_client import Counter

    return Counter(PREFIX + "process_ends", "Processes that ended and were replaced, by role and how", ["role", "how"])


class HttpMetrics:
    """What an HTTP process measures. Times are seconds since the request came in."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def name(stem: str) -> str:
            return PREFIX + stem

        self.success = Counter(name("request_success"), "Rows that ended, by reason", ["finished_reason"])
        self.refused = Counter(name("requests_refused"), "Requests answered with an error, by status", ["status"])
        self.disconnects = Counter(name("client_disconnects"), "Clients that left before their answer was complete")
        self.streams = Gauge(name("sse_streams_open"), "Answers in progress", multiprocess_mode="livesum")
        self.first_token = Histogram(name("time_to_first_token_seconds"), "From the request to its first text", buckets=SECONDS)
        self.inter_token = Histogram(
            name("inter_token_latency_seconds"), "Between two steps with text; one in eight", buckets=TOKEN_SECONDS
        )
        self.latency = Histogram(name("e2e_request_latency_seconds"), "From the request to its end", buckets=SECONDS)
        self.variants = Counter(
            name("state_requests"), "Requests for a tuned state, a mix or an adapter, by its name", ["state"]
        )
        self.prompt_tokens = Histogram(name("request_prompt_tokens"), "Prompt tokens of a row", buckets=TOKENS)
        self.generation_tokens = Histogram(name("request_generation_tokens"), "Generated tokens of a row", buckets=TOKENS)
        self.num_prompts = Histogram(name("request_params_n"), "Prompts of a request", buckets=COUNTS)
        self.max_tokens = Histogram(name("request_params_max_tokens"), "max_tokens of a request", buckets=TOKENS)


class EngineMetrics:
    """One engine's figures: keys that end in `_total` become counters, the rest gauges. `index`: number of the engine.

    The label `engine` keeps those of several engines apart; all but ratios can be added up.
    """

    def __init__(self, index: int = 0) -> None:
        self._index = str(index)
        self._metrics: dict[str, object] = {}
        self._last: dict[str, float] = {}

    def update(self, stats: dict[str, int | float]) -> None:
        """Take over the engine's figures as they are now."""
        from prometheus_client import Counter, Gauge

        if stats.get("slots"):
            usage = 1.0 - stats.get("slots_free", 0) / stats["slots"]
            stats = {**stats, "state_slots_usage_ratio": usage}
        for key, value in stats.items():
            total = key.endswith("_total")
            metric = self._metrics.get(key)
            if metric is None:
                own = key if key.startswith(("state_", "prefix_")) else f"engine_{key}"
                stem = ENGINE_NAMES.get(key) or own.removesuffix("_total")
                words = key.replace("_", " ")
                if total:
                    metric = Counter(PREFIX + stem, f"Engine: {words}", ["engine"])
                else:
                    metric = Gauge(PREFIX + stem, f"Engine: {words}", ["engine"], multiprocess_mode="livesum")
                self._metrics[key] = metric = metric.labels(self._index)
            if total:
                metric.inc(max(0.0, value - self._last.get(key, 0.0)))
                self._last[key] = value
            else:
                metric.set(value)


def page() -> bytes:
    """Everything measured so far by all processes."""
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess

    if FOLDER not in os.environ:
        return generate_latest(REGISTRY)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry)
