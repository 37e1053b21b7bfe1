"""What the supervisor knows of its engines: where each runs, on what, with which settings, how often it has crashed."""

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rwkv_batch import devices
from rwkv_batch.config import Config
from rwkv_batch.ipc.messages import EngineInfo, Seat
from rwkv_batch.server.control import address_in


@dataclass
class SupervisedEngine:
    """A seat and whatever engine is in it.

    config    its settings
    environ   what its environment has beside the supervisor's
    cpus      those it is to stay on; none = all
    info      what its engine has said of itself
    ready     whether there is an engine in it that has loaded its model
    crashes   when engines in it have ended lately
    given_up  whether it is left empty, after too many of them
    leaving   whether it is to be removed as soon as its engine is idle
    """

    seat: Seat
    config: Config
    environ: dict[str, str] = field(default_factory=dict)
    cpus: list[int] = field(default_factory=list)
    info: EngineInfo | None = None
    ready: bool = False
    crashes: deque[float] = field(default_factory=deque)
    given_up: bool = False
    leaving: bool = False

    def crashed(self, now: float) -> bool:
        """Its engine has ended; returns whether that was once too often."""
        self.crashes.append(now)
        while now - self.crashes[0] > self.config.crash_window_seconds:
            self.crashes.popleft()
        return len(self.crashes) >= self.config.max_crashes


def engines_of(config: Config, folder: Path, environ: Mapping[str, str] = os.environ) -> list[SupervisedEngine]:
    """The engines that the settings ask for: one on each of --devices, or one on --device."""
    given = config.engine_devices
    if not given:
        return [SupervisedEngine(Seat(address=address_in(folder, 0)), config)]
    return [engine_on(device, index, config, folder, environ) for index, device in enumerate(given)]


def engine_on(
    device: str, index: int, config: Config, folder: Path, environ: Mapping[str, str] = os.environ
) -> SupervisedEngine:
    """An engine of its own on one of the devices. Of engines that do not share a database, the first keeps the sessions."""
    sessions = index == 0 or config.state_url is not None
    seat = Seat(index=index, address=address_in(folder, index), device=device, sessions=sessions)
    config = replace(config, device="cpu" if device == "cpu" else "cuda:0", state_db=config.state_db if sessions else "")
    near = devices.cpus_near(device, environ) if device != "cpu" and config.pin_engines else set()
    return SupervisedEngine(seat, config, devices.card_environ(device, environ), sorted(near))
