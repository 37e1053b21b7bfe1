"""Which sampler runs."""

import ctypes
import logging

import torch
from torch import Tensor

from sampling import flashinfer
from sampling.base import Sampler
from sampling.kernel import KernelSampler
from sampling.reference import ReferenceSampler

log = logging.getLogger("rwkv_batch.engine")


def make_sampler(
    name: str,
    num_slots: int,
    ids: Tensor,
    device: torch.device | str,
    library: ctypes.CDLL | None = None,
    *,
    last_ids: Tensor | None = None,
    max_bias: int = 1024,
) -> Sampler:
    """Return the sampler `name`, ready to use; one that would compile at first use has done so.

    Args:
        name: auto, rapid, flashinfer or reference. auto is rapid where there is a library. Where FlashInfer is missing rapid
            runs, and the log says so
        num_slots, ids, device, library, last_ids, max_bias: see `KernelSampler`; without a library reference runs
    """
    if name == "reference" or library is None:
        if name in ("rapid", "flashinfer"):
            log.warning("--sampler %s needs the kernels, which are not in use: the reference sampler runs", name)
        return ReferenceSampler(num_slots, ids, device)
    if name == "flashinfer":
        reason = flashinfer.missing()
        if reason is None:
            sampler = flashinfer.FlashInferSampler(num_slots, ids, device, library, last_ids=last_ids, max_bias=max_bias)
            log.info("FlashInfer's filters: compiling where that was not done before (about a minute)")
            sampler.warm()
            return sampler
        log.warning("--sampler flashinfer: %s: the rapid sampler runs", reason)
    return KernelSampler(num_slots, ids, device, library, last_ids=last_ids, max_bias=max_bias)
