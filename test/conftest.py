"""Fixtures every test may use."""

import contextlib
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # a machine for GPU tests may lack it
    from hypothesis import HealthCheck, settings

    # No deadlines: a slow machine fails no example. The long profile is that of `make test-long`.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("default", patient, max_examples=100, derandomize=True)
    settings.register_profile("long", patient, max_examples=500)
    settings.load_profile("default")

# Each of their tests starts what it needs.
OWN_SERVERS = (
    "test_live_batch_file", "test_live_checkpoints", "test_live_fuzz", "test_live_load", "test_live_processes",
    "test_live_models", "test_live_rwkv6", "test_live_rwkv_infer", "test_live_session_kills", "test_live_soak",
    "test_live_tuned",
)  # fmt: skip

# They share servers with one another, of which the others use few.
TOGETHER = ("test_live_deploy", "test_live_devices", "test_live_state", "test_live_wire")

# Seconds go into what all tests of one of these use: compiled sources, databases, models.
MADE_ONCE = ("test_demo", "test_exchange", "test_shared_sessions", "test_tune")
ON_EMULATED_CARD = ("test_hip", "test_rwkv6_kernels", "test_thin")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give all tests that share servers, or what takes long to make, to one of several processes, so that it is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            if file.stem in TOGETHER:
                return "some servers"
            if file.parent.name == "live" and file.stem not in OWN_SERVERS:
                return "shared servers"
            if file.stem in ON_EMULATED_CARD:
                return "the emulated card"
            return file.stem if file.stem in MADE_ONCE else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests of whole processes a second try, where nothing is counted: a host that stalls must not pass for a fault.

    The summary names each that needed it.
    """
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        if item.path.parent.name in ("live", "web") or item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def card(tmp_path_factory):
    """The emulated card, whose kernels take a while to compile."""
    import emulated_card

    return emulated_card.build(tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The models are tiny, and threads that wait for one another crawl when something else uses a core."""
    import torch  # takes seconds, and the process that hands out the tests loads this file as well

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def launcher():
    """Launches kernels on the first card's current stream."""
    from rwkv_batch.kernels.compiler import library
    from rwkv_batch.kernels.launch import Launcher

    launcher = Launcher(library(0), "cuda:0")
    launcher.use_current_stream()
    return launcher


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A random World-vocabulary checkpoint on disk."""
    import torch
    from models import TINY, random_tensors

    path = tmp_path_factory.mktemp("checkpoint") / "tiny.pth"
    torch.save(random_tensors(TINY, 65536), path)
    return path


@pytest.fixture(scope="session")
def real_checkpoint() -> Path:
    """A real checkpoint of others, where it is at hand."""
    from models import SHARED

    path = SHARED / "checkpoints" / "tiny-rwkv-7v0-834K"
    if not path.is_dir():
        pytest.skip("needs the folder checkpoints/tiny-rwkv-7v0-834K beside the repository")
    return path
