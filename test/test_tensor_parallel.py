"""A model spread over several ranks, here all on the CPU, says what it says on one device, and so does its engine."""

import random
from contextlib import contextmanager

import pytest
import torch
from models import random_tensors, random_weights
from test_rwkv6 import answer, looped

from rwkv_batch.config import Config
from rwkv_batch.engine.tensor_parallel.build import Spread
from rwkv_batch.errors import UsageError
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.tensor_parallel.forward import Rank, ShardedModel, ShardedWeights
from rwkv_batch.model.tensor_parallel.shard import Shard, axis_of, columns_of, shard_shape
from rwkv_batch.model.tensor_parallel.state import ShardedState
from rwkv_batch.model.weights import ModelShape
from rwkv_batch.request import Session
from rwkv_batch.server.engines import engines_of
from sampling.params import SamplingParams

FOUR_HEADS = (2, 256, 32, 16, 16, 48, 1.15)
CPU = torch.device("cpu")


def spread(count: int, num_slots: int = 4, tensors: dict | None = None) -> tuple[ShardedModel, ShardedState]:
    """A model on `count` ranks, and its state."""
    tensors = tensors or random_tensors(FOUR_HEADS)
    shape = weights_module.shape_of(tensors, "random")
    ranks = [weights_module.from_tensors(dict(tensors), shard=Shard(rank, count)) for rank in range(count)]
    state = ShardedState(shape, [State(own.shape, num_slots) for own in ranks])
    return ShardedModel(ShardedWeights(shape, ranks), [Rank(own) for own in ranks]), state


@pytest.fixture(params=[2, 4])
def both(request):
    """The model on one device, and on several ranks."""
    weights = random_weights(FOUR_HEADS)
    return (Model(weights), State(weights.shape, 4)), spread(request.param)


def test_prefill_decode_and_mixtures_give_the_same_logits(both):
    (model, state), (sharded, ranks) = both
    generator = torch.Generator().manual_seed(1)
    for slots, lengths in (((0, 2, 3), (40, 1, 7)), ((0, 1, 2), (1, 1, 1)), ((3,), (1,)), ((0, 3), (3, 33))):
        tokens = torch.randint(1, 500, (sum(lengths),), generator=generator)
        rows = PackedRows([*slots], [*lengths])
        for of in (None, torch.tensor([0])):
            expected = model.forward(tokens, rows, state, logits_of=of)
            found = sharded.forward(tokens, rows, ranks, logits_of=of)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert ranks.elapsed == state.elapsed
    for slot in range(4):
        found, expected = ranks.take(slot), state.take(slot)
        torch.testing.assert_close(found.wkv, expected.wkv, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.shift, expected.shift, rtol=0, atol=1e-5)


def test_greedy_tokens_are_equal_and_the_streams_of_all_ranks_the_same_bits(both):
    (model, state), (sharded, ranks) = both
    prompt = torch.randint(1, 500, (50,), generator=torch.Generator().manual_seed(2))
    rows, ids = PackedRows([1], [50]), []
    for model_, state_ in ((model, state), (sharded, ranks)):
        logits, found = model_.forward(prompt, rows, state_), []
        for _ in range(48):
            found.append(int(model_.weights.output_ids[logits[0].argmax()]))
            state_.last_ids[1] = found[-1]
            logits = model_.forward(None, PackedRows([1], [1]), state_)
        ids.append(found)
    assert ids[0] == ids[1]
    assert all(torch.equal(own.shift, ranks.ranks[0].shift) for own in ranks.ranks), "what a layer keeps of the residual stream"


