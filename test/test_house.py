"""The house stays one in which things are found: short files, small classes, small folders, a test for each module."""

import ast
import tomllib
from pathlib import Path

import pytest
from models import ROOT

ROOMS = ("rwkv_batch", "routes", "sampling")
MAX_FILE_LINES, MAX_CLASS_LINES, MAX_FOLDER_FILES = 500, 300, 14

# Folders without modules of ours, and those within.
FOLDERS = {
    "bench": ["card", "cluster", "served"], "cuda": ["grouped", "linear", "sampling", "wkv"], "demo": ["tuned"], "deploy": [],
    "docs": ["api", "models"], "hip": [], "web": [],
}  # fmt: skip

# Whose tests cover the modules, or all of a room, that have no test file of their own name; a longer name goes first.
COVERED_BY = {
    "app": "test_app",
    "routes/admin": "test_openai_routes",
    "routes/anthropic": "test_anthropic",
    "routes/dialects": "test_live_native",
    "routes/http": "test_native",
    "routes/http/connections": "test_live_load",
    "routes/llamacpp": "test_fim_dialects",
    "routes/mistral": "test_fim_dialects",
    "routes/models": "test_model_routes",
    "routes/native": "test_native",
    "routes/native/tuned": "test_variants",
    "routes/offline": "test_batch_file",
    "routes/ollama": "test_ollama",
    "routes/timed": "test_ollama",
    "routes/openai": "test_openai_adapter",
    "routes/process": "test_app",
    "rwkv_batch/checks": "test_checks",
    "rwkv_batch/config_page": "test_docs",
    "rwkv_batch/config_sources": "test_config",
    "rwkv_batch/engine": "test_worker",
    "rwkv_batch/engine/build": "test_assembly",
    "rwkv_batch/engine/decode_graphs": "test_staging",
    "rwkv_batch/engine/memory": "test_assembly",
    "rwkv_batch/engine/pipeline": "test_pipeline",
    "rwkv_batch/engine/prefill_graphs": "test_staging",
    "rwkv_batch/engine/stub_engine": "test_channel",
    "rwkv_batch/engine/tensor_parallel": "test_tensor_parallel",
    "rwkv_batch/errors": "test_openai_routes",
    "rwkv_batch/grammar": "test_grammar",
    "rwkv_batch/ipc": "test_channel",
    "rwkv_batch/kernels": "test_kernel_ops",
    "rwkv_batch/kernels/card_cache": "test_remembered",
    "rwkv_batch/kernels/hip": "test_hip",
    "rwkv_batch/kernels/states": "test_gpu_log",
    "rwkv_batch/kernels/tensor_parallel": "test_exchange",
    "rwkv_batch/model": "test_model",
    "rwkv_batch/model/adapters": "test_adapters",
    "rwkv_batch/model/rwkv6": "test_rwkv6",
    "rwkv_batch/model/tensor_parallel": "test_tensor_parallel",
    "rwkv_batch/model/checkpoint": "test_weights",
    "rwkv_batch/model/packed_file": "test_demo",
    "rwkv_batch/model/quantized_writer": "test_quantized_file",
    "rwkv_batch/model/tensor_reader": "test_weights",
    "rwkv_batch/request": "test_channel",
    "rwkv_batch/scheduling": "test_scheduler",
    "rwkv_batch/secrets": "test_openai_adapter",
    "rwkv_batch/served": "test_served",
    "rwkv_batch/served/variants": "test_variants",
    "rwkv_batch/server": "test_app",
    "rwkv_batch/server/models": "test_model_keeper",
    "rwkv_batch/server/batch_command": "test_batch_file",
    "rwkv_batch/server/check_command": "test_checks",
    "rwkv_batch/server/quantize_command": "test_quantized_file",
    "rwkv_batch/server/announce": "test_live_processes",
    "rwkv_batch/session_messages": "test_state_routes",
    "rwkv_batch/sessions": "test_state_pool",
    "rwkv_batch/sessions/claims": "test_shared_sessions",
    "rwkv_batch/sessions/postgres": "test_shared_sessions",
    "rwkv_batch/shipped": "test_page",
    "rwkv_batch/text/call_reader": "test_tool_calls",
    "rwkv_batch/text/chat_template": "test_openai_template",
    "rwkv_batch/text/json_text": "test_tool_calls",
    "rwkv_batch/text/reasoning": "test_openai_adapter",
    "rwkv_batch/text/fim_marks": "test_fim_dialects",
    "rwkv_batch/tuned": "test_tuned_states",
    "sampling": "test_sampling",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


MODULES = [ROOT / "app.py", ROOT / "state_pool.py", *(file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")))]
TESTS = {path.stem for path in (ROOT / "test").rglob("test_*.py")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_classes_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_CLASS_LINES, node.name


def test_the_door_is_one_screen():
    assert (ROOT / "app.py").read_text().count("\n") <= 60


def test_every_folder_with_modules_is_in_the_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(file.parent.relative_to(ROOT).parts) for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    assert there <= {*listed}


def test_folders_are_small():
    """All but that of the tests, which is flat: a folder of a package's name would hide the package from pytest."""
    folders = {path.parent for path in MODULES} | {
        ROOT / name for parent, inside in FOLDERS.items() for name in (parent, *(f"{parent}/{one}" for one in inside))
    }
    for folder in folders - {ROOT}:
        files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
        assert len(files) <= MAX_FOLDER_FILES, folder


@pytest.mark.parametrize("path", [path for path in MODULES if path.stem != "__init__"], ids=name_of)
def test_each_module_has_its_tests(path):
    own = {f"test_{path.stem}", f"test_{path.parent.name}_{path.stem}", f"test_gpu_{path.stem}"}
    if not own & TESTS:
        name = name_of(path.with_suffix(""))
        covering = [test for room, test in COVERED_BY.items() if name == room or name.startswith(room + "/")]
        assert covering, "it has no test file of its name, and COVERED_BY does not say whose tests cover it"


def test_the_tests_that_cover_others_are_there():
    assert set(COVERED_BY.values()) <= TESTS
