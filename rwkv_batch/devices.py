"""Which devices the engines get, which cards there are, and the CPUs near a card. Found without a driver's library."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rwkv_batch.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def pipeline_devices(text: str | None, environ: Mapping[str, str], dev: Path = Path("/dev")) -> list[str]:
    """`0,1` or `[0,1]` -> ["0", "1"], `cpu,cpu` -> ["cpu", "cpu"]: devices of a pipeline in their order. Raises UsageError."""
    return _different_cards("--pp-devices: wants different cards, as 0,1 or [0,1], or cpu,cpu", text, environ, dev)


def engine_devices(text: str | None, environ: Mapping[str, str], dev: Path = Path("/dev")) -> list[str]:
    """`0,1` or `[0,1]` -> ["0", "1"], `cpu,cpu` -> ["cpu", "cpu"], `auto` -> all cards; [] = one engine on any device.

    A device is the number of a card among those that can be seen, as CUDA_VISIBLE_DEVICES has them. Raises UsageError.
    """
    num_cards = count_cards(environ, dev)
    if text is not None and text.strip() == "auto":
        return [str(number) for number in range(num_cards)]
    return _different_cards("--devices: wants different cards, as 0,1,2, or cpu,cpu, or auto", text, environ, dev)


def _different_cards(wanted: str, text: str | None, environ: Mapping[str, str], dev: Path) -> list[str]:
    """Cards that are there, or CPUs; `wanted`: the message of the UsageError that says otherwise, the flag first."""
    flag, num_cards = wanted.partition(":")[0], count_cards(environ, dev)
    param = flag.removeprefix("--").replace("-", "_")
    parts = [part.removeprefix("cuda:") for part in split(text)]
    cards = [part for part in parts if part != "cpu"]
    if not all(part.isdecimal() for part in cards) or len(set(cards)) != len(cards) or 0 < len(cards) < len(parts):
        raise UsageError(wanted, param=param)
    cards = [str(int(part)) for part in cards]
    if num_cards and (missing := [part for part in cards if int(part) >= num_cards]):
        there = "0" if num_cards == 1 else f"0 to {num_cards - 1}"
        raise UsageError(f"{flag}: there is no card {missing[0]}, only {there}", param=param)
    return cards or parts


def grouped(devices: list[str], size: int) -> list[str]:
    """["0", "1", "2", "3"] in groups of two -> ["0,1", "2,3"]."""
    return [",".join(devices[start : start + size]) for start in range(0, len(devices), size)]


def split(text: str | None) -> list[str]:
    """The words between commas, with brackets around all of them or without."""
    inside = (text or "").strip().strip("[]").strip()
    return [part.strip().strip("\"'") for part in inside.split(",")] if inside else []


def count_cards(environ: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """NVIDIA cards that can be seen; 0 where that cannot be told."""
    if VISIBLE in environ:
        return len(split(environ[VISIBLE]))
    return len(minor_numbers(dev))


def minor_numbers(dev: Path = Path("/dev")) -> list[int]:
    """N of each /dev/nvidiaN."""
    return sorted(int(path.name[6:]) for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdecimal())


def card_environ(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What an engine's environment says of its card, or of several with commas, so that it sees no other.

    Cards are numbered as nvidia-smi does.
    """
    if "cpu" in device.split(","):
        return {VISIBLE: ""}
    if VISIBLE in environ:
        visible = split(environ[VISIBLE])
        return {VISIBLE: ",".join(visible[int(card)] for card in device.split(","))}
    return {VISIBLE: device, **card_order(environ)}


def card_order(environ: Mapping[str, str]) -> dict[str, str]:
    """What an engine's environment says of all cards, so that they are numbered as nvidia-smi does."""
    return {"CUDA_DEVICE_ORDER": environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}


def cpus_near(device: str, environ: Mapping[str, str], root: Path = Path("/")) -> set[int]:
    """CPUs of the socket that a card hangs on, of those this process may use; none where that is not known."""
    named = card_environ(device, environ)[VISIBLE]
    cards = sorted(bus for bus, minor in _bus_ids(root).items() if minor in minor_numbers(root / "dev"))
    if not named.isdecimal() or int(named) >= len(cards) or not hasattr(os, "sched_getaffinity"):
        return set()
    try:
        text = (root / "sys/bus/pci/devices" / cards[int(named)] / "local_cpulist").read_text()
    except OSError:
        return set()
    return cpu_list(text) & os.sched_getaffinity(0)


def _bus_ids(root: Path) -> dict[str, int]:
    """PCI address of each card of the machine -> N of its /dev/nvidiaN."""
    found = {}
    for folder in (root / "proc/driver/nvidia/gpus").glob("*"):
        try:
            minor = re.search(r"^Device Minor:\s*(\d+)", (folder / "information").read_text(), re.M)
        except OSError:
            continue
        if minor:
            found[folder.name.lower()] = int(minor[1])
    return found


def cpu_list(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}, as Linux writes sets of CPUs."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)}