def test_a_state_goes_from_one_device_to_ranks_and_back_bit_for_bit(both):
    (model, state), (_, ranks) = both
    model.forward(torch.arange(1, 31), PackedRows([0], [30]), state)
    there = state.take(0)
    ranks.put(2, there)
    ranks.put_many([0, 1], there)
    ranks.put_each([3], [there])
    for back in ranks.take_many([0, 1, 2, 3]):
        assert (back.elapsed, back.shift.dtype, back.wkv.is_contiguous()) == (30, there.shift.dtype, True)
        assert torch.equal(back.wkv, there.wkv)
        assert torch.equal(back.shift, there.shift)
    ranks.clear([2])
    assert not ranks.take(2).wkv.any()
    assert (ranks.elapsed[2], ranks.elapsed[3]) == (0, 30)
    other = Model(random_weights())
    with pytest.raises(ValueError, match="this model needs"):
        ranks.put(0, State(other.weights.shape, 1).take(0))
    begin = ranks.snapshot_of(there.wkv)
    assert torch.equal(begin.wkv, state.snapshot_of(there.wkv).wkv)
    assert not begin.shift.any()


@pytest.mark.parametrize("count", [2, 4])
def test_shards_are_the_model_and_take_a_part_of_its_memory(count):
    tensors = random_tensors(FOUR_HEADS)
    whole, shards = random_weights(FOUR_HEADS), [Shard(rank, count) for rank in range(count)]
    for key, tensor in tensors.items():
        axis = axis_of(key)
        parts = [shard.cut(key, tensor) for shard in shards]
        assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts), "views: no copy"
        assert torch.equal(parts[0] if axis is None else torch.cat(parts, axis), tensor)
        assert axis is not None or all(part is tensor for part in parts)
    ranks = [weights_module.from_tensors(dict(tensors), shard=shard) for shard in shards]
    assert torch.equal(torch.cat([own.head.values for own in ranks]), whole.head.values)
    assert {own.fingerprint for own in ranks} == {whole.fingerprint}
    shape = shard_shape(whole.shape, count)
    assert shape.whole == whole.shape
    kept = sum(tensor.nbytes for tensor in ranks[0].layers[1].tensors)
    assert kept < sum(tensor.nbytes for tensor in whole.layers[1].tensors) * (1 / count + 0.15)
    assert abs(shape.count_bytes(torch.float32) / ranks[0].num_bytes - 1) < 0.01
    assert State.num_bytes(shape, 1) == sum(t.nbytes for t in (State(ranks[0].shape, 1).shift, State(ranks[0].shape, 1).wkv))


@pytest.mark.parametrize("num_outputs", [2, 3, 7, 16, 77, 511, 65_529, 65_536])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_rank_has_columns_of_the_logits(num_outputs, count):
    if num_outputs < count:
        with pytest.raises(UsageError, match="too few"):
            columns_of(num_outputs, count)
        return
    columns = columns_of(num_outputs, count)
    assert [column for part in columns for column in range(part.start, part.stop)] == list(range(num_outputs))
    sizes = [part.stop - part.start for part in columns]
    assert min(sizes) > 0
    assert len({*sizes[:-1]}) == 1
    assert sizes[-1] <= sizes[0]
    assert num_outputs < 65_000 or sizes[0] % 64 == 0


@contextmanager
def engine(folder, count: int):
    """An engine of the server's on so many ranks, with the sessions that lie in the folder."""
    settings = {} if count == 1 else {"devices": ",".join(["cpu"] * count), "tp": count}
    with looped(folder, dict(random_tensors(FOUR_HEADS, 256)), device="cpu", threads=1, **settings) as loop:
        assert loop.info.ops == ("reference" if count == 1 else f"reference on {count} ranks")
        yield loop


def test_an_engine_goes_on_with_sessions_that_another_number_of_ranks_has_kept(tmp_path):
    rng = random.Random(5)
    turns = [[rng.randrange(1, 256) for _ in range(n)] for n in (70, 9, 33)]
    expected, found, fingerprints = [], [], set()
    for turn, count in zip(turns, (1, 2, 4), strict=True):
        with engine(tmp_path, count) as loop:
            while count == 1 and len(expected) < len(turns):
                expected.append(answer(loop, turns[len(expected)], session=Session(name="one", separate=False))[0])
            found.append(answer(loop, turn, session=Session(name="moves", separate=False))[0])
            fingerprints.add(loop.info.fingerprint)
    assert found == expected
    assert len(fingerprints) == 1
    with engine(tmp_path, 1) as loop:  # back on one device: both sessions say the same still
        last = [answer(loop, turns[1], session=Session(name=name, separate=False))[0] for name in ("one", "moves")]
    assert last[0] == last[1]


