"""Adapters of single rows: each row's tokens are what they are with its adapter merged, whatever its neighbours have."""

import gc

import pytest
import torch
from adapter_files import FORMATS, RANK
from kernel_recorder import make_launcher
from models import TINY, random_tensors, random_weights

from rwkv_batch.engine.engine import Engine, Way
from rwkv_batch.errors import NoRoom, Unprocessable
from rwkv_batch.kernels import self_check
from rwkv_batch.kernels.adapted.ops import AdaptedKernelOps
from rwkv_batch.kernels.adapted.products import GroupedProducts, TorchProducts
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.model import reference_ops, weights
from rwkv_batch.model.adapters import adapter_file
from rwkv_batch.model.adapters.adapter import Adapter
from rwkv_batch.model.adapters.bank import AdapterBank
from rwkv_batch.model.adapters.row_ops import RowAdapterOps
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows, RowLayout
from rwkv_batch.model.quantized import Quantisation
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.request import Request
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling.params import SamplingParams
from sampling.reference import ReferenceSampler

MODEL = random_tensors(TINY)
GREEDY = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0)
BY_ROW = [name for name in FORMATS if name != "HF Bat"]
COLUMNS, SLOTS, TOKENS = 96, 8, 12


def read(name, folder, seed=0) -> Adapter:
    folder = folder / f"{name} {seed}"
    folder.mkdir()
    make = FORMATS[name]
    return adapter_file.read(make(MODEL, folder, seed)[0] if name == "LoRA" else make(MODEL, folder)[0])


def engine_of(loaded: weights.Weights, columns=COLUMNS, *, only_adding=False) -> Engine:
    bank = AdapterBank(loaded, columns, SLOTS, only_adding=only_adding)
    sampler, state = ReferenceSampler(SLOTS, loaded.output_ids), State(loaded.shape, SLOTS)
    adapted = Way(Model(loaded, RowAdapterOps(bank, reference_ops)))
    return Engine(Model(loaded), sampler, state, bank=bank, adapted=adapted)


def prompt(number: int) -> list[int]:
    """Of different lengths, so that steps mix prefill and decode."""
    return [3 + (7 * number + k * k) % 400 for k in range(1 + 9 * number)]


def run(engine: Engine, rows: dict[int, object], budget=40) -> dict[int, list[int]]:
    """Return the greedy ids of rows, whose adapters are in the bank, one step ahead of what is read."""
    scheduler, ids, before = Scheduler(num_slots=SLOTS, prefill_budget=budget, mixed=True), {n: [] for n in rows}, None
    for number, adapter in rows.items():
        request = Request(id=str(number), prompts=[prompt(number)], sampling=GREEDY, max_tokens=TOKENS)
        (sequence,) = scheduler.add(request)
        sequence.adapter = adapter
    while True:
        plan = scheduler.next_plan()
        step = engine.submit(plan) if plan else None
        if before is not None:
            for token in engine.collect(before):
                found = ids[int(token.sequence.request.id)]
                found.append(token.id)
                if len(found) == TOKENS:
                    scheduler.finish(token.sequence)
        before = step
        if before is None:
            return {number: found[:TOKENS] for number, found in ids.items()}


def logits(model: Model, ids: list[int]) -> torch.Tensor:
    state = State(model.weights.shape, SLOTS)
    last = torch.arange(len(ids))
    return model.forward(torch.tensor(ids), PackedRows([2], [len(ids)]), state, logits_of=last)


@pytest.mark.parametrize("name", BY_ROW)
def test_beside_the_model_it_is_what_it_is_merged(name, tmp_path):
    adapter, plain = read(name, tmp_path), random_weights(TINY)
    bank = AdapterBank(plain, COLUMNS, SLOTS, only_adding=False)
    loaded = bank.load(adapter)
    bank.assign([2], [loaded])
    found = logits(Model(plain, RowAdapterOps(bank, reference_ops)), prompt(4))
    wanted = logits(Model(weights.from_tensors(dict(MODEL), adapters=[adapter])), prompt(4))
    assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()
    assert (found - logits(Model(plain), prompt(4))).abs().max() > 0.02 * wanted.abs().max()


