"""What a layer and the head take on each kind of card, measured at a start and remembered for the next ones."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from rwkv_batch.engine.pipeline.split import Cost, split
from rwkv_batch.engine.pipeline.stage import Stage
from rwkv_batch.kernels.card_cache import recall, remember
from rwkv_batch.kernels.compiler import cache_folder
from rwkv_batch.model.quantized import Quantisation
from rwkv_batch.model.weights import ModelShape

log = logging.getLogger("rwkv_batch.engine")

ROUNDS = 5

Known = dict[str, dict[str, float]]  # by model, by "layer" or "head" and the card's name: milliseconds


def recalled(shape: ModelShape, quant: Quantisation, devices: Sequence[torch.device], estimate: Cost) -> list[Cost]:
    """Return what each device's stage costs: as measured where all of it is known, else the estimate."""
    known = recall(_file(), Known).get(_key(shape, quant), {})
    names = [_name(device) for device in devices]
    if not all(f"layer {name}" in known for name in names) or f"head {names[-1]}" not in known:
        return [estimate] * len(names)
    return [Cost(known[f"layer {name}"], known.get(f"head {name}", 0.0)) for name in names]


def measure(shape: ModelShape, quant: Quantisation, stages: Sequence[Stage], estimate: Cost) -> None:
    """Time the largest captured decode step of each stage and remember what it says of layers and head."""
    times = [_milliseconds(stage) for stage in stages]
    found = _told_by(times, [len(stage.layers) for stage in stages], [_name(stage.device) for stage in stages], estimate)
    known = recall(_file(), Known)
    known.setdefault(_key(shape, quant), {}).update(found)
    remember(_file(), known)
    rows = stages[0].graphs.sizes[-1]
    log.info("stages take %s ms for %d rows", ", ".join(f"{ms:.2f}" for ms in times), rows)
    better = split(shape.num_layers, recalled(shape, quant, [stage.device for stage in stages], estimate))
    if [len(layers) for layers in better] != [len(stage.layers) for stage in stages]:
        log.info("the next start splits the layers %s", " + ".join(str(len(layers)) for layers in better))


def _told_by(times: Sequence[float], counts: Sequence[int], names: Sequence[str], estimate: Cost) -> dict[str, float]:
    """Return what a layer takes on each kind of card, and the head on the last one, from the times of whole stages."""
    found: dict[str, list[float]] = {}
    for ms, count, name in list(zip(times, counts, names, strict=True))[:-1]:
        found.setdefault(f"layer {name}", []).append(ms / count)
    layers = {key: sum(values) / len(values) for key, values in found.items()}
    key, ms, count = f"layer {names[-1]}", times[-1], counts[-1]
    if key not in layers:  # nothing but the estimate tells the two apart
        layers[key] = ms * estimate.layer / (count * estimate.layer + estimate.head)
    return layers | {f"head {names[-1]}": max(0.0, ms - count * layers[key])}


def _milliseconds(stage: Stage) -> float:
    """Return the time of the fastest of some steps."""
    slots, times = list(range(stage.graphs.sizes[-1]))[: stage.state.num_slots], []
    with stage.active():
        for _ in range(ROUNDS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            stage.graphs.replay(slots)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return min(times[1:])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _key(shape: ModelShape, quant: Quantisation) -> str:
    return f"{shape.width},{shape.ffn_width},{shape.vocab_size},{quant.format}{'+head' if quant.head else ''}"


def _file() -> Path:
    return cache_folder() / "stages.json"
