"""Files of adapters. Who wrote one is told by its container, never by shapes, which mean different things to different writers.

    RWKV-PEFT   a pickle (or safetensors) of blocks.{i}.att.key.lora_A, .lora_B, .lora_M, .bone or .disha, and of whole tensors
                under their own names. PiSSA has a second file beside it, init_pissa.pth
    HF PEFT     adapter_model.safetensors beside adapter_config.json, which has the scaling
    web-rwkv    safetensors of blocks.{i}.att.key.lora.0 (transposed) and .lora.1

Formulas: `changes.py`. Nothing in a file is executed.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model import checkpoint
from rwkv_batch.model.adapters import hf_peft
from rwkv_batch.model.adapters.adapter import ASSUMED_FACTOR, Adapter, Scaling, fingerprint_of
from rwkv_batch.model.adapters.changes import Bone, Change, InputBat, InputDora, LoraChange
from rwkv_batch.model.checkpoint import one_line

log = logging.getLogger("rwkv_batch.engine")

PICKLES, SAFETENSORS = (".pth", ".pt", ".bin"), (".safetensors", ".st")
SUFFIXES = PICKLES + SAFETENSORS
PISSA_FILE = "init_pissa.pth"
PARTS = re.compile(r"(.+)\.(lora_A|lora_B|lora_M|bone|disha|lora\.0|lora\.1)")
EXPERTS = re.compile(r"\.moe_info$|\.expert_\d|\.router\.")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Parts = dict[str, dict[str, Tensor]]  # by matrix, by part


def parse(text: str) -> tuple[str, Scaling]:
    """Split `FILE`, `FILE:1.5` or `FILE:alpha=32`."""
    path, _, scale = text.rpartition(":")
    try:
        return (path, Scaling.parse(scale)) if path else (text, Scaling())
    except ValueError:
        return text, Scaling()


def read_all(text: str) -> list[Adapter]:
    """Return the adapters of `--adapter`, in order; logs each. CheckpointError."""
    found = []
    for path, scaling in (parse(part.strip()) for part in text.split(",") if part.strip()):
        found.append(read(Path(path).expanduser(), scaling))
        log.log(logging.WARNING if found[-1].assumed else logging.INFO, "%s", found[-1].line())
    return found


def read(path: Path, given: Scaling | None = None) -> Adapter:
    """Return the adapter in a file, or in a folder of HF PEFT's; CheckpointError, one line, when it is unusable.

    given  the scaling, instead of what the file says
    """
    given = given or Scaling()
    file = hf_peft.file_in(path) if path.is_dir() else path
    if file.suffix not in SUFFIXES:
        raise CheckpointError(f"{file}: not the file of an adapter, which ends in {', '.join(SUFFIXES)}")
    config = hf_peft.config_beside(file)
    tensors = _numbers(file)
    if config is not None:
        changes, replaced = hf_peft.changes_of(tensors, config, given, str(file)), {}
        return _adapter(file, "HF PEFT", changes, replaced, given.given or hf_peft.has_scaling(config))
    parts, replaced = _sorted(tensors, file)
    if any("lora.0" in found or "lora.1" in found for found in parts.values()):
        changes = {key: _of_web_rwkv(found, given, _at(file, key)) for key, found in parts.items()}
        return _adapter(file, "web-rwkv", changes, replaced, given.given)
    init = _pissa(file, parts)
    changes = {key: _of_rwkv_peft(found, init.get(key), given, _at(file, key)) for key, found in parts.items()}
    return _adapter(file, "RWKV-PEFT", changes, replaced, given.given or bool(init))


def _adapter(
    file: Path, container: str, changes: dict[str, tuple[str, Change, float | None]], replaced: dict[str, Tensor], known: bool
) -> Adapter:
    """Put together what was found: by matrix the kind, the change and its scaling."""
    if not changes and not replaced:
        raise CheckpointError(f"{file}: holds no adapter")
    kinds = {kind for kind, _, _ in changes.values()} | ({"whole tensors"} if replaced else set())
    scalings = sorted({scaling for _, _, scaling in changes.values() if scaling is not None})
    found = {key: change for key, (_, change, _) in changes.items()}
    return Adapter(
        name=str(file),
        container=container,
        kinds=tuple(sorted(kinds)),
        changes=found,
        replaced=replaced,
        scaling=None if not scalings else scalings[0] if len(scalings) == 1 else scalings,
        assumed=bool(scalings) and not known,
        fingerprint=fingerprint_of(found, replaced),
    )


def _numbers(file: Path) -> dict[str, Tensor]:
    """Return the file's tensors in fp32, copied, without the `model.` that trainers put in front of names."""
    numbers: dict[str, Tensor] = {}
    for key, tensor in checkpoint.read_file(file).items():
        if tensor.dtype not in FLOATS or tensor.is_meta or not tensor.numel():
            raise CheckpointError(f"{file}: tensor {one_line(key)} holds no floating-point numbers")
        number = tensor.to(torch.float32, copy=True).contiguous()
        if not bool(torch.isfinite(number).all()):
            raise CheckpointError(f"{file}: tensor {one_line(key)} holds values that are not finite")
        numbers[key.removeprefix("model.")] = number
    return numbers


