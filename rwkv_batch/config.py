"""Every setting of the process: default, range, help. `config_sources.py` reads them.

One table, the fields of `Config`, feeds flags, environment names, keys of the settings file and the page of the docs. Knows
nothing of torch, HTTP or processes.
"""

import ipaddress
import os
import socket
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rwkv_batch.devices import engine_devices, grouped, pipeline_devices, split
from rwkv_batch.errors import UsageError
from rwkv_batch.secrets import read_api_keys, read_password

PREFIX = "RWKV_BATCH_"
COMPILE_MODE = "max-autotune-no-cudagraphs"
MODEL_SUFFIXES = (".pth", ".safetensors", ".st", ".rwkv")  # the last is the packed demo model's
FOLDERS = ("models_dir", "adapters_dir")  # settings that are folders which must be there
MAX_QUEUE = 1_048_576
MAX_SLOTS = 65_535  # blocks of a CUDA grid along y
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo"


HEADINGS = {
    "model": "model",
    "batching": "batching",
    "sampling": "sampling, where a request leaves it open",
    "sessions": "sessions and cached prefixes",
    "http": "address and access",
    "limits": "limits",
    "life": "start, stop, watching",
    "batch": "batch files (the command batch)",
    "logs": "logs",
    "development": "development",
}


def setting(
    default: Any,
    group: str,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    show: bool = True,
    bare: Any = None,
    many: bool = False,
) -> Any:
    """One field of Config: its default, the heading it stands under in --help, its help, its closed range.

    bare  the value of a flag that is given without one; None = it needs one
    many  whether its flag may be given several times, and the settings file may have a list; then commas are between them
    """
    about = {"group": group, "help": text, "low": low, "high": high, "bare": bare, "many": many}
    return field(default=default, repr=show, metadata=about)