def test_eight_rows_with_four_adapters_are_what_each_is_alone(tmp_path):
    """Two of them without any; three kinds that change more than by adding."""
    engine = engine_of(random_weights(TINY))
    names = ("LoRA", "DoRA", "Bat", "HF DoRA")
    adapters = [read(name, tmp_path) for name in names]
    loaded = [engine.bank.load(adapter) for adapter in adapters]
    rows = dict(enumerate([*loaded, None, loaded[0], loaded[2], None]))
    together = run(engine, rows)
    assert together == {number: run(engine, {number: adapter})[number] for number, adapter in rows.items()}
    plain = run(Engine(Model(random_weights(TINY)), ReferenceSampler(SLOTS, random_weights(TINY).output_ids),
                       State(random_weights(TINY).shape, SLOTS)), dict.fromkeys(rows))  # fmt: skip
    assert {number: together[number] for number in (4, 7)} == {number: plain[number] for number in (4, 7)}
    assert all(together[number] != plain[number] for number in (0, 1, 2, 3, 5, 6))
    for number, adapter in enumerate(adapters):
        merged = weights.from_tensors(dict(MODEL), adapters=[adapter])
        alone = Engine(Model(merged), ReferenceSampler(SLOTS, merged.output_ids), State(merged.shape, SLOTS))
        assert run(alone, {number: None}) == {number: together[number]}


def test_rows_without_an_adapter_run_as_if_there_were_none(tmp_path):
    """Bit for bit, by the same ops; and in company by zeros that are added."""
    engine = engine_of(random_weights(TINY))
    engine.bank.load(read("LoRA", tmp_path))
    engine.adapted = None  # would be used
    assert run(engine, dict.fromkeys(range(4)))


def test_a_slot_forgets_the_adapter_of_its_row_before(tmp_path):
    engine = engine_of(random_weights(TINY))
    loaded = engine.bank.load(read("LoRA", tmp_path))
    before = run(engine, {5: None})
    assert run(engine, {5: loaded}) != before
    assert run(engine, {5: None, 6: loaded})[5] == before[5]


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_the_matrices_may_be_quantised(form, tmp_path):
    quantised = weights.from_tensors(dict(MODEL), quant=Quantisation(form))
    engine = engine_of(quantised)
    loaded = [engine.bank.load(read(name, tmp_path)) for name in ("LoRA", "HF DoRA")]
    rows = {1: loaded[0], 2: None, 3: loaded[1]}
    together = run(engine, rows)
    assert together == {number: run(engine, {number: adapter})[number] for number, adapter in rows.items()}
    assert together[1] != run(engine, {1: None})[1]


def test_columns_are_free_again_when_nobody_uses_an_adapter(tmp_path):
    engine = engine_of(random_weights(TINY), columns=2 * RANK)
    bank = engine.bank
    first, second = (bank.load(read("LoRA", tmp_path, seed)) for seed in (1, 2))
    wanted = run(engine, {3: second})
    with pytest.raises(NoRoom, match="0 of 16 ranks are free"):
        bank.load(read("LoRA", tmp_path, 3))
    scheduler = Scheduler(num_slots=SLOTS, prefill_budget=40, mixed=True)
    (sequence,) = scheduler.add(Request(id="r", prompts=[[1]], sampling=GREEDY, max_tokens=1))
    sequence.adapter = first
    del first
    gc.collect()
    assert bank.num_free == 0, "a row still has it"
    sequence.adapter = None
    gc.collect()
    assert bank.num_free == RANK
    third = bank.load(read("LoRA", tmp_path, 4))
    assert third.number != second.number
    both = run(engine, {3: second, 4: third})
    assert both[3] == wanted[3]
    assert both[4] == run(engine, {4: third})[4]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"blocks.0.att.x_k": torch.ones(128)}, "can only be merged"),
        ({"head.lora_A": torch.ones(1, 128), "head.lora_B": torch.ones(512, 1)}, "can only be merged"),
        ({"blocks.9.att.key.lora_A": torch.ones(1, 128), "blocks.9.att.key.lora_B": torch.ones(128, 1)}, "does not have"),
        ({"blocks.0.att.key.lora_A": torch.ones(1, 64), "blocks.0.att.key.lora_B": torch.ones(128, 1)}, "does not fit"),
    ],
)
def test_what_single_rows_cannot_have_is_refused(parts, words, tmp_path):
    torch.save(parts, tmp_path / "a.pth")
    bank = AdapterBank(random_weights(TINY), COLUMNS, SLOTS, only_adding=False)
    with pytest.raises(Unprocessable, match=words):
        bank.load(adapter_file.read(tmp_path / "a.pth"))
    assert bank.num_free == COLUMNS


