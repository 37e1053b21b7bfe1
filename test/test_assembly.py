"""What the engine is put together from, as far as a machine without a GPU can tell."""

import re
from types import SimpleNamespace

import pytest
import torch
from kernel_recorder import make_launcher
from models import SHAPES, TINY, random_weights

from rwkv_batch.config import COMPILE_MODE, Config
from rwkv_batch.config_sources import load
from rwkv_batch.engine import build, memory
from rwkv_batch.engine.decode_graphs import buckets_for
from rwkv_batch.engine.memory import MIB, MemoryPlan
from rwkv_batch.errors import CheckpointError, UsageError
from rwkv_batch.kernels import layer_kernels, self_check
from rwkv_batch.kernels.linear import Lora
from rwkv_batch.kernels.ops import Buffers
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import ModelShape
from rwkv_batch.request import Request
from sampling.kernel import KernelSampler
from sampling.params import SamplingParams


@pytest.mark.parametrize("num_slots", [1, 2, 5, 64, 320, 1000, 3000])
@pytest.mark.parametrize("share", [0, 1 / 16])
def test_graph_sizes_take_every_number_of_rows(num_slots, share):
    spare = int(num_slots * share)
    sizes = buckets_for(num_slots, spare)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == num_slots
    assert num_slots - spare in sizes
    for rows in range(1, num_slots + 1):
        fitting = min(size for size in sizes if size >= rows)
        assert fitting <= max(rows * 1.5, rows + 1)


def test_kernels_cannot_be_had_on_a_cpu():
    with pytest.raises(UsageError, match="GPUs only"):
        build.find_kernels(Config(ops="kernels"), torch.device("cpu"))
    assert build.find_kernels(Config(), torch.device("cpu")) is None


def test_cached_files_leave_room_in_a_container(tmp_path, monkeypatch):
    (tmp_path / "max").write_text(f"{300 * 2**20}\n")
    (tmp_path / "current").write_text(f"{290 * 2**20}\n")
    monkeypatch.setattr(memory, "CGROUPS", [(tmp_path, "max", "current", "inactive_file")])
    assert memory.free_memory(torch.device("cpu")) == 10 * 2**20
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {200 * 2**20}\nactive_file 7\n")
    assert memory.free_memory(torch.device("cpu")) == 210 * 2**20


@pytest.mark.parametrize("buffers", [0, 10 * MIB])
def test_a_number_of_slots_is_given_only_when_their_checkpoints_fit_too(buffers, monkeypatch):
    cpu, fp16 = torch.device("cpu"), torch.float16
    shape = ModelShape(2, 128, 512, 256, 32, 32, 32, 32)
    sampling = memory.sampling_bytes(shape, 1024) if buffers else 0
    plan = MemoryPlan(cpu, shape, fp16, fp16, buffers, sampling)
    per_slot = 3 * State.num_bytes(shape, 1, wkv_dtype=fp16) + sampling
    free = shape.count_bytes(fp16) + buffers + 100 * per_slot
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    assert plan.slots(100, 64, "tiny") == 100
    with pytest.raises(CheckpointError, match="101 slots"):
        plan.slots(101, 64, "tiny")
    assert 1 < plan.slots(0, 1000, "tiny") < 100
    assert plan.slots(0, 3, "tiny") == 3


@pytest.mark.parametrize(("slots", "spare"), [(1, 0), (7, 0), (8, 1), (32, 2), (80, 5), (96, 4), (100, 0), (101, 0)])
def test_spare_slots_are_a_share_as_far_as_memory_goes(slots, spare, monkeypatch):
    cpu, fp16 = torch.device("cpu"), torch.float16
    shape = ModelShape(2, 128, 512, 256, 32, 32, 32, 32)
    free = shape.count_bytes(fp16) + 100 * 3 * State.num_bytes(shape, 1, wkv_dtype=fp16)
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    plan = MemoryPlan(cpu, shape, fp16, fp16)
    assert plan.spare_slots(slots, 1 / 16) == spare
    assert plan.spare_slots(slots, 0) == 0


def test_the_plan_counts_what_wide_states_and_long_biases_take():
    shape, fp16, fp32 = ModelShape(32, 4096, 16384, 65536, 128, 128, 96, 480), torch.float16, torch.float32
    gpu = torch.device("cuda")

    def plan(wkv_dtype: torch.dtype = fp16, **settings) -> MemoryPlan:
        return build.plan_memory(Config(**settings), shape, gpu, fp16, wkv_dtype, 512)

    one = 32 * (2 * 4096 * 4 + 64 * 64 * 64 * 4)  # bytes of a state
    least = plan(fp32, l1_sessions=1, prefix_cache_mib=0)
    assert plan(fp32, l1_sessions=6, prefix_cache_mib=7).buffers - least.buffers == 5 * one + 7 * MIB
    assert plan(fp32, l1_mib=100).buffers < plan(fp16).buffers
    assert plan(max_logit_bias=65536).sampling - plan(max_logit_bias=0).sampling == 65536 * (8 + 4)