@dataclass(frozen=True)
class Config:
    """All settings, checked. Times are in seconds, sizes say their unit, 0 means automatic where the help says so.

    Raises UsageError, from the constructor too, naming the flag and what it takes.
    """

    model_path: str | None = setting(None, "model", "checkpoint, .pth or .safetensors; the ending may be left out")
    adapter: str | None = setting(None, "model", "FILE[:SCALE], LoRA or the like to merge into it, see docs/models/", many=True)
    row_adapter: str | None = setting(None, "model", "NAME=FILE[:SCALE], adapter for single rows, see docs/models/", many=True)
    adapter_ranks: int | None = setting(None, "model", "room for such, in ranks; default: 256 if there are", low=0, high=65536)
    served_model_name: str | None = setting(None, "model", "name in /v1/models; default: the file's name without its ending")
    models_dir: str | None = setting(None, "model", "folder of the files that /loadmodel may load; without it none are loaded")
    adapters_dir: str | None = setting(None, "model", "the same for the adapters that requests name")
    device: str = setting("auto", "model", "auto, cpu, cuda or cuda:N")
    devices: str | None = setting(None, "model", "cards with an engine each, 0,1,2 or [0,1,2]; auto: all; cpu,cpu: two without")
    tp: int = setting(1, "model", "with --devices: cards that each engine is spread over, linked by NVLink", low=1, high=8)
    pin_engines: bool = setting(True, "model", "with --devices: keep each engine on the CPUs near its card")
    pp_devices: str | None = setting(None, "model", "cards that share one engine's layers, 0,1 or [0,1]; cpu,cpu: to try it")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = setting("auto", "model", "type of the weights in memory")
    quant: Literal["auto", "none", "int8", "fp8", "int4", "nf4", "fp6", "fp5"] = setting(
        "auto", "model", "how the large matrices are kept, see docs/quantization.md; auto: as the file has them"
    )
    quant_head: bool = setting(True, "model", "with --quant: the matrix that makes the logits is quantised too")
    ops: Literal["auto", "kernels", "compile", "reference"] = setting("auto", "model", "which implementation of the operations")
    sampler: Literal["auto", "rapid", "flashinfer", "reference"] = setting(
        "auto", "model", "which sampler; auto: rapid on a GPU; flashinfer: its filters for v2"
    )
    wkv_state: Literal["auto", "fp32", "fp16"] = setting("auto", "model", "type of states; auto: fp16 with kernels, else fp32")
    wkv_log: bool | None = setting(
        None, "model", "Hopper: many rows write few states, log the rest; default: with one GPU an engine"
    )
    tiled_weights: Literal["auto", "on", "off"] = setting(
        "auto", "model", "Hopper: a copy of the large matrices that small steps read faster; auto: where there is room"
    )
    compile: str | None = setting(
        None, "model", "plain operations through torch.compile, without a mode: max-autotune-no-cudagraphs", bare=COMPILE_MODE
    )
    states_dir: str | None = setting(None, "model", "folder of the tuned states that requests may load, docs/models/states.md")
    state: str | None = setting(None, "model", "tuned states to load, NAME=FILE, separated by commas", many=True)
    max_states: int = setting(64, "model", "tuned states that may be loaded at a time", low=0, high=65536)
    mrssmax: int = setting(4, "model", "tuned states that one answer may mix", low=1, high=31)
    threads: int = setting(0, "model", "CPU threads of the engine; 0 = automatic", low=0, high=4096)

    # CUDA grids have at most 65,535 blocks along y: rows of a step, or pieces of 16 of its tokens.
    slots: int = setting(0, "batching", "sequences decoded at the same time; 0 = automatic", low=0, high=MAX_SLOTS)
    spare_slots: float = setting(
        0.0625, "batching", "further slots, as a share of --slots, kept for requests that have no row running", low=0, high=1
    )
    prefill_budget: int = setting(0, "batching", "prompt tokens fed in one step; 0 = automatic", low=0, high=1_000_000)
    busy_prefill_budget: int = setting(
        0, "batching", "the same while others decode, whose next tokens wait for the step; 0 = automatic", low=0, high=1_000_000
    )
    itl_budget_ms: float = setting(
        0.0, "batching", "milliseconds that prompts may add to the gap between two tokens of others; 0 = any", low=0, high=60000
    )
    batch_invariant: bool = setting(
        False, "batching", "decode in graphs of one size only: a row's tokens then do not depend on how many others run"
    )

    seed: int | None = setting(
        None, "sampling", "seed of requests that give none; default: each row draws by one of its own", low=0, high=2**63 - 1
    )
    noise: float | None = setting(
        None, "sampling", "width of the noise in the big and the plain batch, where a request gives none", low=0, high=1000
    )

    state_db: str = setting(
        "rwkv_batch_sessions.db", "sessions", "SQLite file of the sessions, made when one is kept; empty: none are"
    )
    state_key_file: str | None = setting(None, "sessions", "file with a key: what sessions say is encrypted in that file")
    state_db_gib: float | None = setting(None, "sessions", "size of that file, GiB; default: any", low=0.001, high=1_048_576)
    state_url: str | None = setting(
        None, "sessions", "database that servers share instead of a file, postgresql://…; ps shows it", show=False
    )
    snapshots: str | None = setting(None, "sessions", "whole states beside it: a folder all see, or s3://BUCKET/PREFIX")
    lease_seconds: float = setting(1.5, "sessions", "silence after which sessions leave a server of it", low=0.5, high=600)
    drop_oldest_sessions: bool = setting(False, "sessions", "a full file loses its oldest sessions, else turns get 507")
    durability: Literal["log", "turn", "relaxed", "shutdown"] = setting(
        "log", "sessions", "an acknowledged turn is on disk as token ids, as a whole state, soon after, or at shutdown"
    )
    snapshot_tokens: int = setting(2048, "sessions", "tokens in the log until a whole state follows", low=16, high=2**31 - 1)
    snapshot_mib_s: float = setting(
        0.0,
        "sessions",
        "whole states written in the background, MiB a second; 0 = a quarter of what the disk takes",
        low=0,
        high=65536,
    )
    relaxed_seconds: float = setting(1.0, "sessions", "longest time until a relaxed turn is on disk", low=0.01, high=3600)
    l1_sessions: int | None = setting(None, "sessions", "sessions in device memory; default: what fits", low=1, high=1_048_576)
    l2_sessions: int | None = setting(None, "sessions", "sessions in host memory; default: what fits", low=0, high=1_048_576)
    l1_mib: int | None = setting(None, "sessions", "device memory for them, MiB; default: see docs/", low=1, high=1_048_576)
    l2_mib: int | None = setting(None, "sessions", "host memory for them, MiB; default: see docs/", low=0, high=1_048_576)
    session_versions: int = setting(2, "sessions", "states of a session that are kept, to rewind to", low=1, high=1000)
    session_wait_seconds: float = setting(30.0, "sessions", "wait for a busy session until 409", low=0, high=3600)
    session_waiting: int = setting(64, "sessions", "turns that may wait for one session", low=0, high=65536)
    replay_seconds: float = setting(600.0, "sessions", "time an answer is kept for its idempotency key", low=0, high=86400)
    response_ttl_hours: float = setting(
        720.0, "sessions", "time the state of a stored response is kept to be continued", low=0.001, high=1_000_000
    )
    max_responses: int = setting(
        1000, "sessions", "stored responses that are kept, the newest (of each API key with --isolate)", low=1, high=2**31 - 1
    )
    max_session_bytes: int = setting(256, "sessions", "length of a session's name, bytes", low=1, high=65536)
    prefix_cache_mib: int = setting(
        1024, "sessions", "memory for states of cached prefixes, MiB; 0 = none", low=0, high=1_048_576
    )
    prefix_min_tokens: int = setting(128, "sessions", "shortest prefix that prompts share", low=32, high=1_048_576)
    prefix_every_tokens: int = setting(512, "sessions", "distance of cached states inside a prompt", low=32, high=1_048_576)

    host: str | None = setting(None, "http", "address to listen on; default: 0.0.0.0 with a password, 127.0.0.1 without")
    port: int = setting(8000, "http", "port to listen on; 0 = any free one", low=0, high=65535)
    http_workers: int = setting(0, "http", "HTTP processes; 0 = automatic: 4 for each GPU, else 2", low=0, high=64)
    pin_http: bool = setting(True, "http", "keep each HTTP process on one CPU, which halves its cost")
    password: str | None = setting(None, "http", "secret of the callers; ps shows it, a file does not", show=False)
    password_file: str | None = setting(None, "http", "file that holds the password; nobody else may read it (mode 0600)")
    api_keys: str | None = setting(
        None, "http", "further callers, name=key,name=key, who may not administer; ps shows them", show=False
    )
    api_key_file: str | None = setting(
        None, "http", "the same in a file (mode 0600), one `name key` a line; a key as it is, or as sha256:HEX"
    )
    isolate: bool = setting(False, "http", "each API key has sessions and cached prefixes of its own")
    session_header: str | None = setting(
        None, "http", "header that names the session of an OpenAI chat; its messages are then the new ones only"
    )
    cors_origins: str | None = setting(
        None,
        "http",
        "origins whose pages may call, separated by commas; * = all; default: all with a password, see docs/",
    )
    allowed_hosts: str | None = setting(
        None, "http", "names by which this server may be called, beside addresses and its own, separated by commas; * = any"
    )
    open_translate: bool = setting(False, "http", "translation needs no password, wherever the call comes from")
    local_translate: bool = setting(True, "http", "translation needs no password when it is called from this machine")

    max_body_mib: int = setting(32, "limits", "size of a request body, MiB", low=1, high=4096)
    max_body_depth: int = setting(64, "limits", "nesting of a request body", low=4, high=128)
    max_body_parts: int = setting(262_144, "limits", "arrays and objects in a request body", low=64, high=2**24)
    max_body_values: int = setting(1_310_720, "limits", "values and names in a request body", low=1024, high=2**28)
    max_prompts: int = setting(4096, "limits", "prompts in one request", low=1, high=1_048_576)
    max_prompt_tokens: int = setting(1_048_576, "limits", "tokens of one prompt", low=1, high=2**31 - 1)
    max_tokens_limit: int = setting(1_048_576, "limits", "largest max_tokens a request may ask for", low=1, high=2**31 - 1)
    max_placeholders: int = setting(256, "limits", "placeholder texts in one translation request", low=0, high=4096)
    max_stops: int = setting(64, "limits", "stop entries in one request", low=0, high=4096)
    max_stop_bytes: int = setting(256, "limits", "length of one stop text, bytes", low=1, high=65536)
    max_logprobs: int = setting(20, "limits", "most likely tokens that can be reported at each place", low=0, high=1024)
    max_logit_bias: int = setting(1024, "limits", "entries of a logit bias", low=0, high=65536)
    max_tools: int = setting(256, "limits", "tools in one request", low=0, high=65536)
    max_tools_bytes: int = setting(
        2**19,
        "limits",
        "names, descriptions and schemas of a request's tools as the model is told of them, bytes",
        low=0,
        high=2**26,
    )
    max_grammar_bytes: int = setting(2**20, "limits", "length of a JSON schema, a regex or a grammar, bytes", low=1, high=2**26)
    grammar_seconds: float = setting(
        0.8, "limits", "time of a core to compile a schema, a regex or a grammar, after which it is refused", low=0.05, high=60
    )
    queue: int = setting(512, "limits", "requests that may wait; one more is answered 429", low=1, high=MAX_QUEUE)
    translate_ratio: float = setting(
        3.0, "limits", "tokens of a translation for each token of its text, at most", low=0.5, high=100
    )
    translate_memory_mib: int = setting(
        16, "limits", "translated sentences that one HTTP process remembers, MiB; 0 = none", low=0, high=65536
    )
    max_streams: int = setting(480, "limits", "answers in progress in one HTTP process; one more gets 429", low=1, high=480)
    stream_buffer_mib: int = setting(16, "limits", "unread text after which a slow reader is cut off, MiB", low=1, high=4096)
    stream_stall_seconds: float = setting(
        30.0, "limits", "time after which a reader that takes nothing is cut", low=1, high=86400
    )

    drain_seconds: float = setting(30.0, "life", "time that running answers get after SIGTERM", low=0, high=86400)
    drain_least_seconds: float = setting(
        0.0, "life", "time that it refuses requests before it ends, so that a proxy in front notices", low=0, high=86400
    )
    engine_stop_seconds: float = setting(
        60.0, "life", "time that the engine gets to write its sessions after that", low=1, high=86400
    )
    watchdog_seconds: float = setting(120.0, "life", "a step that takes longer ends the engine; 0 = never", low=0, high=86400)
    http_silence_seconds: float = setting(
        10.0, "life", "an HTTP process whose event loop stands still for longer is replaced; 0 = never", low=0, high=86400
    )
    engine_silence_seconds: float = setting(
        30.0, "life", "an engine of which no thread runs for longer is replaced; 0 = never", low=0, high=86400
    )
    start_silence_seconds: float = setting(
        300.0,
        "life",
        "the same for a process that is starting: loading may stop all threads for long; 0 = never",
        low=0,
        high=86400,
    )
    max_crashes: int = setting(3, "life", "engine crashes within the crash window that end the server", low=1, high=1000)
    crash_window_seconds: float = setting(300.0, "life", "see --max-crashes", low=1, high=86400)
    heartbeat: float = setting(0.5, "life", "time between two signs of life of engine and HTTP processes", low=0.05, high=10)
    peer_seconds: float = setting(15.0, "life", "silence after which engine or HTTP process is given up", low=1, high=3600)
    ping_seconds: float = setting(15.0, "life", "silence in an answer until a sign of life is sent", low=0.1, high=3600)

    batch_window_mib: int = setting(
        256, "batch", "lines being answered, and answers that wait for that of an earlier line, MiB", low=1, high=1_048_576
    )
    batch_sync_seconds: float = setting(
        5.0, "batch", "time between two orders to the disk to keep the answers; 0 = one at the end", low=0, high=86400
    )

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "logs", "how much is logged, to stderr")
    access_log: bool = setting(True, "logs", "one line for each request")
    log_prompts: bool = setting(False, "logs", "write the beginning of prompts into the log")

    fake_engine: float | None = setting(
        None, "development", "no model: a stand-in that takes this many milliseconds a step", low=0, high=60000
    )

    def __post_init__(self) -> None:
        kinds = get_type_hints(Config)
        for item in fields(self):
            value, flag = getattr(self, item.name), flag_of(item.name)
            if value is None:
                continue
            if get_origin(kinds[item.name]) is Literal and value not in get_args(kinds[item.name]):
                raise UsageError(f"{flag}: must be one of {', '.join(get_args(kinds[item.name]))}", param=item.name)
            low, high = item.metadata["low"], item.metadata["high"]
            if low is not None and not low <= value <= high:
                raise UsageError(f"{flag}: must be between {low} and {high}", param=item.name)
            if item.name.endswith("_silence_seconds") and 0 < value < 1:  # signs of life come twice a second
                raise UsageError(f"{flag}: must be 0 or at least 1", param=item.name)
        if self.device not in ("auto", "cpu", "cuda") and not (self.device[:5] == "cuda:" and self.device[5:].isdecimal()):
            raise UsageError("--device: must be auto, cpu, cuda or cuda:N", param="device")

    @property
    def max_body_bytes(self) -> int:
        """Largest body in bytes."""
        return self.max_body_mib * 2**20

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        if self.served_model_name:
            return self.served_model_name
        if self.fake_engine is not None:
            return "fake"
        if self.is_demo:
            return "demo"
        name = Path(self.model_path).name
        return name.removesuffix(next((s for s in MODEL_SUFFIXES if name.endswith(s)), ""))

    @property
    def is_demo(self) -> bool:
        """Whether the built-in model is meant."""
        return self.model_path is None or Path(self.model_path).parent == DEMO_FOLDER

    @property
    def engine_devices(self) -> list[str]:
        """Devices that get an engine each, several with commas; none = one engine, on `device`. Call after `resolved`."""
        return grouped(self.devices.split(","), self.tp) if self.devices else []

    @property
    def pipeline_devices(self) -> list[str]:
        """Devices that share one engine's layers, "0" or "cpu"; none = one device has all. Call after `resolved`."""
        return split(self.pp_devices)

    @property
    def num_engines(self) -> int:
        """Engines that share this machine's memory and CPUs. Call after `resolved`."""
        return max(1, len(self.engine_devices))

    @property
    def has_store(self) -> bool:
        """Whether a process of its own has the file of the sessions, since several engines use it. Call after `resolved`."""
        return self.num_engines > 1 and self.state_url is None and bool(self.state_db) and self.fake_engine is None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the address; call after `resolved`."""
        return ipaddress.ip_address(self.host or "127.0.0.1").is_loopback

    def resolved(self) -> "Config":
        """Fill in what depends on other settings or on this machine: password file, host, number of HTTP processes, device.

        Raises UsageError.
        """
        password = read_password(self.password, self.password_file)
        api_keys = read_api_keys(self.api_keys, self.api_key_file)
        host = self.host if self.host else ("0.0.0.0" if password or api_keys else "127.0.0.1")
        device, devices = self.device, engine_devices(self.devices, os.environ)
        if devices and (device not in ("auto", devices[0]) or self.pp_devices):
            raise UsageError("--devices: stands in the place of --device and --pp-devices", param="devices")
        if stages := pipeline_devices(self.pp_devices, os.environ):
            device = check_pipeline(self, stages)
        if self.tp > 1:
            check_tp(self, devices)
        resolved = {"password": password, "password_file": None, "api_keys": api_keys, "api_key_file": None}
        resolved["host"] = numeric_host(host)
        resolved |= {"device": device, "devices": ",".join(devices) or None}
        resolved["pp_devices"] = ",".join(stages) if len(stages) > 1 else None
        resolved |= {name: folder_of(self, name) for name in FOLDERS}
        return replace(self, **resolved, http_workers=self.http_workers or http_workers_of(self, devices))


def check_tp(config: Config, devices: list[str]) -> None:
    """Raise UsageError where an engine over several cards is asked for together with what it does not do."""
    if not devices or len(devices) % config.tp:
        had = f"has {len(devices)}" if devices else "is missing"
        raise UsageError(f"--tp {config.tp}: wants --devices with a multiple of {config.tp} cards; it {had}", param="tp")
    check_beside_tp(config)


def check_beside_tp(config: Config) -> None:
    """Raise UsageError where a model's settings ask for what an engine over several cards does not do."""
    refused = {name: getattr(config, name) for name in ("adapter", "row_adapter", "adapters_dir", "adapter_ranks", "compile")}
    refused |= {"quant": config.quant not in ("auto", "none"), "ops": config.ops == "compile"}
    for name, is_given in refused.items():
        if is_given:
            raise UsageError(f"{flag_of(name)}: not with --tp {config.tp}, an engine over several cards", param=name)


