"""Which cards reach each other's memory, over what, and whether sums over them come out right."""

import ctypes
import os
from collections.abc import Callable, Sequence

import torch

from rwkv_batch.errors import UsageError
from rwkv_batch.kernels.launch import KernelLaunchFailed
from rwkv_batch.kernels.tensor_parallel.exchange import KernelExchange

NONE, BUS, NVLINK = 0, 1, 2  # as `rwkv_exchange_link` has them
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_cards(devices: Sequence[torch.device], names: Sequence[str], link: Callable[[int, int], int]) -> None:
    """Raise UsageError where these cards cannot be one engine.

    names  of the cards
    link   from, to -> NONE, BUS or NVLINK
    """
    flag = f"--tp {len(devices)}"
    if len({*names}) > 1:
        raise UsageError(f"{flag}: the cards are not alike: {', '.join(sorted({*names}))}", param="tp")
    for a in devices:
        for b in devices:
            if a == b:
                continue
            found = link(a.index, b.index)
            if found == NONE:
                raise UsageError(f"{flag}: card {a.index} does not reach the memory of card {b.index}", param="tp")
            if found == BUS:
                raise UsageError(f"{flag}: cards {a.index} and {b.index} are not linked by NVLink", param="tp")


def connect(library: ctypes.CDLL, devices: Sequence[torch.device]) -> None:
    """Let every card reach the memory of all others; UsageError with the reason where they cannot."""
    if any("expandable_segments:true" in os.environ.get(name, "").lower() for name in ALLOCATOR_SETTINGS):
        raise UsageError(f"--tp {len(devices)}: not with expandable segments of torch's allocator", param="tp")
    names = [torch.cuda.get_device_name(device) for device in devices]
    check_cards(devices, names, library.rwkv_exchange_link)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # which makes the device's context, where there is none yet
            for other in devices:
                if other != device and (error := library.rwkv_exchange_reach(other.index)):
                    raise KernelLaunchFailed(f"card {device.index} does not reach card {other.index}: CUDA error {error}")


@torch.inference_mode()
def check_sums(exchange: KernelExchange) -> None:
    """Raise UsageError where sums over the cards are not what torch makes of the same parts, the same bits on every card."""
    devices, longest, width = [part.device for part in exchange.parts], len(exchange.parts[0]), exchange.parts[0].shape[1]
    few = exchange.most_few // width  # tokens up to which parts are sent to all
    sizes = [size for size in (1, 7, few, few + 1, longest) if 0 < size <= longest]
    for device in devices:
        torch.cuda.synchronize(device)  # what lies where others write has been cleared
    exchange.begin()
    generator = torch.Generator().manual_seed(0)
    for number in range(exchange.num_sums):
        size = sizes[number % len(sizes)]
        given = [torch.randn(size, width, generator=generator).half() for _ in devices]
        parts = [part[:size] for part in exchange.parts]
        for part, values in zip(parts, given, strict=True):
            part.copy_(values)
        exchange.add(parts)
        total = given[0].float()
        for values in given[1:]:
            total = total + values.float()
        if not all(torch.equal(part.cpu(), total.half()) for part in parts):
            raise UsageError(f"--tp {len(devices)}: sums over these cards come out wrong", param="tp")
