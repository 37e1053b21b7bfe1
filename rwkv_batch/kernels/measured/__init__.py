"""What was measured on kinds of cards, so that a first start on another such card need not measure it: `<card>.json`.

`bench/card/tune.py` makes such a file on the card. Its choices hold for the kernel sources, the architecture and the shapes
they were made with, and among ways that are on offer; what it has not is tuned.
"""

import functools
import logging
from pathlib import Path

import msgspec

from rwkv_batch.kernels.compiler import sources_digest
from rwkv_batch.kernels.few.plan import FewPlan
from rwkv_batch.kernels.variants import Variant

log = logging.getLogger("rwkv_batch.engine")

FOLDER = Path(__file__).parent


class Measured(msgspec.Struct):
    """What is known of a card.

    sources     digest of the kernel sources that `variants` and `plans` were timed with
    variants    by product, size and shape, as `portable` names them
    plans       by size and shape likewise; None: steps are faster without one
    algorithms  of cuBLASLt, by the name and version of what chose them, then by shape
    """

    sources: str = ""
    variants: dict[str, Variant] = {}
    plans: dict[str, FewPlan | None] = {}
    algorithms: dict[str, dict[str, list[int]]] = {}


@functools.cache
def measured(card: str) -> Measured:
    """Return what is shipped for a card of this name, without what was timed with other sources."""
    try:
        found = msgspec.json.decode(file_of(card).read_bytes(), type=Measured)
    except FileNotFoundError:
        return Measured()
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be used: %s", file_of(card), error)
        return Measured()
    return found if found.sources == sources_digest() else Measured(algorithms=found.algorithms)


def file_of(card: str) -> Path:
    """Where that is."""
    return FOLDER / f"{card.replace(' ', '-')}.json"


def portable(key: str, digest: str) -> str:
    """Return a key of the tuner without the hash of the library `digest`, which compilers take part in."""
    return key.replace(digest, digest.rsplit("-", 1)[0])