@pytest.mark.parametrize("name", ["HF Bat", "DoRA", "HF DoRA", "Bat"])
def test_kernels_take_what_only_adds(name, tmp_path):
    bank = AdapterBank(random_weights(TINY), COLUMNS, SLOTS, only_adding=True)
    with pytest.raises(Unprocessable, match="can only be merged"):
        bank.load(read(name, tmp_path))
    for number, other in enumerate(("LoRA", "PiSSA", "Bone")):
        assert bank.load(read(other, tmp_path)).number == number + 1


def test_the_adapters_of_tokens_are_found_on_the_device(tmp_path):
    """Also in steps that are filled up with tokens and rows that are none."""
    bank = AdapterBank(random_weights(TINY), COLUMNS, SLOTS, only_adding=False)
    one, two = bank.load(read("LoRA", tmp_path, 1)), bank.load(read("LoRA", tmp_path, 2))
    bank.assign([0, 5, 3], [one, two, None])
    assert bank.numbers_of(CapturedRows.decode(torch.tensor([5, 3, 0, -1]))).tolist() == [2, 0, 1, 0]
    assert bank.numbers_of(PackedRows([3, 5, 0], [2, 1, 3])).tolist() == [0, 0, 2, 1, 1, 1]
    starts, previous = torch.tensor([0, 2, 3, 3, 3], dtype=torch.int32), torch.tensor([5, -1, 0, -2, -2], dtype=torch.int32)
    layout = RowLayout(torch.tensor([5, 0, -1, -1]), starts, torch.tensor([1, 2, 0, 0], dtype=torch.int32), previous)
    assert bank.numbers_of(CapturedRows.prefill(layout, torch.tensor([1, 2, 0, 0]))).tolist() == [2, 2, 1, 0, 0]
    foreign = bank.foreign(torch.tensor([1, 0, 2]))
    assert (~foreign).sum(1).tolist() == [RANK, 0, RANK]


def test_the_bytes_of_the_tables_are_known_before():
    plain = random_weights(TINY)
    bank = AdapterBank(plain, 40, SLOTS, only_adding=True)
    names = ("rkv", "output", "ffn_key", "ffn_value")
    held = sum(banks[name].down.nbytes + banks[name].up.nbytes for banks in bank.layers for name in names)
    assert AdapterBank.num_bytes(plain.shape, 40, torch.float32) == held


