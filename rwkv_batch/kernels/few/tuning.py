"""Finds by timing which plans decode steps of few rows are done by; what was found is remembered for the card.

A plan is taken where whole steps are faster with it than without, and where it gives the same results.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from rwkv_batch.kernels.card_cache import recall, remember
from rwkv_batch.kernels.compiler import cache_folder
from rwkv_batch.kernels.few.ops import FewRowOps
from rwkv_batch.kernels.few.plan import CANDIDATES, FewPlan
from rwkv_batch.kernels.launch import KernelLaunchFailed
from rwkv_batch.kernels.measured import measured, portable
from rwkv_batch.model.state import State

log = logging.getLogger("rwkv_batch.engine")

GAIN = 0.995  # of a step without a plan, that one with it may take at most
REPLAYS = 4
# What is compared: the states of the first layers behind steps from random ones, number by number, since rounding that differs
# grows from layer to layer; and the logits, which tell whether the other layers are right. Between right kernels numbers of the
# states differ by less than 3e-3 of their spread, and logits by 1e-3, in long use by 3e-2; what is wrong differs by 1.
LAYERS = 2
STATE_TOLERANCE, LOGITS_TOLERANCE = 0.1, 0.4

Plans = dict[str, FewPlan | None]  # by `FewTuner._key`; None: steps without a plan are faster, or right


class FewTuner:
    """Chooses the plans of one set of ops. The states that it times and checks with are spoilt.

    decode_step  does a step of so many rows, of slots 0, 1, ..., and returns its logits
    """

    def __init__(self, ops: FewRowOps, state: State, decode_step: Callable[[int], Tensor]):
        self.ops = ops
        self.state = state
        self.decode_step = decode_step

    def tune(self, sizes: list[int]) -> None:
        """Choose for every number of rows, after the products' variants have been chosen.

        What pays for some rows pays for fewer: once nothing does, more are not tried.
        """
        card = torch.cuda.get_device_name(self.ops.launcher.device)
        file, shipped = file_of(card), measured(card).plans
        known, tried = recall(file, Plans), {}
        pays = True
        for size in sizes:
            candidates = [plan for plan in CANDIDATES if self._fits(size, plan)]
            if not candidates or size > self.state.num_slots:
                continue
            key = self._key(size)
            if key in known:
                plan = known[key]
            else:
                found_elsewhere = portable(key, self.ops.launcher.digest)
                if found_elsewhere in shipped:
                    plan = shipped[found_elsewhere]
                else:
                    plan = self._fastest(size, candidates) if pays else None
                tried[key] = plan = plan if plan in candidates and self._is_right(size, plan) else None
            pays = plan in candidates
            if pays:
                self.ops.plans[size] = plan
        if tried:
            remember(file, known | tried)

    def _fits(self, size: int, plan: FewPlan) -> bool:
        return self.ops.fits(size, plan) and (self.state.wkv.dtype is torch.float16 or not plan.pairs)

    def _key(self, size: int) -> str:
        shape = self.ops.prepared.source.shape
        return f"{size},{shape.width},{shape.ffn_width},{shape.num_layers},{self.ops.launcher.digest}"

    def _fastest(self, size: int, candidates: list[FewPlan]) -> FewPlan | None:
        times = {plan: self._time(size, plan) for plan in (None, *candidates)}
        limit = GAIN * times[None]
        return min((plan for plan in candidates if times[plan] < limit), key=times.__getitem__, default=None)

    def _time(self, size: int, plan: FewPlan | None) -> float:
        with self._by(size, plan):
            return self.ops.launcher.time(lambda: self.decode_step(size), rounds=REPLAYS)

    def _is_right(self, size: int, plan: FewPlan) -> bool:
        """Return whether steps by the plan give what steps without one give; see LAYERS."""
        try:
            expected, got = (self._two_steps(size, way) for way in (None, plan))
        except KernelLaunchFailed as error:
            log.error("steps of %d rows cannot be run by %s: %s", size, plan, error)
            return False
        apart = [(one - other).norm(dim=-1) / other.norm(dim=-1) for one, other in zip(got[:2], expected[:2], strict=True)]
        right = all(bool((share <= LOGITS_TOLERANCE).all()) for share in apart) and all(
            bool(((one - other).abs() <= STATE_TOLERANCE * (other.std() + other.abs())).all())
            for one, other in zip(got[2:], expected[2:], strict=True)
        )
        if not right:
            log.error("steps of %d rows give WRONG RESULTS on this card by %s: it is not used", size, plan)
        return right

    def _two_steps(self, size: int, plan: FewPlan | None) -> list[Tensor]:
        """Return the logits of two steps and, behind them, the states of the first layers."""
        state = self.state
        parts, generator = (state.shift[:, :, :size], state.wkv[:, :size]), torch.Generator(state.shift.device).manual_seed(0)
        for part in parts:
            part.normal_(0, 0.5, generator=generator)
        with self._by(size, plan):
            logits = [self.decode_step(size).to(torch.float32, copy=True) for _ in range(2)]
        return [*logits, *(part[:LAYERS].to(torch.float32, copy=True) for part in parts)]

    @contextlib.contextmanager
    def _by(self, size: int, plan: FewPlan | None) -> Iterator[None]:
        """Steps of so many rows are done by the plan meanwhile."""
        self.ops.plans.pop(size, None)
        if plan is not None:
            self.ops.plans[size] = plan
        try:
            yield
        finally:
            self.ops.plans.pop(size, None)


def file_of(card: str) -> Path:
    """Where what was found for a card is kept."""
    return cache_folder() / f"few-{card.replace(' ', '-')}.json"
