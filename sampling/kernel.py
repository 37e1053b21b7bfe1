"""The sampler on a GPU: one kernel for all rules, `cuda/sampling.cu` and `hip/sampling.hip`.

Obeys `reference.py`, which describes the rules; that the results agree is checked by `check`. Everything it reads and writes
stays at its place on the device, so a CUDA graph that captured `sample` replays it with the controls of the moment.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.base import Controls, Needs, Sampled
from sampling.masks import SlotMasks, num_words, pack, words_of
from sampling.params import SamplingParams
from sampling.reference import report_logprobs

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
METHODS = ("greedy", "plain", "joint", "sequential", "gumbel", "noise", "rejection")
TENSORS = (
    "temperature", "top_k", "top_p", "min_p_depth", "alpha_presence", "alpha_frequency", "alpha_decay", "repetition", "noise",
    "penalized",
)  # fmt: skip
POINTER = ctypes.c_void_p


class SampleArgs(ctypes.Structure):
    """`SampleArgs` of cuda/sampling/args.h, field by field."""

    _fields_ = (
        ("logits", POINTER),
        ("stride", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("bias_width", ctypes.c_int32),
        ("slots", POINTER),
        ("ids", POINTER),
        ("first_id", ctypes.c_int64),
        ("mask_lines", POINTER),
        ("mask_words", POINTER),
        ("method", POINTER),
        *((name, POINTER) for name in TENSORS),
        ("seed", POINTER),
        ("choice", POINTER),
        ("step", POINTER),
        ("first_end", POINTER),
        ("bias_columns", POINTER),
        ("bias_values", POINTER),
        ("num_bias", POINTER),
        ("penalties", POINTER),
        ("penalty_stride", ctypes.c_int64),
        ("touched", POINTER),
        ("pending_column", POINTER),
        ("pending_penalty", POINTER),
        ("seen", POINTER),
        ("out_ids", POINTER),
        ("out_finite", POINTER),
        ("last_ids", POINTER),
        ("out_boundary", POINTER),
    )


class KernelSampler:
    """The `Sampler` of `base.py` as a kernel.

    Args:
        num_slots: S
        ids: [U] int64, strictly increasing; column j of the logits is token ids[j]
        device: a CUDA or ROCm device
        library: the built kernels, see `rwkv_batch.kernels.compiler.library`
        last_ids: [S] int64 on the device, written beside the result: a step's input; or None
        max_bias: entries of a row's logit bias, at most; ValueError from `start_many` for more

    `controls.penalties` holds each slot's penalties as of the step before without the token sampled there; that token and what
    it adds are `pending_column` and `pending_penalty`, applied by the next step. `touched` has a bit for every eight columns
    of a slot; where it is 0 the penalties are 0, none of the columns has occurred, and neither is read.
    """

    def __init__(
        self,
        num_slots: int,
        ids: Tensor,
        device: torch.device | str,
        library: ctypes.CDLL,
        *,
        last_ids: Tensor | None = None,
        max_bias: int = 1024,
    ):
        self.controls = Controls(num_slots, ids, device)
        self.needs = self.controls.needs
        self.masks = SlotMasks(num_slots, len(ids), device)
        self.ids = ids.to(device)
        self.device = self.controls.temperature.device  # with its index
        check_layout(library)
        self._codes = method_codes(library)
        self._types = {dtype for dtype, code in TYPES.items() if library.rwkv_sample_takes(code)}
        self._sample = library.rwkv_sample
        self._sample.argtypes = (ctypes.POINTER(SampleArgs), POINTER)
        self._sample.restype = ctypes.c_int
        num_columns = len(ids)
        first = int(ids[0])
        self._first_id = first if int(ids[-1]) - first + 1 == num_columns else None
        self._last_ids = last_ids
        self.boundary: Tensor | None = None  # [B, 3] set by tests to see what the filters found
        # At their places from the start, so that no graph is ever stale.
        memory = _memory(num_slots, num_columns, max_bias, device)
        self._method = memory["method"]
        self._num_bias = memory["num_bias"]
        self._touched = memory["touched"]
        self._pending_column = memory["pending_column"].fill_(-1)
        self._pending_penalty = memory["pending_penalty"]
        self.controls.penalties = memory["penalties"][:, :num_columns]
        self.controls.seen = memory["seen"]
        self.controls.bias_columns = memory["bias_columns"]
        self.controls.bias_values = memory["bias_values"]
        self._max_bias = max_bias
        self._args = self._lasting_args()

    @staticmethod
    def num_bytes(num_slots: int, num_columns: int, max_bias: int) -> int:
        """Bytes on the device."""
        tensors = _memory(num_slots, num_columns, max_bias, "meta").values()
        masks = SlotMasks(num_slots, num_columns, "meta").memory
        return sum(tensor.nbytes for tensor in tensors) + masks.nbytes + Controls.num_bytes(num_slots)

    def start_many(
        self,
        slots: Sequence[int],
        params: Sequence[SamplingParams],
        choices: Sequence[int],
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """See `Controls.start_many`."""
        lengths = [len(p.logit_bias) for p in params]
        if max(lengths, default=0) > self._max_bias:
            raise ValueError(f"logit_bias: {max(lengths)} entries, room is for {self._max_bias}")
        self.controls.start_many(slots, params, choices, prompts)
        needs = [self.controls.needs[slot] for slot in slots]
        names = [p.rule if need.method == "perturbed" else need.method for need, p in zip(needs, params, strict=True)]
        methods = [self._codes[name] for name in names]
        index = torch.tensor(slots).to(self.device, non_blocking=True)
        for target, values in ((self._method, methods), (self._num_bias, lengths)):
            target.index_copy_(0, index, torch.tensor(values, dtype=target.dtype).to(self.device, non_blocking=True))
        self._pending_column.index_fill_(0, index, -1)
        self._touched.index_fill_(0, index, 0)
        repeated = [slot for slot, need in zip(slots, needs, strict=True) if need.repeated]
        if repeated and prompts:
            index = torch.tensor(repeated).to(self.device, non_blocking=True)
            eights = self.controls.seen.index_select(0, index).view(torch.uint8) != 0
            self._touched.index_copy_(0, index, pack(eights))

    def count(self, slot: int, ids: Sequence[int]) -> None:
        """See `Controls.count`. With penalties it takes some launches for each id, so it is for few of them."""
        controls = self.controls
        controls.step[slot] += len(ids)
        controls.host_step[slot] += len(ids)
        if not (self.needs[slot].penalized and ids):
            return
        penalties, decay = controls.penalties[slot], controls.alpha_decay[slot]
        pending, added = self._pending_column[slot].long(), self._pending_penalty[slot]
        columns = controls.columns_of(ids)
        for column in columns:
            penalties.mul_(decay)
            penalties.index_add_(0, pending.clamp(min=0)[None], torch.where(pending < 0, 0, added)[None])
            added = torch.where(penalties[column] == 0, controls.alpha_presence[slot], controls.alpha_frequency[slot])
            pending = torch.full_like(pending, column)
        self._pending_column[slot], self._pending_penalty[slot] = pending, added
        eights = words_of((column // 8 for column in columns), -(-len(self.ids) // 8))
        self._touched[slot] |= eights.to(self.device, non_blocking=True)
        if self.needs[slot].repeated:
            controls.seen[slot] |= words_of(columns, len(self.ids)).to(self.device, non_blocking=True)

    def sample(self, logits: Tensor, slots: Tensor, slot_list: Sequence[int] | None = None) -> Sampled:
        """Sample one token for each row of `logits` [B, U]; slot -1 = padding, whose row is left alone.

        Without `slot_list` no log-probabilities are reported: that is what a captured graph does.
        """
        sampled = self.launch(logits, slots)
        if slot_list is None:
            return sampled
        needs = [self.needs[slot] for slot in slot_list]
        for slot in slot_list:
            self.controls.host_step[slot] += 1
        if all(need.logprobs is None for need in needs):
            return sampled
        return self.report_logprobs(sampled, logits, slots, needs)

    def report_logprobs(self, sampled: Sampled, logits: Tensor, slots: Tensor, needs: Sequence[Needs]) -> Sampled:
        """See `GraphSampler.report_logprobs`."""
        return report_logprobs(self.controls, self.ids, sampled, logits, slots, needs)

    def launch(
        self,
        logits: Tensor,
        slots: Tensor,
        *,
        out_ids: Tensor | None = None,
        out_finite: Tensor | None = None,
        stream: int | None = None,
    ) -> Sampled:
        """Start the kernel; nothing is waited for.

        Args:
            logits: [B, U]; rows may be further apart than U, and are read faster when 16-byte aligned. Kernels built for models
                that are not quantised take fp16 alone, which other types become first
            slots: [B] int64, distinct; -1 = padding: id 0 and nothing else is written for the row
            out_ids, out_finite: [B] int64 and [B] bool, contiguous, written instead of new tensors
            stream: the CUDA stream's number; default: torch's current one
        """
        self._check(logits, slots)
        if logits.dtype not in self._types:
            logits = logits.half()
        ids = torch.empty_like(slots) if out_ids is None else out_ids
        finite = torch.empty_like(slots, dtype=torch.bool) if out_finite is None else out_finite
        args = self._args
        args.logits, args.stride, args.type = logits.data_ptr(), logits.stride(0), TYPES[logits.dtype]
        args.num_rows, args.slots = len(slots), slots.data_ptr()
        args.out_ids, args.out_finite, args.out_boundary = ids.data_ptr(), finite.data_ptr(), _pointer(self.boundary)
        if stream is None:
            stream = torch.cuda.current_stream(self.device).cuda_stream
        error = self._sample(ctypes.byref(args), stream)
        if error:
            raise RuntimeError(f"rwkv_sample failed with CUDA error {error}")
        return Sampled(ids, finite)

    def _lasting_args(self) -> SampleArgs:
        """Return the arguments that are the same for every launch."""
        controls = self.controls
        return SampleArgs(
            num_columns=len(self.ids),
            bias_width=self._max_bias,
            ids=None if self._first_id is not None else self.ids.data_ptr(),
            first_id=self._first_id or 0,
            mask_lines=self.masks.lines.data_ptr(),
            mask_words=self.masks.words.data_ptr(),
            method=self._method.data_ptr(),
            **{name: getattr(controls, name).data_ptr() for name in TENSORS},
            seed=controls.seed.data_ptr(),
            choice=controls.choice.data_ptr(),
            step=controls.step.data_ptr(),
            first_end=controls.first_end.data_ptr(),
            bias_columns=controls.bias_columns.data_ptr(),
            bias_values=controls.bias_values.data_ptr(),
            num_bias=self._num_bias.data_ptr(),
            penalties=controls.penalties.data_ptr(),
            penalty_stride=controls.penalties.stride(0),
            touched=self._touched.data_ptr(),
            pending_column=self._pending_column.data_ptr(),
            pending_penalty=self._pending_penalty.data_ptr(),
            seen=controls.seen.data_ptr(),
            last_ids=_pointer(self._last_ids),
        )

    def penalties(self, slots: Tensor) -> Tensor:
        """Return the penalties that the next step subtracts [B, U]; `slots` [B] int64."""
        controls = self.controls
        penalties = controls.penalties.index_select(0, slots) * controls.alpha_decay.index_select(0, slots)[:, None]
        column = self._pending_column.index_select(0, slots).long()
        hit = torch.where(column >= 0, self._pending_penalty.index_select(0, slots), 0)
        penalties.scatter_add_(1, column.clamp(min=0)[:, None], hit[:, None])
        return torch.where(controls.penalized.index_select(0, slots)[:, None], penalties, 0)

    def _check(self, logits: Tensor, slots: Tensor) -> None:
        expected = (len(slots), len(self.ids))
        if logits.device != self.device or logits.dtype not in TYPES:
            raise ValueError(f"logits: expected fp32, fp16 or bf16 on {self.device}, got {logits.dtype} on {logits.device}")
        if logits.shape != expected or logits.stride(1) != 1:
            raise ValueError(f"logits: expected {list(expected)} with adjacent columns, got {list(logits.shape)}")
        if slots.device != self.device or slots.dtype != torch.int64 or not slots.is_contiguous():
            raise ValueError(f"slots: expected contiguous int64 on {self.device}, got {slots.dtype} on {slots.device}")


def _memory(num_slots: int, num_columns: int, max_bias: int, device: torch.device | str) -> dict[str, Tensor]:
    """Return the sampler's own arrays on the device, by name."""

    def zeros(dtype: torch.dtype, *dims: int) -> Tensor:
        return torch.zeros(num_slots, *dims, dtype=dtype, device=device)

    return {
        "method": zeros(torch.int32),
        "num_bias": zeros(torch.int32),
        "touched": zeros(torch.int32, -(-num_columns // 256)),
        "pending_column": zeros(torch.int32),
        "pending_penalty": zeros(torch.float32),
        "seen": zeros(torch.int32, num_words(num_columns)),
        "penalties": zeros(torch.float32, -(-num_columns // 8) * 8),
        "bias_columns": zeros(torch.int64, max_bias),
        "bias_values": zeros(torch.float32, max_bias),
    }


def check_layout(library: ctypes.CDLL) -> None:
    """Raise RuntimeError where the kernels were built from other arguments than these."""
    built, here = library.rwkv_sample_args_size(), ctypes.sizeof(SampleArgs)
    if built != here:
        raise RuntimeError(f"rwkv_sample takes arguments of {built} bytes, and sampling/kernel.py describes {here}")


def method_codes(library: ctypes.CDLL) -> dict[str, int]:
    """Return the kernels' code of each of METHODS; RuntimeError for one that they do not have."""
    code = library.rwkv_sample_method
    code.argtypes, code.restype = (ctypes.c_char_p,), ctypes.c_int
    codes = {name: code(name.encode()) for name in METHODS}
    if unknown := [name for name, number in codes.items() if number < 0]:
        raise RuntimeError(f"rwkv_sample has no method {', '.join(unknown)}")
    return codes


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