def test_sessions_take_the_memory_that_is_left_or_what_the_settings_say(monkeypatch):
    shape, fp16 = ModelShape(32, 4096, 16384, 65536, 128, 128, 96, 480), torch.float16
    monkeypatch.setattr(memory, "free_memory", lambda device: (139 if device.type == "cuda" else 400) * 2**30)

    def levels(device: str = "cuda", **settings) -> dict[str, int]:
        config = Config(**settings)
        plan = build.plan_memory(config, shape, torch.device(device), fp16, fp16, 512 if device == "cuda" else None)
        return build.session_levels(config, plan, 340)

    state = 32 * (2 * 4096 * 2 + 64 * 64 * 64 * 2)
    found = levels()
    assert 2000 < found["l1_bytes"] // state < 5000
    assert found["l2_bytes"] == 64 * 2**30
    assert levels(l1_sessions=5, l2_sessions=0) == {
        "l1_sessions": 5, "l1_bytes": memory.UNLIMITED, "l2_sessions": 0, "l2_bytes": memory.UNLIMITED
    }  # fmt: skip
    assert levels(l1_mib=7)["l1_bytes"] == 7 * MIB
    assert levels(l1_mib=7, l1_sessions=9)["l1_sessions"] == 9
    assert levels("cpu")["l1_bytes"] == levels("cpu")["l2_bytes"] == 512 * MIB
    monkeypatch.setattr(memory, "free_memory", lambda device: 24 * 2**30)
    assert levels()["l1_bytes"] // state == 16, "a full card has what it always had"


def test_who_has_too_little_memory_is_told_which_flags_help(monkeypatch):
    shape, gpu = ModelShape(24, 2048, 8192, 65536, 96, 96, 64, 256), torch.device("cuda")
    monkeypatch.setattr(memory, "free_memory", lambda device: int(3.6 * 2**30))

    def slots(budget: int, **settings) -> int:
        plan = build.plan_memory(Config(**settings), shape, gpu, torch.float16, torch.float16, budget)
        return plan.slots(0, build.GPU_SLOTS, "1.5b")

    with pytest.raises(CheckpointError) as refused:
        slots(build.GPU_PREFILL)
    flags = re.findall(r"--[\w-]+", refused.value.message)
    assert flags == list(memory.LESS_MEMORY)
    assert set(flags) <= {f"--{name.replace('_', '-')}" for name in vars(Config())}
    assert slots(512, prefix_cache_mib=64, l1_sessions=2) >= 8
    with pytest.raises(CheckpointError) as refused:
        MemoryPlan(torch.device("cpu"), shape, torch.float32).slots(0, build.CPU_SLOTS, "1.5b")
    assert "--" not in refused.value.message, "nothing helps where the weights alone are too much"


def nbytes(*owners: object) -> int:
    return sum(value.nbytes for owner in owners for value in vars(owner).values() if isinstance(value, torch.Tensor))


def test_sizes_are_what_is_allocated(monkeypatch):
    """The plan asks those who allocate; this asks what they did."""
    shape, vocab, cpu = ModelShape(2, 128, 512, 257, 32, 16, 8, 40), 257, torch.device("cpu")
    buffers = Buffers(shape, vocab, max_tokens=7, max_rows=3, device=cpu)
    assert Buffers.num_bytes(shape, max_tokens=7, max_rows=3) == nbytes(buffers, buffers.all)
    state = State(shape, 5, wkv_dtype=torch.float16)
    assert State.num_bytes(shape, 5, wkv_dtype=torch.float16) == state.shift.nbytes + state.wkv.nbytes
    launcher, _ = make_launcher(monkeypatch)
    sampler = KernelSampler(5, torch.arange(vocab), cpu, launcher.library, max_bias=9)
    padding = 5 * 7 * 4  # what rows of penalties are longer than the view of them
    on_host = 2 * sampler.ids.nbytes  # a copy, and what the model has too
    own = nbytes(sampler, sampler.controls) + sampler.masks.memory.nbytes - on_host
    assert KernelSampler.num_bytes(5, vocab, 9) == own + padding
    lora = Lora.of(random_weights(SHAPES["wide ranks"]).layers[1])
    assert Lora.num_bytes(random_weights(SHAPES["wide ranks"]).shape) == lora.down.nbytes + lora.up.nbytes


def test_no_step_has_more_rows_or_pieces_than_a_grid_has_blocks():
    for too_large in ({"slots": 65_536}, {"prefill_budget": 16 * 65_536}, {"busy_prefill_budget": 16 * 65_536}):
        with pytest.raises(UsageError):
            Config(**too_large)
    assert Config(slots=65_535).slots == 65_535


