"""How a model is cut into shards: heads, feed-forward units and rows of the head are dealt out, the rest is replicated.

So a rank's half of a block needs nothing of another rank's until the matrix behind it, whose outputs are sums over all ranks
(Shoeybi et al., "Megatron-LM", 2019; here r, k, v, the second halves of the low-rank pairs and the group norm go by heads).
"""

from dataclasses import dataclass, fields, replace

from torch import Tensor

from rwkv_batch.errors import UsageError
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import ModelShape

UNITS = 32  # feed-forward units that stay together
COLUMN_UNITS = (64, 8, 1)  # logits likewise: as many as leave every rank some
LAST = -1
FIELDS = [field.name for field in fields(ModelShape)]

# Which dimension is dealt out, by the name behind the layer's number; what is not here is replicated.
AXES = {
    **{f"att.{name}.weight": 0 for name in ("receptance", "key", "value")},
    **{f"att.{name}": 0 for name in ("r_k", "time_state")},
    **{f"att.{name}": LAST for name in ("w0", "a0", "v0", "w2", "a2", "v2", "g2", "k_k", "k_a")},
    **{f"att.{name}": LAST for name in ("ln_x.weight", "ln_x.bias", "output.weight")},
    "ffn.key.weight": 0,
    "ffn.value.weight": LAST,
}


@dataclass(frozen=True)
class ShardShape(ModelShape):
    """The shape of a shard: `width` is the model's, `ffn_width` and `num_heads` are what is here of them."""

    num_shards: int

    @property
    def num_heads(self) -> int:
        """Heads of this shard."""
        return super().num_heads // self.num_shards

    def tensors(self, *, v_first_residual: bool = False) -> dict[str, tuple[int, ...]]:
        """See `Shape`; of the head a share, rounded up."""
        whole = self.whole.tensors(v_first_residual=v_first_residual)
        shapes = {key: _cut_dims(key, dims, self.num_shards) for key, dims in whole.items()}
        return shapes | {"head.weight": (-(-self.vocab_size // self.num_shards), self.width)}

    @property
    def whole(self) -> ModelShape:
        """The model's."""
        values = {name: getattr(self, name) for name in FIELDS}
        return ModelShape(**values | {"ffn_width": self.ffn_width * self.num_shards})


@dataclass(frozen=True)
class Shard:
    """What rank `rank` of `count` has of a model."""

    rank: int
    count: int

    def shape_of(self, shape: ModelShape) -> ShardShape:
        """Return the shape of the shard."""
        return shard_shape(shape, self.count)

    def cut(self, key: str, tensor: Tensor) -> Tensor:
        """Return a view of what the rank has of a published tensor; of the head, which `head` cuts, all."""
        axis = axis_of(key)
        if axis is None:
            return tensor
        size = tensor.shape[axis] // self.count
        return tensor.narrow(axis, self.rank * size, size)

    def head(self, head: Weight, output_ids: Tensor) -> Weight:
        """Return the rows of the head [V, C] that give the rank's columns of the logits."""
        columns = columns_of(len(output_ids), self.count)[self.rank]
        return replace(head, values=head.values[output_ids[columns]])


def shard_shape(shape: ModelShape, count: int) -> ShardShape:
    """Return the shape of each of `count` shards; UsageError where the model cannot be dealt out to so many."""
    if shape.num_heads % count:
        raise UsageError(f"--tp {count}: {shape.num_heads} heads cannot be dealt out to {count} ranks", param="tp")
    if shape.ffn_width % (UNITS * count):
        parts = f"{count} parts that are multiples of {UNITS}"
        raise UsageError(f"--tp {count}: {shape.ffn_width} feed-forward units are not {parts}", param="tp")
    if shape.vocab_size < count:
        raise UsageError(f"--tp {count}: the model has {shape.vocab_size} tokens only", param="tp")
    values = {name: getattr(shape, name) for name in FIELDS}
    return ShardShape(**values | {"ffn_width": shape.ffn_width // count}, num_shards=count)


def columns_of(num_outputs: int, count: int) -> list[slice]:
    """Return which columns of the logits each rank makes: equal parts but for the last, which may have fewer, and has some.

    UsageError where there are too few for so many.
    """
    for unit in COLUMN_UNITS:
        size = -(-num_outputs // (count * unit)) * unit
        if size * (count - 1) < num_outputs:
            return [slice(rank * size, min((rank + 1) * size, num_outputs)) for rank in range(count)]
    raise UsageError(f"--tp {count}: {num_outputs} tokens have logits, too few for so many ranks", param="tp")


def axis_of(key: str) -> int | None:
    """Return which dimension of a published tensor is dealt out, None = it is replicated."""
    return AXES.get(key.split(".", 2)[2]) if key.startswith("blocks.") else None


def _cut_dims(key: str, dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    axis = axis_of(key)
    return dims if axis is None else tuple(n // count if i == axis % len(dims) else n for i, n in enumerate(dims))