def http_workers_of(config: Config, devices: list[str]) -> int:
    """How many HTTP processes there are where nobody says: several engines leave two CPUs to each of them."""
    on_gpu = "cpu" not in (config.device, *devices) and config.fake_engine is None and gpu_present()
    for_one, engines = 4 if on_gpu else 2, len(devices) // config.tp
    left = (os.cpu_count() or 1) - 2 * engines
    return for_one if engines < 2 else max(for_one, min(for_one * engines, left, 64))


def check_pipeline(config: Config, stages: list[str]) -> str:
    """Return the first device of a pipeline; UsageError where it is asked for together with what it does not do."""
    device = "cpu" if stages[0] == "cpu" else f"cuda:{stages[0]}"
    if config.device != "auto" and (config.device == "cpu") != (device == "cpu"):
        raise UsageError(f"--pp-devices: {','.join(stages)}, but --device is {config.device}", param="pp_devices")
    refused = {name: getattr(config, name) for name in ("row_adapter", "adapter_ranks", "compile")}
    refused |= {"tp": config.tp > 1, "ops": config.ops == "compile"}
    for name, is_given in refused.items():
        if is_given and len(stages) > 1:
            raise UsageError(f"{flag_of(name)}: not with --pp-devices, an engine in stages", param=name)
    return device