def test_a_cpu_feeds_prompts_in_smaller_parts_beside_rows_that_decode(tiny_checkpoint, tmp_path):
    """A step takes as long as it has tokens, and those who decode wait for it."""
    worker = build.build_engine_loop(
        Config(model_path=str(tiny_checkpoint), device="cpu", slots=2, state_db=str(tmp_path / "db")), lambda batch: None
    )
    prompts = [[1] * 600, [2] * 600]
    fed = []
    for name, prompt in enumerate(prompts):
        worker.scheduler.add(Request(id=f"{name}", prompts=[prompt], sampling=SamplingParams(), max_tokens=100, cache=False))
        plans = [worker.scheduler.next_plan() for _ in range(12)]
        fed.append(max(sum(len(row.ids) for row in plan.rows) for plan in plans))
    worker.sessions.close()
    assert fed == [build.CPU_PREFILL, build.CPU_BUSY_PREFILL]
    assert fed[1] <= fed[0] / 4


def test_a_budget_in_milliseconds_takes_the_place_of_one_in_tokens(tiny_checkpoint, tmp_path):
    def scheduler_of(**settings):
        config = Config(model_path=str(tiny_checkpoint), device="cpu", slots=2, state_db=str(tmp_path / "db"), **settings)
        worker = build.build_engine_loop(config, lambda batch: None)
        worker.sessions.close()
        return worker.scheduler

    plain, timed = scheduler_of(), scheduler_of(itl_budget_ms=20)
    assert (plain.pace, plain.busy_budget) == (None, build.CPU_BUSY_PREFILL)
    assert (timed.pace.budget_ms, timed.busy_budget) == (20, None)
    assert scheduler_of(itl_budget_ms=20, busy_prefill_budget=96).busy_budget == 96


def test_the_pace_begins_with_the_times_of_captured_steps():
    config = Config(itl_budget_ms=10.0)
    prefills = SimpleNamespace(sizes=[16, 32, 64, 128, 256, 512], times={32: 4.5, 256: 7.8, 512: 13.4})
    begun, unknown = (
        build.build_pace(config, SimpleNamespace(prefills=captured), 4096, mixed=False) for captured in (prefills, None)
    )
    assert begun.stats()["prefill_allowance_tokens"] == 256
    assert unknown.stats()["prefill_allowance_tokens"] == 32
    assert build.build_pace(Config(), SimpleNamespace(prefills=prefills), 4096, mixed=False) is None


def test_kernels_that_fail_to_build_while_weights_load_leave_plain_torch(tiny_checkpoint, tmp_path, monkeypatch):
    asked = []

    def find_kernels(config, device, architecture, quant):
        asked.append(config.ops)
        return SimpleNamespace(busy=True, result=lambda: None) if config.ops != "reference" else None

    monkeypatch.setattr(build, "find_kernels", find_kernels)
    monkeypatch.setattr(build.self_check, "rehearse", lambda device, wkv_dtype: asked.append("rehearsed"))
    settings = {"model_path": str(tiny_checkpoint), "device": "cpu", "slots": 2, "state_db": str(tmp_path / "db")}
    worker = build.build_engine_loop(Config(**settings), lambda batch: None)
    worker.sessions.close()
    assert asked == ["auto", "rehearsed", "reference"]
    assert worker.info.ops == "reference"
    assert worker.engine.state.wkv.dtype == torch.float32


def test_planes_are_put_back_in_order():
    planes = torch.arange(6)[list(layer_kernels.PLANES)]
    assert planes[self_check.ORDER].tolist() == list(range(6))


def test_compile_has_a_default_mode():
    assert load(["--compile"], {}).compile == COMPILE_MODE
    assert load(["--compile", "default"], {}).compile == "default"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_ops_equal_the_plain_ones():
    with pytest.raises(UsageError, match="--compile fastest: must be one of"):
        build.compiled_ops("fastest")
    weights = random_weights(TINY)
    results = []
    for compiled in (None, build.compiled_ops("default")):
        model = Model(weights) if compiled is None else Model(weights, compiled, "compile")
        state = State(weights.shape, 4)
        prompt = model.forward(torch.arange(5, 45), PackedRows([1], [40]), state)
        state.last_ids[:] = 7
        results.append((prompt, model.forward(None, PackedRows([1, 2], [1, 1]), state), state.wkv))
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 1e-4


def test_the_memory_in_use_is_told():
    ballast = torch.ones(2**24)
    before = memory.in_use(torch.device("cpu"))["host_memory_bytes"]
    more = torch.ones(2**24)
    grown = memory.in_use(torch.device("cpu"))["host_memory_bytes"] - before
    assert 2**25 < grown < 2**28
    assert len(ballast) == len(more)
