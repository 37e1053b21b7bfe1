"""Checkpoints whose matrices are quantised already: safetensors files that say so in their metadata.

A quantised matrix lies under its published name as `quantized.py` stores it (`ffn.value.weight` transposed), its scales under
that name and SCALES. All else is as published. The metadata name the format, its version, whether the head is quantised, and
the fingerprint of the model that was quantised: so the file's model has the fingerprint it would have if quantised at load.
"""

import json
import string
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model.quantized import FORMATS, VERSION, Quantisation
from rwkv_batch.served.glance import QUANTISED, SAFETENSORS

SCALES = ".scales"


@dataclass(frozen=True)
class Stored:
    """What a file of quantised matrices says of itself. `source`: the fingerprint of the model they were made of."""

    quant: Quantisation
    source: str


def stored_as(file: Path) -> Stored | None:
    """Return how a checkpoint's matrices are quantised, None = not; CheckpointError where that is not known here."""
    if file.suffix not in SAFETENSORS:
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            text = (opened.metadata() or {}).get(QUANTISED)
    except (OSError, SafetensorError):
        return None  # whoever reads the tensors says what is wrong
    if text is None:
        return None
    try:
        found = json.loads(text)
        form, head, version, source = (found[name] for name in ("quant", "head", "version", "source"))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError(f"{file}: its metadata do not say how it is quantised") from None
    if version != VERSION or form not in FORMATS:
        raise CheckpointError(f"{file}: quantised as {form}, version {version}; this program reads version {VERSION}")
    if not isinstance(head, bool) or not isinstance(source, str) or len(source) != 32 or set(source) - set(string.hexdigits):
        raise CheckpointError(f"{file}: its metadata do not say how it is quantised")
    return Stored(Quantisation(form, head), source)


def metadata_of(stored: Stored) -> dict[str, str]:
    """Return the metadata of a file of such matrices."""
    about = {"quant": stored.quant.format, "head": stored.quant.head, "version": VERSION, "source": stored.source}
    return {QUANTISED: json.dumps(about)}


def check_wanted(name: str, wanted: Quantisation, stored: Stored | None) -> None:
    """Raise CheckpointError where a file is quantised otherwise than wanted; PLAIN = as it is."""
    if stored is None or not wanted.format or wanted == stored.quant:
        return
    raise CheckpointError(
        f"{name}: its matrices are quantised as {described(stored.quant)}; {described(wanted)} can be made of the model that it"
        " was made of only"
    )


def described(quant: Quantisation) -> str:
    """Return it in words."""
    return f"{quant.format}{'' if quant.head else ' but the head'}"