def test_a_seed_draws_the_same_on_any_number_of_ranks(tmp_path):
    sampling = SamplingParams(temperature=1.2, top_p=0.9, seed=11, ignore_eos=True, logprobs=0)
    drawn = []
    for count in (1, 2):
        with engine(tmp_path, count) as loop:
            drawn.append(answer(loop, [1, 2, 3], sampling=sampling, max_tokens=24)[0])
            drawn.append(answer(loop, [1, 2, 3] * 50, sampling=sampling, prompt_logprobs=2)[0])
    assert drawn[:2] == drawn[2:]


def resolved(**settings) -> Config:
    return Config(model_path="model", **settings).resolved()


def test_cards_are_dealt_out_to_engines_in_groups(tmp_path):
    config = resolved(devices="0,1,2,3", tp=2)
    pair, other = engines_of(config, tmp_path, {})
    assert [pair.environ["CUDA_VISIBLE_DEVICES"], other.environ["CUDA_VISIBLE_DEVICES"]] == ["0,1", "2,3"]
    assert (pair.config.device, pair.seat.device, config.num_engines) == ("cuda:0", "0,1", 2)
    (alone,) = engines_of(resolved(devices="0,1,2,3", tp=4), tmp_path, {"CUDA_VISIBLE_DEVICES": "4,5,GPU-1,7"})
    assert alone.environ == {"CUDA_VISIBLE_DEVICES": "4,5,GPU-1,7"}
    (twin,) = engines_of(resolved(devices="cpu,cpu", tp=2), tmp_path, {})
    assert (twin.config.device, twin.environ) == ("cpu", {"CUDA_VISIBLE_DEVICES": ""})
    assert not resolved(devices="cpu,cpu", tp=2).has_store


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp": 2}, "--tp 2: wants --devices with a multiple of 2 cards; it is missing"),
        ({"tp": 2, "devices": "0,1,2"}, "--tp 2: wants --devices with a multiple of 2 cards; it has 3"),
        ({"tp": 2, "devices": "0,1", "pp_devices": "0"}, "--devices"),
        ({"tp": 2, "devices": "0,1", "quant": "int8"}, "--quant: not with --tp 2"),
        ({"tp": 2, "devices": "0,1", "adapter": "a.pth"}, "--adapter: not with --tp 2"),
        ({"tp": 2, "devices": "0,1", "row_adapter": "a=a.pth"}, "--row-adapter: not with --tp 2"),
        ({"tp": 2, "devices": "0,1", "adapter_ranks": 8}, "--adapter-ranks: not with --tp 2"),
        ({"tp": 2, "devices": "0,1", "ops": "compile"}, "--ops: not with --tp 2"),
        ({"tp": 9, "devices": "0"}, "--tp: must be between 1 and 8"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, words):
    with pytest.raises(UsageError) as refusal:
        resolved(**settings)
    assert words in refusal.value.message


def test_models_that_cannot_be_dealt_out_are_refused():
    fits = ModelShape(2, 256, 1024, 256, 32, 32, 32, 32)

    def refused(shape, quant=PLAIN, tp=2) -> str:
        with pytest.raises(UsageError) as refusal:
            Spread.of(Config(tp=tp), CPU, shape, quant)
        assert refusal.value.param == "tp"
        return refusal.value.message

    assert len(Spread.of(Config(tp=4), CPU, fits, PLAIN).devices) == 4
    assert Spread.of(Config(), CPU, fits, PLAIN) is None
    assert "4 heads cannot be dealt out to 3 ranks" in refused(fits, tp=3)
    assert "feed-forward units" in refused(ModelShape(2, 256, 1024 - 32, 256, 32, 32, 32, 32))
    assert "quantised" in refused(fits, Quantisation("int8"))
    assert "RWKV-7" in refused(random_shape6())
    with pytest.raises(UsageError, match="--adapter: not with --tp 2"):
        Spread.of(Config(tp=2, adapter="a.pth"), CPU, fits, PLAIN)


def random_shape6():
    from rwkv6_models import random_tensors6

    return weights_module.check_tensors(random_tensors6(), "six")
