"""Published tensors to weights in the layout the forward pass wants.

Takes the model's shape from the tensors themselves and checks every one against it before one byte is converted. Knows nothing
of slots, requests or sampling.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from tqdm import tqdm

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model import quantized, quantized_file
from rwkv_batch.model.adapters.adapter import Adapter, Merge
from rwkv_batch.model.architectures import BaseLayer, Shape, dims_of, layout_of, num_layers_of
from rwkv_batch.model.checkpoint import find_checkpoint, one_line, read_file
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.quantized_file import SCALES, Stored
from rwkv_batch.model.tensor_reader import SPLIT, TensorReader
from rwkv_batch.model.weight import Weight
from rwkv_batch.served.architectures import architecture_of

if TYPE_CHECKING:
    from rwkv_batch.model.tensor_parallel.shard import Shard

HEAD_SIZE = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE_DTYPES = tuple(DTYPES.values())
MIXES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")  # the order of `Layer.att_mix`


@dataclass(frozen=True)
class ModelShape(Shape):
    """RWKV-7's: heads of 64, and the ranks of the low-rank pairs."""

    rank_w: int
    rank_a: int
    rank_v: int
    rank_g: int

    head_size: ClassVar[int] = HEAD_SIZE

    @property
    def inner_width(self) -> int:
        """Width of what the recurrence works on: all heads that are here."""
        return self.num_heads * HEAD_SIZE

    def tensors(self, *, v_first_residual: bool = False) -> dict[str, tuple[int, ...]]:
        """See Shape."""
        c, f, v = self.width, self.ffn_width, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"emb.weight": (v, c), "head.weight": (v, c)}
        for norm in ("blocks.0.ln0", "ln_out"):
            shapes |= {f"{norm}.weight": (c,), f"{norm}.bias": (c,)}
        for i in range(self.num_layers):
            p = f"blocks.{i}."
            shapes |= {p + f"ln{n}.{kind}": (c,) for n in (1, 2) for kind in ("weight", "bias")}
            att = p + "att."
            shapes |= {att + name: (c,) for name in (*MIXES, "w0", "a0", "k_k", "k_a", "ln_x.weight", "ln_x.bias")}
            shapes |= {att + "r_k": (self.num_heads, HEAD_SIZE)}
            lora = {"w": self.rank_w, "a": self.rank_a, "g": self.rank_g}
            if i > 0 or v_first_residual:
                lora["v"] = self.rank_v
                shapes |= {att + "v0": (c,)}
            for name, rank in lora.items():
                shapes |= {att + f"{name}1": (c, rank), att + f"{name}2": (rank, c)}
            shapes |= {att + f"{name}.weight": (c, c) for name in ("receptance", "key", "value", "output")}
            shapes |= {p + "ffn.x_k": (c,), p + "ffn.key.weight": (f, c), p + "ffn.value.weight": (c, f)}
        return shapes

    def matrices(self, quant: Quantisation) -> dict[str, bool]:
        """See Shape."""
        if not quant.format:
            return {}
        names = [f"att.{name}.weight" for name in ("receptance", "key", "value", "output")] + ["ffn.key.weight"]
        found = {"head.weight": False} if quant.head else {}
        for i in range(self.num_layers):
            found |= {f"blocks.{i}.{name}": False for name in names} | {f"blocks.{i}.ffn.value.weight": True}
        return found


@dataclass
class Layer(BaseLayer):
    """One block's tensors in the compute dtype (norms, mixes and gates' biases stay fp32); large matrices may be quantised.

    Matrices are [out, in] as published, except `ffn_value`, kept [F, C] so that the row of an inactive unit can be skipped;
    low-rank pairs are [C, rank] and [rank, C].
    """

    ln1_weight: torch.Tensor  # [C], as the other vectors
    ln1_bias: torch.Tensor
    ln2_weight: torch.Tensor
    ln2_bias: torch.Tensor
    att_mix: torch.Tensor  # [6, 1, C] in the order of MIXES
    w0: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    a0: torch.Tensor
    a1: torch.Tensor
    a2: torch.Tensor
    g1: torch.Tensor
    g2: torch.Tensor
    v0: torch.Tensor | None  # the value residual of layer 0 is unused: None there
    v1: torch.Tensor | None
    v2: torch.Tensor | None
    k_k: torch.Tensor
    k_a: torch.Tensor
    one_minus_k_a: torch.Tensor  # what a key keeps however fast its head learns
    r_k: torch.Tensor  # [H, 64]
    rkv: Weight  # [3, C, C]: receptance, key, value
    output: Weight
    ln_x_weight: torch.Tensor
    ln_x_bias: torch.Tensor
    ffn_mix: torch.Tensor  # [1, 1, C]
    ffn_key: Weight  # [F, C]
    ffn_value: Weight  # [F, C]

    @cached_property
    def receptance(self) -> Weight:
        """[C, C]."""
        return self.rkv.part(0)

    @cached_property
    def key(self) -> Weight:
        """[C, C]."""
        return self.rkv.part(1)

    @cached_property
    def value(self) -> Weight:
        """[C, C]."""
        return self.rkv.part(2)


