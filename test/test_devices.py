"""Which devices the engines get, on machines with and without cards."""

import dataclasses
import os

import pytest

from rwkv_batch import devices
from rwkv_batch.config import Config
from rwkv_batch.errors import UsageError
from rwkv_batch.server.engines import engines_of, room_for_all


@pytest.fixture
def machine(tmp_path):
    """The files of a machine with four cards, whose numbers and addresses on the bus are in different orders."""
    (tmp_path / "dev").mkdir()
    for minor, bus in enumerate(["0000:9d:00.0", "0000:1b:00.0", "0000:5e:00.0", "0000:ab:00.0"]):
        (tmp_path / "dev" / f"nvidia{minor}").touch()
        card = tmp_path / "proc/driver/nvidia/gpus" / bus
        card.mkdir(parents=True)
        (card / "information").write_text(f"Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\n")
        near = tmp_path / "sys/bus/pci/devices" / bus
        near.mkdir(parents=True)
        (near / "local_cpulist").write_text("0-1,4\n" if bus < "0000:80" else "2-3\n")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, []), ("", []), ("0", ["0"]), ("0,1", ["0", "1"]), ("[1, 3]", ["1", "3"]), ("cuda:2,cuda:0", ["2", "0"]),
        ("cpu,cpu", ["cpu", "cpu"]), ("['cpu', 'cpu']", ["cpu", "cpu"]), ("auto", ["0", "1", "2", "3"]), (" 01 ", ["1"]),
    ],
)  # fmt: skip
def test_devices_are_cards_or_cpus(machine, text, found):
    assert devices.engine_devices(text, {}, machine / "dev") == found


@pytest.mark.parametrize("text", ["0,0", "0,cpu", "gpu", "0,,1", "-1", "4", "cuda:", "auto,0"])
def test_other_devices_are_refused(machine, text):
    with pytest.raises(UsageError, match="--devices"):
        devices.engine_devices(text, {}, machine / "dev")


def test_all_devices_are_those_that_can_be_seen(machine):
    assert devices.engine_devices("auto", {"CUDA_VISIBLE_DEVICES": "3,GPU-9f0c"}, machine / "dev") == ["0", "1"]
    assert devices.engine_devices("auto", {}, machine / "nowhere") == []
    assert devices.engine_devices("7", {}, machine / "nowhere") == ["7"]  # whose engine will say what it sees


def test_an_engine_sees_its_own_card_only():
    assert devices.card_environ("2", {}) == {"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert devices.card_environ("2", {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    assert devices.card_environ("1", {"CUDA_VISIBLE_DEVICES": "4, GPU-9f0c"}) == {"CUDA_VISIBLE_DEVICES": "GPU-9f0c"}
    assert devices.card_environ("cpu", {"CUDA_VISIBLE_DEVICES": "4"}) == {"CUDA_VISIBLE_DEVICES": ""}


def test_cards_are_near_the_cpus_of_their_socket(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    near = [devices.cpus_near(str(number), {}, machine) for number in range(5)]
    assert near == [{0, 1}, {0, 1}, {2, 3}, {2, 3}, set()]
    assert devices.cpus_near("0", {"CUDA_VISIBLE_DEVICES": "3"}, machine) == {2, 3}
    assert devices.cpus_near("0", {"CUDA_VISIBLE_DEVICES": "GPU-9f0c"}, machine) == set()
    assert devices.cpus_near("0", {}, machine / "nowhere") == set()


def resolved(**settings) -> Config:
    return Config(model_path="model", **settings).resolved()


def test_settings_make_one_engine_or_one_on_each_device(tmp_path):
    (alone,) = engines_of(resolved(device="cpu"), tmp_path)
    assert (alone.config.device, alone.environ, alone.cpus, alone.seat.sessions) == ("cpu", {}, [], True)
    both = engines_of(resolved(devices="0,1", state_db="x.db"), tmp_path, {})
    assert [engine.config.device for engine in both] == ["cuda:0", "cuda:0"]
    assert [engine.environ["CUDA_VISIBLE_DEVICES"] for engine in both] == ["0", "1"]
    assert [engine.seat.index for engine in both] == [0, 1]
    assert len({engine.seat.address for engine in both}) == 2


def test_several_engines_that_keep_sessions_in_a_file_have_a_store():
    assert resolved(devices="cpu,cpu").has_store
    assert not resolved(devices="cpu").has_store
    assert not resolved(device="cpu").has_store
    for more in ({"state_url": "postgresql://nowhere/x"}, {"state_db": ""}, {"fake_engine": 1.0}):
        assert not resolved(devices="cpu,cpu", **more).has_store


def test_cards_of_a_pipeline_are_numbered_as_others(tmp_path):
    [engine] = engines_of(resolved(pp_devices="0,1"), tmp_path, {})
    assert engine.environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    [engine] = engines_of(resolved(device="cuda:1"), tmp_path, {})
    assert engine.environ == {}


def test_devices_stand_in_the_place_of_a_device():
    for more in ({"device": "cuda:1"}, {"pp_devices": "0"}):
        with pytest.raises(UsageError, match="--devices"):
            resolved(devices="0,1", **more)
    assert resolved(devices="cpu,cpu", device="cpu").num_engines == 2
    assert resolved(device="cpu").num_engines == 1


@pytest.mark.parametrize(
    ("cpus", "devices", "count"), [(2, "cpu,cpu", 2), (8, "cpu,cpu", 4), (64, "cpu,cpu,cpu,cpu", 8), (64, None, 2)]
)
def test_http_processes_grow_with_the_engines_and_leave_them_room(monkeypatch, cpus, devices, count):
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert resolved(device="cpu", devices=devices).http_workers == count
    assert dataclasses.replace(resolved(devices=devices, device="cpu"), http_workers=5).resolved().http_workers == 5


def test_engines_load_at_once_where_the_host_has_the_memory(tmp_path):
    model, meminfo = tmp_path / "m.pth", tmp_path / "meminfo"
    model.write_bytes(bytes(4096))
    config = dataclasses.replace(resolved(devices="0,1"), model_path=str(model))
    for kib, fits in ((9, True), (8, False)):
        meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable:   {kib} kB\n")
        assert room_for_all(config, meminfo) == fits
        assert room_for_all(dataclasses.replace(config, devices=None), meminfo)
        assert room_for_all(dataclasses.replace(config, devices="cpu,cpu"), meminfo)
    assert room_for_all(config, tmp_path / "nowhere")
