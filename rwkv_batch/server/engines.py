"""What the supervisor knows of its engines: where each runs, on what, with which settings, how often it has crashed."""

import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rwkv_batch import devices
from rwkv_batch.config import Config
from rwkv_batch.ipc.messages import EngineInfo, Seat
from rwkv_batch.server.control import address_in


class Crashes(deque[float]):
    """When processes of one kind have ended lately."""

    def too_often(self, config: Config, now: float) -> bool:
        """One has ended again; returns whether that was once too often."""
        self.append(now)
        while now - self[0] > config.crash_window_seconds:
            self.popleft()
        return len(self) >= config.max_crashes


@dataclass
class SupervisedEngine:
    """A seat and whatever engine is in it.

    config    its settings
    environ   what its environment has beside the supervisor's
    cpus      those it is to stay on; none = all
    info      what its engine has said of itself
    ready     whether there is an engine in it that has loaded its model
    crashes   of engines in it
    given_up  whether it is left empty, after too many of them
    leaving   whether it is to be removed as soon as its engine is idle
    stopping  whether its engine was told to end, so that nobody is to send it anything
    """

    seat: Seat
    config: Config
    environ: dict[str, str] = field(default_factory=dict)
    cpus: list[int] = field(default_factory=list)
    info: EngineInfo | None = None
    ready: bool = False
    crashes: Crashes = field(default_factory=Crashes)
    given_up: bool = False
    leaving: bool = False
    stopping: bool = False

    def remove_files(self) -> None:
        """Remove its socket, and what says which states and adapters an engine in it has."""
        address = Path(self.seat.address.removeprefix("ipc://"))
        for file in (address, *address.parent.glob(f"{address.name}.*")):
            file.unlink(missing_ok=True)


def engines_of(config: Config, folder: Path, environ: Mapping[str, str] = os.environ) -> list[SupervisedEngine]:
    """The engines that the settings ask for: one on each of --devices, or one on --device."""
    given = config.engine_devices
    if not given:
        return [engine_of_all(0, config, folder, environ)]
    return [engine_on(device, index, config, folder, environ) for index, device in enumerate(given)]


def engine_of_all(index: int, config: Config, folder: Path, environ: Mapping[str, str] = os.environ) -> SupervisedEngine:
    """An engine that chooses among all devices: it runs on --device, or in stages on --pp-devices."""
    order = devices.card_order(environ) if config.pipeline_devices else {}
    return SupervisedEngine(Seat(index=index, address=address_in(folder, index)), config, order)


def engine_on(
    device: str, index: int, config: Config, folder: Path, environ: Mapping[str, str] = os.environ
) -> SupervisedEngine:
    """An engine of its own on one of the devices, or over several with commas."""
    seat = Seat(index=index, address=address_in(folder, index), device=device)
    on_cpu = "cpu" in device.split(",")
    config = replace(config, device="cpu" if on_cpu else "cuda:0")
    cards = [] if on_cpu or not config.pin_engines else device.split(",")
    near = set().union(*(devices.cpus_near(card, environ) for card in cards))
    return SupervisedEngine(seat, config, devices.card_environ(device, environ), sorted(near))


def room_for_all(config: Config, meminfo: Path = Path("/proc/meminfo")) -> bool:
    """Whether the host's memory takes the weights of all engines at once, as they pass through it on their way to cards."""
    if config.num_engines < 2 or "cpu" in (config.devices or "").split(",") or config.fake_engine is not None:
        return True
    try:
        free = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.M)
        return free is None or int(free[1]) * 1024 > config.num_engines * Path(config.model_path or "").stat().st_size
    except OSError:  # no Linux
        return True


def engine_in(place: int, index: int, config: Config, server: Config, folder: Path) -> SupervisedEngine:
    """An engine of a further model, with the model's settings, where the one of that place of the server's own model is."""
    if server.engine_devices:
        return engine_on(server.engine_devices[place], index, config, folder)
    return engine_of_all(index, config, folder)