@pytest.fixture
def adapted_ops(monkeypatch) -> AdaptedKernelOps:
    """Kernel ops that launch nothing, and slots 1 and 4 of rows with adapters."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    launcher, _ = make_launcher(monkeypatch)
    plain = KernelOps(self_check.random_weights(torch.device("cpu")), launcher, max_tokens=160, max_rows=128)
    bank = AdapterBank(plain.prepared.source, 12, 130, only_adding=True)
    for banks in bank.layers:
        for name in ("rkv", "output", "ffn_key", "ffn_value"):
            banks[name].down.normal_(), banks[name].up.normal_()
    bank.owner[:4], bank.owner[4:7] = 1, 2
    bank.of_slot[1], bank.of_slot[4] = 1, 2
    return AdaptedKernelOps(plain, bank, TorchProducts(bank, plain.linear))


@pytest.mark.parametrize("lengths", [[1], [1] * 8, [1] * 64, [40, 1, 7, 33], [128]])
def test_kernels_add_what_adapters_add(lengths, adapted_ops):
    """Every product of a step, on buffers that hold zeros, for kernels write nothing here."""
    ops, bank, number = adapted_ops, adapted_ops.bank, sum(lengths)
    rows = PackedRows(list(range(len(lengths))), lengths)
    weights_, state = ops.prepared.source, State(ops.prepared.source.shape, 130)
    ops.embed(weights_.embedding, None if rows.is_decode else torch.zeros(number, dtype=torch.int64), rows, state.last_ids)
    own = [1 if slot == 1 else 2 if slot == 4 else 0 for slot, length in enumerate(lengths) for _ in range(length)]
    mask = torch.tensor([[owner == n for owner in bank.owner.tolist()] for n in own])
    layer, banks, b = ops.prepared.layers[1], bank.layers[1], ops._now

    def added(name: str, x: torch.Tensor) -> torch.Tensor:
        hidden = (x.float() @ banks[name].down.float().transpose(-1, -2)).half().float() * mask
        return hidden @ banks[name].up.float()

    def agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
        return bool(torch.allclose(found.float(), wanted, rtol=0.01, atol=0.05)) and bool((found != 0).any()) == bool(
            mask.any()
        )

    mixed, x = torch.randn(6, number, weights_.shape.width).half(), torch.randn(number, weights_.shape.width).half()
    hidden = torch.randn(number, weights_.shape.ffn_width).relu().half()
    ops.attention_inputs(mixed, layer)
    assert agree(b.rkv, added("rkv", mixed[:3]))
    ops.product("output", x, layer.output, b.y)
    assert agree(b.y, added("output", x))
    b.y.zero_()
    ops.ffn_key(x, layer, b.hidden)
    assert agree(b.hidden, added("ffn_key", x))
    ops.ffn_value(hidden, layer, b.y)
    assert agree(b.y, added("ffn_value", hidden))


def test_the_squared_relu_of_kernels_comes_after_what_is_added(adapted_ops):
    recorder = adapted_ops.launcher.library._recorder
    half = {"shift_dtype": torch.float16, "wkv_dtype": torch.float16}
    model, state = Model(adapted_ops.prepared.source, adapted_ops), State(adapted_ops.prepared.source.shape, 130, **half)
    for num_rows in (1, 8, 64):
        recorder.clear()
        model.forward(None, CapturedRows.decode(torch.arange(num_rows)), state)
        names = [note[0] for note in recorder.take()]
        assert sum("relu_square" in name for name in names) == model.weights.shape.num_layers, names


@pytest.mark.parametrize("down_first", [True, False])
def test_grouped_products_are_two_launches_beside_each_product(adapted_ops, down_first):
    """And one for the step, in front of all others; the second takes the squared ReLU."""
    recorder, layers = adapted_ops.launcher.library._recorder, adapted_ops.prepared.source.shape.num_layers
    adapted_ops.products = GroupedProducts(adapted_ops.bank, adapted_ops.launcher, 160)
    adapted_ops.down_first = down_first
    half = {"shift_dtype": torch.float16, "wkv_dtype": torch.float16}
    model, state = Model(adapted_ops.prepared.source, adapted_ops), State(adapted_ops.prepared.source.shape, 130, **half)
    for rows, tokens in ((CapturedRows.decode(torch.arange(8)), None), (PackedRows([0, 1], [40, 7]), torch.zeros(47).long())):
        recorder.clear()
        model.forward(tokens, rows, state)
        names = [note[0] for note in recorder.take()]
        assert names[0] == "rwkv_group_tokens"
        assert names.count("rwkv_thin_down") == names.count("rwkv_thin_up") == 4 * layers
        assert not any("relu_square" in name for name in names)
        assert (names[names.index("rwkv_thin_down") + 1] == "rwkv_thin_up") is not down_first


def test_the_bytes_of_grouped_products_are_known_before(adapted_ops):
    ops = adapted_ops
    products = GroupedProducts(ops.bank, ops.launcher, 160)
    held = products._grouping.tables.nbytes + products._thin._hidden.nbytes
    assert GroupedProducts.num_bytes(ops.bank.num_columns, 160) == held
    assert GroupedProducts.num_bytes(0, 160) == 0