@dataclass
class Weights:
    """A whole model ready for the forward pass.

    embedding    [V, C] with ln0 already applied
    head         [U, C]: the rows of the output ids only
    output_ids   [U] int64, ascending: column j of the logits is token output_ids[j]
    architecture  as `architectures.py` calls it
    fingerprint  32 hex digits that tell models apart: of shapes, dtypes, sampled content, of the adapters merged into it and of
                 how the matrices are quantised, the same for all file formats
    start        [L, H, 64, 64] fp32: the recurrent state before the first token, where a tuned one was merged; None = zero
    """

    shape: Shape
    dtype: torch.dtype
    fingerprint: str
    embedding: torch.Tensor
    layers: Sequence[BaseLayer]
    ln_out_weight: torch.Tensor
    ln_out_bias: torch.Tensor
    head: Weight
    output_ids: torch.Tensor
    architecture: str = "RWKV-7"
    quant: Quantisation = PLAIN
    start: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors kept."""
        own = (self.embedding, self.head, self.ln_out_weight, self.ln_out_bias)
        return sum(t.nbytes for t in own) + sum(t.nbytes for layer in self.layers for t in layer.tensors)


def load(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    valid_ids: Callable[[int], Iterable[int]] | None = None,
    progress: bool | None = None,
    quant: Quantisation = PLAIN,
    adapters: Sequence[Adapter] = (),
) -> Weights:
    """Load a checkpoint; CheckpointError, one line, when the file is unusable.

    valid_ids  vocabulary size -> ids its tokenizer has; others get no logits. None = all
    progress   draw a bar on stderr; None = only on a terminal
    quant      how to keep the large matrices; PLAIN = as the file has them
    adapters   to be merged into it, in this order
    """
    file = find_checkpoint(path)
    stored = quantized_file.stored_as(file)
    quantized_file.check_wanted(str(file), quant, stored)
    return from_tensors(
        read_file(file),
        name=str(file),
        dtype=dtype,
        device=device,
        valid_ids=valid_ids,
        progress=progress,
        quant=quant,
        stored=stored,
        adapters=adapters,
    )


def from_tensors(
    tensors: dict[str, torch.Tensor],
    *,
    name: str = "checkpoint",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    valid_ids: Callable[[int], Iterable[int]] | None = None,
    progress: bool | None = None,
    quant: Quantisation = PLAIN,
    stored: Stored | None = None,
    adapters: Sequence[Adapter] = (),
    shard: "Shard | None" = None,
    layer_devices: Sequence[torch.device] | None = None,
) -> Weights:
    """Check published tensors and bring them into compute layout, one at a time; empties `tensors` on the way.

    quant     how to keep the large matrices
    stored    what says that they are quantised already, and how: then `quant` does not count
    adapters  to be merged into it, in this order, in fp32 and before matrices are rounded or quantised
    shard     the part that is read and kept, of a model in plain numbers without adapters; None = all
    layer_devices  where each layer goes; the embedding to the first one's, head and norm to the last one's; None = `device`
    """
    shape = check_tensors(tensors, name, stored, quant)
    quant = stored.quant if stored else quant
    architecture = architecture_of(tensors, name)
    merge = _merge(adapters, tensors, name, stored)
    fingerprint = quant.fingerprint(stored.source if stored else merge.fingerprint(fingerprint_of(tensors)))
    merge.replace(tensors)
    places = layer_devices or [torch.device(device)] * shape.num_layers
    bar = tqdm(total=len(tensors), desc=f"loading {Path(name).name}", unit="tensor", leave=False, disable=_hide(progress))
    with bar:
        reader = TensorReader(tensors, name, dtype, places[0], bar, merge, cut=shard and shard.cut)
        # The large tables first: beside what is kept there is one tensor of the file, and that had better be small at the end.
        ln0 = (reader.vector("blocks.0.ln0.weight"), reader.vector("blocks.0.ln0.bias"))
        embedding = reader.take("emb.weight")
        for chunk in embedding.split(SPLIT):  # in place, so that no second table is needed
            chunk.copy_(torch.nn.functional.layer_norm(chunk.float(), (shape.width,), *ln0, 1e-5))
        reader.place_on(places[-1])
        head = reader.weight(("head.weight",), quant.of_head)
        output_ids = _output_ids(head, valid_ids, name)
        head = _keep_rows(head, output_ids) if shard is None else shard.head(head, output_ids)
        layers = []
        for i, place in enumerate(places):
            reader.place_on(place)
            layers.append(layout_of(architecture).take_layer(i, reader, quant.format))
        states = [reader.take(key, torch.float32) for key in shape.states() if key in tensors]
        return Weights(
            shape=shape if shard is None else shard.shape_of(shape),
            dtype=dtype,
            fingerprint=fingerprint,
            embedding=embedding,
            layers=layers,
            ln_out_weight=reader.vector("ln_out.weight"),
            ln_out_bias=reader.vector("ln_out.bias"),
            head=head,
            output_ids=output_ids,
            architecture=architecture,
            quant=quant,
            start=torch.stack(states) if states else None,
        )


def take_layer(i: int, reader: TensorReader, name: str) -> Layer:
    """Take one block of RWKV-7 out of the checkpoint; `name`: the format of its large matrices, "" = as they are."""
    p, att, ffn = f"blocks.{i}.", f"blocks.{i}.att.", f"blocks.{i}.ffn."
    take, vector = reader.take, reader.vector
    if i == 0:
        reader.drop(att + unused for unused in ("v0", "v1", "v2"))
    residual = dict.fromkeys(("v0", "v1", "v2"))
    if i > 0:
        residual = {"v0": vector(att + "v0"), "v1": take(att + "v1"), "v2": take(att + "v2")}
    vectors = {n: vector(att + n) for n in ("w0", "a0", "k_k", "k_a")}
    return Layer(
        **{f"ln{n}_{kind}": vector(p + f"ln{n}.{kind}") for n in (1, 2) for kind in ("weight", "bias")},
        att_mix=torch.stack([vector(att + n) for n in MIXES])[:, None],
        **{f"{n}{side}": take(att + f"{n}{side}") for n in "wag" for side in (1, 2)},
        **residual,
        **vectors,
        one_minus_k_a=1 - vectors["k_a"],
        rkv=reader.weight([att + f"{n}.weight" for n in ("receptance", "key", "value")], name),
        output=reader.weight([att + "output.weight"], name),
        r_k=take(att + "r_k", torch.float32),
        ln_x_weight=vector(att + "ln_x.weight"),
        ln_x_bias=vector(att + "ln_x.bias"),
        ffn_mix=vector(ffn + "x_k")[None, None],
        ffn_key=reader.weight([ffn + "key.weight"], name),
        ffn_value=reader.weight([ffn + "value.weight"], name, transposed=True),
    )


def _merge(adapters: Sequence[Adapter], tensors: dict[str, torch.Tensor], name: str, stored: Stored | None) -> Merge:
    """Return what the adapters make of the tensors; CheckpointError where they cannot be merged into these."""
    if adapters and stored:
        raise CheckpointError(
            f"{name}: its matrices are quantised already; an adapter is merged into the model they were made of"
        )
    merge = Merge(adapters)
    merge.check_fits(tensors)
    return merge


def check_tensors(
    tensors: dict[str, torch.Tensor], name: str, stored: Stored | None = None, quant: Quantisation = PLAIN
) -> Shape:
    """Return the shape the tensors have, once every name, shape and dtype agrees with it; CheckpointError otherwise.

    stored, quant  as in `from_tensors`
    """
    architecture = architecture_of(tensors, name)
    shape = layout_of(architecture).shape_of(tensors, name)
    if (stored or quant.format) and shape.ffn_width % quantized.BLOCK:
        raise CheckpointError(
            f"{name}: cannot be quantised: its feed-forward width {shape.ffn_width} is not a multiple of {quantized.BLOCK}"
        )
    expected = shape.tensors(v_first_residual="blocks.0.att.v0" in tensors)
    if any(key in tensors for key in shape.states()):
        expected |= shape.states()
    types = dict.fromkeys(expected, FILE_DTYPES)
    for key, transposed in shape.matrices(stored.quant if stored else PLAIN).items():
        form, dims = stored.quant.format, expected[key][::-1] if transposed else expected[key]
        expected[key] = (*dims[:-1], quantized.stored_columns(form, dims[-1]))
        expected[key + SCALES] = quantized.scales_shape(form, dims, transposed=transposed)
        types |= {key: (quantized.value_dtype(form),), key + SCALES: (quantized.FORMATS[form].scale_dtype,)}
    missing = sorted(expected.keys() - tensors.keys())
    foreign = [one_line(key) for key in sorted(tensors.keys() - expected.keys())]
    wrong = [
        f"{key} {list(tensors[key].shape)} instead of {list(dims)}"
        for key, dims in expected.items()
        if key in tensors and not _fits(tensors[key].shape, dims)
    ]
    dtypes = [f"{key} {tensors[key].dtype}" for key in expected if key in tensors and tensors[key].dtype not in types[key]]
    empty = [key for key in expected if key in tensors and (tensors[key].is_meta or not tensors[key].numel())]
    problems = {"misses": missing, "has unknown tensors": foreign, "wrong shape": wrong, "dtype": dtypes, "no values": empty}
    for problem, found in problems.items():
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise CheckpointError(
                f"{name}: not an {architecture} checkpoint that can be run: {problem}: {', '.join(found[:3])}{more}"
            )
    return shape


def shape_of(tensors: dict[str, torch.Tensor], name: str) -> ModelShape:
    """Return the shape that RWKV-7's tensors have; CheckpointError where they tell of none."""

    def dims(key: str, count: int) -> torch.Size:
        return dims_of(tensors, key, count, name)

    vocab_size, width = dims("emb.weight", 2)
    num_layers = num_layers_of(tensors, name)
    if width == 0 or width % HEAD_SIZE or vocab_size == 0:
        raise CheckpointError(f"{name}: width {width} is not a multiple of the head size {HEAD_SIZE}")
    heads = dims("blocks.0.att.r_k", 2)
    if tuple(heads) != (width // HEAD_SIZE, HEAD_SIZE):
        raise CheckpointError(f"{name}: heads of {heads[1]} values; only the head size {HEAD_SIZE} is supported")
    value_layer = min(1, num_layers - 1)
    has_residual = num_layers > 1 or "blocks.0.att.v1" in tensors
    return ModelShape(
        num_layers=num_layers,
        width=width,
        ffn_width=dims("blocks.0.ffn.key.weight", 2)[0],
        vocab_size=vocab_size,
        rank_w=dims("blocks.0.att.w1", 2)[1],
        rank_a=dims("blocks.0.att.a1", 2)[1],
        rank_v=dims(f"blocks.{value_layer}.att.v1", 2)[1] if has_residual else 0,
        rank_g=dims("blocks.0.att.g1", 2)[1],
    )


def fingerprint_of(tensors: dict[str, torch.Tensor]) -> str:
    """Return 32 hex digits over names, shapes, dtypes and up to 64 spread-out stretches of 512 values of every tensor."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"{key}{list(_without_ones(tensor.shape))}{tensor.dtype}".encode())
        flat = tensor.reshape(-1)
        stretches = max(1, min(64, flat.numel() // 512))
        starts = (i * (flat.numel() // stretches) for i in range(stretches))
        sample = torch.cat([flat[start : start + 512] for start in starts])
        digest.update(sample.cpu().view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def _output_ids(head: Weight, valid_ids: Callable[[int], Iterable[int]] | None, name: str) -> torch.Tensor:
    """Return the ids worth a logit, ascending: the tokenizer has them and their head row is not all zero."""
    rows, device = head.shape[0], head.values.device
    parts = (head.rows(slice(start, start + SPLIT)).dense() for start in range(0, rows, SPLIT))
    used = torch.cat([part.abs().amax(1) > 0 for part in parts])
    if valid_ids is not None:
        valid = torch.zeros(rows, dtype=torch.bool, device=device)
        valid[torch.tensor(list(valid_ids(rows)), dtype=torch.int64, device=device)] = True
        used &= valid
    ids = used.nonzero().flatten()
    if ids.numel() == 0:
        raise CheckpointError(f"{name}: head.weight is all zero")
    return ids


def _keep_rows(head: Weight, ids: torch.Tensor) -> Weight:
    """Return the head's rows `ids`, as a view when they follow one another."""
    first, last = int(ids[0]), int(ids[-1])
    return head.rows(slice(first, last + 1) if last - first + 1 == ids.numel() else ids)


def iter_summary(weights: Weights) -> Iterator[str]:
    """Yield the lines that tell a person what was loaded."""
    s = weights.shape
    outputs = f"{len(weights.output_ids):,} of {s.vocab_size:,} ids have logits"
    yield f"{weights.architecture}, {s.num_layers} layers of width {s.width}, {outputs}"
    kept = f"{quantized_file.described(weights.quant)} and " if weights.quant.format else ""
    size = f"{weights.num_bytes / 2**20:,.0f} MiB in {kept}{weights.dtype} on {weights.device}"
    yield f"{size}, fingerprint {weights.fingerprint}"


def _fits(found: Iterable[int], dims: tuple[int, ...]) -> bool:
    """Whether a tensor has the dimensions wanted; a vector may have further ones of size 1."""
    return tuple(found) == dims or (len(dims) == 1 and _without_ones(found) == dims)


def _without_ones(dims: Iterable[int]) -> tuple[int, ...]:
    return tuple(d for d in dims if d != 1)  # published vectors are [1, 1, C]


def _hide(progress: bool | None) -> bool | None:
    return None if progress is None else not progress  # tqdm: None = hide unless on a terminal