def _sorted(tensors: dict[str, Tensor], file: Path) -> tuple[Parts, dict[str, Tensor]]:
    """Return the parts of changes by the published name of their matrix, and whole tensors."""
    parts: Parts = {}
    replaced: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if EXPERTS.search(key):
            raise CheckpointError(f"{file}: a mixture of LoRA experts ({one_line(key)}), which cannot be run")
        if (found := PARTS.fullmatch(key)) is None:
            replaced[key] = tensor
        else:
            parts.setdefault(f"{found[1]}.weight", {})[found[2]] = tensor
    return parts, replaced


def _of_rwkv_peft(
    parts: dict[str, Tensor], init: tuple[Tensor, Tensor] | None, given: Scaling, at: Callable[[str], CheckpointError]
) -> tuple[str, Change, float | None]:
    """Return kind, change and scaling of one matrix."""
    names = set(parts)
    if names in ({"bone"}, {"disha"}):
        (g,) = parts.values()
        if given.given and given.of(1) != 1:
            raise at("Bone has no scaling")
        if g.dim() == 3 and g.shape[1] == g.shape[2]:
            return "Bat", InputBat(g), None
        if g.dim() != 2:
            raise at(f"a Bone of shape {list(g.shape)}")
        return "Bone", Bone(g), None
    if names not in ({"lora_A", "lora_B"}, {"lora_A", "lora_B", "lora_M"}):
        raise at(f"it has {' and '.join(sorted(names))}, which make no adapter")
    a, b = _halves(parts["lora_A"], parts["lora_B"], at)
    if init is not None:
        factor = given.of(len(a)) if given.given else 1.0
        return "PiSSA", LoraChange(torch.cat((a, init[0])), torch.cat((factor * b, -init[1]), 1)), factor
    factor = given.of(len(a)) if given.given else ASSUMED_FACTOR
    if "lora_M" in parts:
        return "DoRA", InputDora(a, factor * b, parts["lora_M"].flatten()), factor
    return "LoRA", LoraChange(a, factor * b), factor


def _of_web_rwkv(
    parts: dict[str, Tensor], given: Scaling, at: Callable[[str], CheckpointError]
) -> tuple[str, Change, float | None]:
    if set(parts) != {"lora.0", "lora.1"}:
        raise at(f"it has {' and '.join(sorted(parts))}, which make no adapter")
    if parts["lora.0"].dim() != 2:
        raise at(f"lora.0 of shape {list(parts['lora.0'].shape)}")
    a, b = _halves(parts["lora.0"].t().contiguous(), parts["lora.1"], at)
    factor = given.of(len(a)) if given.given else ASSUMED_FACTOR
    return "LoRA", LoraChange(a, factor * b), factor


def _pissa(file: Path, parts: Parts) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what the file beside a PiSSA took out of the matrices when its training began, {} where there is none."""
    beside = file.with_name(PISSA_FILE)
    if beside == file or not beside.is_file() or not any("lora_A" in found for found in parts.values()):
        return {}
    tensors, init = _numbers(beside), {}
    for key in parts:
        prefix = key.removesuffix(".weight")
        a, b = (tensors.get(f"{prefix}.init_lora_{half}") for half in "AB")
        if a is None or b is None:
            raise CheckpointError(f"{beside}: lies beside {file.name}, but has nothing on {key}; move it if they are strangers")
        init[key] = _halves(a, b, _at(beside, key))
        if a.shape[1] != parts[key]["lora_A"].shape[-1] or b.shape[0] != parts[key]["lora_B"].shape[0]:
            raise CheckpointError(
                f"{beside}: lies beside {file.name}, but {key} has other shapes; move it if they are strangers"
            )
    return init


def _halves(a: Tensor, b: Tensor, at: Callable[[str], CheckpointError]) -> tuple[Tensor, Tensor]:
    if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1]:
        raise at(f"its halves have shapes {list(a.shape)} and {list(b.shape)}")
    return a, b


def _at(file: Path, key: str) -> Callable[[str], CheckpointError]:
    return lambda why: CheckpointError(f"{file}: {one_line(key)}: {why}")
