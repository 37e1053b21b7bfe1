"""What the server tells the person who started it."""

from rwkv_batch import __version__
from rwkv_batch.config import Config
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.secrets import without_secret
from rwkv_batch.server import lines


def say(text: str) -> None:
    """A line for the person who started the server, who may have gone since."""
    lines.OUT.write(text)


def announce(config: Config, infos: list[EngineInfo]) -> None:
    """What was loaded, on what, the limits, the address, and something to try. `infos`: of the engines that are there."""
    info = infos[0]
    host = config.host or "127.0.0.1"
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{'127.0.0.1' if shown == '0.0.0.0' else '[::1]' if shown == '[::]' else shown}:{config.port}"
    why = "a password is set" if config.password else "API keys are set" if config.api_keys else "no password is set"
    size = (
        f", {info.parameters / 1e6:,.0f} M weights, {info.layers} layers of {info.width}, loaded in {info.load_seconds:.1f} s"
    )
    size = size if info.parameters else ""
    header = ' -H "Authorization: Bearer $PASSWORD"' if config.password or config.api_keys else ""
    say(f"rwkv_batch {__version__}")
    say(f"  model    {config.served_model_name or info.model}{size}")
    if config.is_demo and config.fake_engine is None:
        say("           a built-in toy that knows its toy world only; for real RWKV-7 weights: --model-path FILE (README)")
    say(f"  device   {info.device}, {f'{info.quant} and ' if info.quant else ''}{info.dtype}, operations: {info.ops}")
    if len(config.engine_devices) > 1:
        say(f"  engines  {len(infos)} of {len(config.engine_devices)}, on {config.devices}; of each:")
    say(f"  batch    {info.slots} sequences at a time, {info.prefill_budget} prompt tokens a step")
    if config.fake_engine is None:
        l1, l2 = ("what fits" if number is None else number for number in (config.l1_sessions, config.l2_sessions))
        levels = f"{l1} in device memory, {l2} in host memory"
        place = (config.state_db or "nowhere") if config.state_url is None else without_secret(config.state_url)
        say(f"  sessions {place}, durability: {config.durability}; {levels}")
    say(
        f"  limits   {config.max_prompts} prompts and {config.max_body_mib} MiB a request, {config.queue} requests waiting, "
        f"{config.max_streams * config.http_workers} answers in progress"
    )
    say(f"  address  http://{shown}:{config.port}  ({why}; {config.http_workers} HTTP processes)")
    if not config.password and not config.api_keys and not config.loopback:
        say("  WARNING  anyone who can reach this address can use the server: set --password-file, or RWKV_BATCH_PASSWORD")
    body = '{"contents": ["User: Hello!\\n\\nAssistant:"], "max_tokens": 64, "stream": true}'
    say(f"  page     {url}/")
    say(f"  try      curl -N {url}/v1/chat/completions{header} -d '{body}'")
