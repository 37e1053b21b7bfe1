"""Adapters as HF PEFT writes them: adapter_model.safetensors beside adapter_config.json.

Names are those of RWKV-7 in transformers and flash-linear-attention: base_model.model.model.layers.3.attn.r_proj.lora_A.weight.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model.adapters.adapter import Scaling
from rwkv_batch.model.adapters.changes import Bone, Change, LoraChange, OutputBat, OutputDora
from rwkv_batch.model.checkpoint import one_line

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
KINDS = ("LORA", "MISS", "BONE")
CHANGED_BASES = ("pissa", "olora", "corda", "loftq")  # initialisations that take something out of the matrices first
MODULE = re.compile(r"(?:.+\.)?(?:layers|blocks)\.(\d+)\.(att|attn|ffn)\.(\w+)")
PART = re.compile(r"(.+)\.(?:(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?|(?:miss|bone)_block)")
NAMES = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
MATRICES = {"att": ("receptance", "key", "value", "output", "gate"), "ffn": ("key", "value", "receptance")}

Config = dict[str, Any]


def file_in(folder: Path) -> Path:
    """Return the file of an adapter's folder."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder}: a folder without {' or '.join(FILES)}")


def config_beside(file: Path) -> Config | None:
    """Return what adapter_config.json says of a file, None = it is none of HF PEFT's."""
    path = file.with_name(CONFIG)
    if file.name not in FILES:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: needs {CONFIG} beside it, which has the scaling") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable ({one_line(error)})") from None
    if not isinstance(config, dict) or config.get("peft_type") not in KINDS:
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{path}: peft_type {one_line(str(kind))}; what can be used: {', '.join(KINDS)}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASES):
        raise CheckpointError(
            f"{path}: init_lora_weights {one_line(init)} changes the model too; "
            "save it as LoRA, with path_initial_model_for_weight_conversion"
        )
    if config.get("layer_replication"):
        raise CheckpointError(f"{path}: layer_replication makes another model of it")
    return config


def has_scaling(config: Config) -> bool:
    """Whether the file says by how much its changes are multiplied."""
    return config["peft_type"] == "LORA"


def changes_of(
    tensors: dict[str, Tensor], config: Config, given: Scaling, file: str
) -> dict[str, tuple[str, Change, float | None]]:
    """Return by published name the kind, the change and its scaling."""
    parts: dict[str, dict[str, Tensor]] = {}
    modules: dict[str, str] = {}
    for key, tensor in tensors.items():
        found = PART.fullmatch(key)
        if found is None:
            raise CheckpointError(f"{file}: has a tensor {one_line(key)}, which is no part of an adapter")
        name = _published(found[1], file)
        modules[name] = found[1].removeprefix("base_model.model.")
        parts.setdefault(name, {})[found[2] or "block"] = tensor
    return {name: _change(found, modules[name], config, given, f"{file}: {name}") for name, found in parts.items()}


def _published(module: str, file: str) -> str:
    found = MODULE.fullmatch(module)
    if found is None:
        if module.rpartition(".")[2] in ("lm_head", "head"):
            return "head.weight"
        raise CheckpointError(f"{file}: changes {one_line(module)}, which is no matrix of RWKV")
    half = "ffn" if found[2] == "ffn" else "att"
    name = NAMES.get(found[3], found[3]) if half == "att" else found[3]
    if name not in MATRICES[half]:
        raise CheckpointError(f"{file}: changes {one_line(module)}, which is no matrix of RWKV")
    return f"blocks.{int(found[1])}.{half}.{name}.weight"


def _change(parts: dict[str, Tensor], module: str, config: Config, given: Scaling, at: str) -> tuple[str, Change, float | None]:
    if set(parts) == {"block"} and config["peft_type"] != "LORA":
        return _block(parts["block"], config, given, at)
    if not {"lora_A", "lora_B"} <= set(parts) or config["peft_type"] != "LORA" or "block" in parts:
        raise CheckpointError(f"{at}: it has {' and '.join(sorted(parts))}, which make no adapter")
    a, b = parts["lora_A"], parts["lora_B"]
    if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1]:
        raise CheckpointError(f"{at}: its halves have shapes {list(a.shape)} and {list(b.shape)}")
    factor = given.of(len(a)) if given.given else _factor(config, module, len(a), at)
    if bool(config.get("use_dora")) != ("lora_magnitude_vector" in parts):
        raise CheckpointError(f"{at}: use_dora and the file disagree")
    if "lora_magnitude_vector" in parts:
        return "DoRA", OutputDora(a, factor * b, parts["lora_magnitude_vector"].flatten()), factor
    return "LoRA", LoraChange(a, factor * b), factor


def _block(g: Tensor, config: Config, given: Scaling, at: str) -> tuple[str, Change, None]:
    """Bone, which PEFT calls MiSS too."""
    if given.given and given.of(1) != 1:
        raise CheckpointError(f"{at}: Bone has no scaling")
    form = config.get("init_weights", True)
    if form == "bat" and g.dim() == 3 and g.shape[1] == g.shape[2]:
        return "Bat", OutputBat(g), None
    if form in (True, False) and g.dim() == 2:
        return "Bone", Bone(g), None
    raise CheckpointError(f"{at}: init_weights {one_line(str(form))} with a block of shape {list(g.shape)} cannot be used")


def _factor(config: Config, module: str, rank: int, at: str) -> float:
    """alpha / r, or alpha / sqrt(r); patterns are ends of modules' names."""
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or any(not re.fullmatch(r"[\w.]+", key) for key in patterns):
        raise CheckpointError(f"{at}: {CONFIG} has an alpha_pattern that is no table of modules' names")
    alpha = next((value for key, value in patterns.items() if f".{module}".endswith(f".{key}")), alpha)
    try:
        factor = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (TypeError, ValueError):
        factor = math.nan
    if not math.isfinite(factor):
        raise CheckpointError(f"{at}: {CONFIG} has no lora_alpha that can be used")
    return factor
