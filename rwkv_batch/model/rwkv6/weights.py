"""RWKV-6's published tensors to weights in the layout its forward pass wants; see `rwkv_batch/model/weights.py`."""

from dataclasses import dataclass
from functools import cached_property

import torch

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model.architectures import BaseLayer, Shape, dims_of, num_layers_of
from rwkv_batch.model.quantized import Quantisation
from rwkv_batch.model.tensor_reader import TensorReader
from rwkv_batch.model.weight import Weight

MIXES = ("w", "k", "v", "r", "g")  # the order of the low-rank pair's five parts
RKVG = ("receptance", "key", "value", "gate")
ATT_MATRICES = (*RKVG, "output")


@dataclass(frozen=True)
class Rwkv6Shape(Shape):
    """See Shape. `rank_mix`: of each of the five mixes, `rank_decay`: of the decay; heads are of `head_size` values."""

    rank_mix: int
    rank_decay: int
    head_size: int

    def tensors(self, *, v_first_residual: bool = False) -> dict[str, tuple[int, ...]]:
        """See Shape; no layer carries unused tensors."""
        c, f, v = self.width, self.ffn_width, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"emb.weight": (v, c), "head.weight": (v, c)}
        for norm in ("blocks.0.ln0", "ln_out"):
            shapes |= {f"{norm}.weight": (c,), f"{norm}.bias": (c,)}
        for i in range(self.num_layers):
            p = f"blocks.{i}."
            shapes |= {p + f"ln{n}.{kind}": (c,) for n in (1, 2) for kind in ("weight", "bias")}
            att, ffn = p + "att.", p + "ffn."
            shapes |= {att + f"time_maa_{name}": (c,) for name in ("x", *MIXES)}
            shapes |= {att + name: (c,) for name in ("time_decay", "ln_x.weight", "ln_x.bias")}
            shapes |= {att + "time_maa_w1": (c, 5 * self.rank_mix), att + "time_maa_w2": (5, self.rank_mix, c)}
            shapes |= {att + "time_decay_w1": (c, self.rank_decay), att + "time_decay_w2": (self.rank_decay, c)}
            shapes |= {att + "time_faaaa": (self.num_heads, self.head_size)}
            shapes |= {att + f"{name}.weight": (c, c) for name in ATT_MATRICES}
            shapes |= {ffn + "time_maa_k": (c,), ffn + "time_maa_r": (c,)}
            shapes |= {ffn + "key.weight": (f, c), ffn + "receptance.weight": (c, c), ffn + "value.weight": (c, f)}
        return shapes

    def matrices(self, quant: Quantisation) -> dict[str, bool]:
        """See Shape."""
        if not quant.format:
            return {}
        names = [f"att.{name}.weight" for name in ATT_MATRICES] + ["ffn.key.weight", "ffn.receptance.weight"]
        found = {"head.weight": False} if quant.head else {}
        for i in range(self.num_layers):
            found |= {f"blocks.{i}.{name}": False for name in names} | {f"blocks.{i}.ffn.value.weight": True}
        return found


@dataclass
class Rwkv6Layer(BaseLayer):
    """One block's tensors in the compute dtype (norms, mixes, decay and bonus stay fp32); large matrices may be quantised.

    Matrices are [out, in] as published, except `ffn_value`, kept [F, C]; low-rank pairs are [C, rank] and [rank, C].
    """

    ln1_weight: torch.Tensor  # [C], as the other vectors
    ln1_bias: torch.Tensor
    ln2_weight: torch.Tensor
    ln2_bias: torch.Tensor
    att_mix: torch.Tensor  # [3, 1, C]: of what the five mixes are made of, of the token itself (0) and the one before it (1)
    mix: torch.Tensor  # [5, 1, C] in the order of MIXES
    mix_down: torch.Tensor  # [C, 5 * rank]
    mix_up: torch.Tensor  # [5, rank, C]
    decay: torch.Tensor
    decay_down: torch.Tensor
    decay_up: torch.Tensor
    bonus: torch.Tensor  # [H, head size]
    rkvg: Weight  # [4, C, C]: RKVG
    output: Weight  # [C, C]
    ln_x_weight: torch.Tensor
    ln_x_bias: torch.Tensor
    ffn_mix: torch.Tensor  # [2, 1, C]: of the key and the receptance
    ffn_key: Weight  # [F, C]
    ffn_receptance: Weight  # [C, C]
    ffn_value: Weight  # [F, C]

    @cached_property
    def receptance(self) -> Weight:
        """[C, C]."""
        return self.rkvg.part(0)

    @cached_property
    def key(self) -> Weight:
        """[C, C]."""
        return self.rkvg.part(1)

    @cached_property
    def value(self) -> Weight:
        """[C, C]."""
        return self.rkvg.part(2)

    @cached_property
    def gate(self) -> Weight:
        """[C, C]."""
        return self.rkvg.part(3)


def shape_of(tensors: dict[str, torch.Tensor], name: str) -> Rwkv6Shape:
    """Return the shape the tensors have; CheckpointError where they tell of none."""
    vocab_size, width = dims_of(tensors, "emb.weight", 2, name)
    num_layers = num_layers_of(tensors, name)
    heads, head_size = dims_of(tensors, "blocks.0.att.time_faaaa", 2, name)
    if not width or not vocab_size or heads * head_size != width:
        raise CheckpointError(f"{name}: {heads} heads of {head_size} values do not make the width {width}")
    return Rwkv6Shape(
        num_layers=num_layers,
        width=width,
        ffn_width=dims_of(tensors, "blocks.0.ffn.key.weight", 2, name)[0],
        vocab_size=vocab_size,
        rank_mix=dims_of(tensors, "blocks.0.att.time_maa_w2", 3, name)[1],
        rank_decay=dims_of(tensors, "blocks.0.att.time_decay_w1", 2, name)[1],
        head_size=head_size,
    )


def take_layer(i: int, reader: TensorReader, form: str) -> Rwkv6Layer:
    """Take one block out of the checkpoint; `form`: the format of its large matrices, "" = as they are."""
    p, att, ffn = f"blocks.{i}.", f"blocks.{i}.att.", f"blocks.{i}.ffn."
    take, vector = reader.take, reader.vector
    mix_all = vector(att + "time_maa_x")
    return Rwkv6Layer(
        **{f"ln{n}_{kind}": vector(p + f"ln{n}.{kind}") for n in (1, 2) for kind in ("weight", "bias")},
        att_mix=torch.stack((mix_all, torch.zeros_like(mix_all), torch.ones_like(mix_all)))[:, None],
        mix=torch.stack([vector(att + f"time_maa_{name}") for name in MIXES])[:, None],
        mix_down=take(att + "time_maa_w1"),
        mix_up=take(att + "time_maa_w2"),
        decay=vector(att + "time_decay"),
        decay_down=take(att + "time_decay_w1"),
        decay_up=take(att + "time_decay_w2"),
        bonus=take(att + "time_faaaa", torch.float32),
        rkvg=reader.weight([att + f"{name}.weight" for name in RKVG], form),
        output=reader.weight([att + "output.weight"], form),
        ln_x_weight=vector(att + "ln_x.weight"),
        ln_x_bias=vector(att + "ln_x.bias"),
        ffn_mix=torch.stack([vector(ffn + f"time_maa_{name}") for name in "kr"])[:, None],
        ffn_key=reader.weight([ffn + "key.weight"], form),
        ffn_receptance=reader.weight([ffn + "receptance.weight"], form),
        ffn_value=reader.weight([ffn + "value.weight"], form, transposed=True),
    )