def logs_states(config: Config) -> bool:
    """Whether decode steps of many rows keep a log beside the states, where they can."""
    return config.tp == 1 and config.pp_devices is None if config.wkv_log is None else config.wkv_log


def folder_of(config: Config, name: str) -> str | None:
    """The absolute path of a setting that is a folder. Raises UsageError where there is none."""
    given = getattr(config, name)
    if given is None:
        return None
    path = Path(given).expanduser().absolute()
    if not path.is_dir():
        raise UsageError(f"{flag_of(name)}: no such folder: {given}", param=name)
    return str(path)


def flag_of(name: str) -> str:
    """`max_tokens_limit` -> `--max-tokens-limit`."""
    return "--" + name.replace("_", "-")


def gpu_present() -> bool:
    """Whether a GPU driver is there, found without importing torch: device nodes of NVIDIA, WSL and ROCm."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def numeric_host(host: str) -> str:
    """The IP address of a host name; the server below takes nothing else. Raises UsageError."""
    try:
        return socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise UsageError(f"--host: cannot use {host!r}: {error.strerror or error}", param="host") from None


def find_model(config: Config, demo_folder: Path = DEMO_FOLDER) -> Path:
    """The checkpoint to load: the one named, else the one built in. Raises UsageError that names the flag."""
    if config.model_path is None:
        built_in = sorted(path for path in demo_folder.glob("*") if path.suffix in MODEL_SUFFIXES)
        if not built_in:
            raise UsageError("no model: give one with --model-path FILE (.pth or .safetensors)", param="model_path")
        return built_in[0]
    path = Path(config.model_path).expanduser()
    for candidate in model_files(path):
        if candidate.is_file():
            return candidate
    raise UsageError(f"--model-path: no such file: {config.model_path}", param="model_path")


def model_files(path: Path) -> list[Path]:
    """The files a model's path can mean, given with or without its ending."""
    return [path, *(path.with_name(path.name + suffix) for suffix in MODEL_SUFFIXES)]
