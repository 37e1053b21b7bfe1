"""The README and the pages of docs/: what they name is there, and what is generated is current."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from routes.schemas import SamplingBody
from rwkv_batch.config import Config
from rwkv_batch.config_page import page

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
PAGES = [*READMES, *sorted((ROOT / "docs").rglob("*.md"))]
OF_TODAY = [path for path in PAGES if path.name != "changes.md"]  # which tells of flags and files as they were
OTHER_FLAGS = {"--help", "--config", "--version", "--model", "--url", "--json"}  # the last two of the command check
OF_OTHER_PROGRAMS = {"deployment.md"}
BLOCK = re.DOTALL | re.MULTILINE
GIVEN_UP = {"removal", "keep_k", "first_value"}  # kk, one_minus_k_a, v_first
GIVEN_UP |= {"LowRank", "low_rank_down", "low_rank_up"}  # Lora, lora_down, lora_up
GIVEN_UP |= {"mark_units", "union_project", "sparse_project"}  # build_active_mask, masked_ffn, sparse_ffn
GIVEN_UP |= {"RapidSampler", "WAYS", "Site", "Thought"}  # KernelSampler, variants and methods, HttpApp, ReasoningParser
GIVEN_UP |= {"RowText", "Ongoing", "FakeWorker", "stub_worker"}  # RowOutput, ActiveRequest, StubEngine, stub_engine
GIVEN_UP |= {"kernel_ops", "text_stream", "session_db"}  # ops.py, detokenizer.py, database.py
GIVEN_UP |= {"TextStream", "Stops", "Manage", "Managed"}  # IncrementalDetokenizer, StopMatcher, Execute, CommandResult
GIVEN_UP |= {"num_fed", "settle", "settling", "poisoned"}  # num_prefilled, finalize, finalizing, nonfinite
EXTENSIONS = "py|sh|json|txt|md|cu|cuh|hip|h|js|conf|cfg|toml|db"


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def names_in(path: Path) -> list[str]:
    """What stands between backticks, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text_of(path), flags=re.DOTALL))


@cache
def file_names() -> set[str]:
    """Names of all files of the project, without folders."""
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name[0] != "."]
    paths = (path for folder in (ROOT, *folders) for path in (folder.glob if folder == ROOT else folder.rglob)("*"))
    return {path.name for path in paths}


@pytest.mark.parametrize("path", OF_TODAY, ids=lambda path: path.name)
def test_settings(path):
    known = OTHER_FLAGS | {f"--{no}{field.name.replace('_', '-')}" for field in fields(Config) for no in ("", "no-")}
    named = {flag for name in names_in(path) for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", name)}
    if path.name not in OF_OTHER_PROGRAMS:
        assert named <= known


@pytest.mark.parametrize("path", OF_TODAY, ids=lambda path: path.name)
def test_files(path):
    names = names_in(path)
    paths = {name for name in names if re.fullmatch(rf"[\w.][\w./-]*/([\w.-]+\.({EXTENSIONS}))?", name)}
    modules = {name for name in names if re.fullmatch(r"\w+\.(py|cu|cuh|hip)", name)}
    assert not {name for name in paths if not (ROOT / name).exists()}
    assert modules <= file_names()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links(path):
    """Each leads to a file that is there, and to a heading that it has."""
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"\s]+)", text_of(path)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        if anchor:
            assert anchor in {anchor_of(line) for line in text_of(file).splitlines() if line.startswith("#")}, target


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_readme(path):
    text = text_of(path)
    assert len(text.splitlines()) <= 200
    assert {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[2:]} <= set(re.findall(r"\(docs/([\w/-]+\.md)", text))


def test_both_readmes_say_the_same():
    """The same commands, links and figures, in the same order."""
    english, chinese = map(text_of, READMES)
    for pattern in (r"^curl .*?\}'$", r"^(?:make|python|source|from|client|answer)\b[^#\n]*", r"\]\(((?:docs|demo)/[^)]+)\)"):
        found = [[match.strip() for match in re.findall(pattern, text, BLOCK)] for text in (english, chinese)]
        assert found[0], pattern
        assert found[0] == found[1]
    figures = [
        re.findall(r"\d[\d,.]*\d", "".join(re.findall(r"^\|.*json`.*$", text, re.MULTILINE))) for text in (english, chinese)
    ]
    assert figures[0] == figures[1]


def test_the_figures_of_the_readme():
    """Each figure of the table of speed is in the result file that its row names."""
    rows = re.findall(r"^\|(.*?)\|(.*?)\|(.*?)\| `(\S+\.json)`", text_of(READMES[0]), re.MULTILINE)
    assert len(rows) > 5
    for _, ours, theirs, name in rows:
        results = json.loads(text_of(ROOT / "bench" / "results" / name))
        for text in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", re.sub(r"`.*?`", "", ours + theirs)):
            digits = len(text.partition(".")[2])
            assert any(f"{value:,.{digits}f}" == text for value in numbers_in(results)), (text, name)


def numbers_in(value) -> Iterator[float]:
    """All numbers of a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_the_tree_of_the_readme(path):
    """Each line names what is there, and every folder that is not hidden has one."""
    block = next(block for block in re.findall(r"^```\w*\n(.*?)^```", text_of(path), BLOCK) if "rwkv_batch/ " in block)
    parent, shown = "", set()
    for line in block.splitlines():
        inner = line.startswith("  ")
        for name in re.findall(r"[\w.]+/?", re.split(r"\s{3,}", line.strip())[0]):
            parent = parent if inner else name
            there = ROOT / (parent if inner else "") / name
            assert there.exists(), line
            shown.add(there)
    inner = {file.parent for room in ("rwkv_batch", "routes") for file in (ROOT / room).glob("*/*.py")}
    assert inner | {ROOT / name for name in ("sampling", "cuda", "hip", "web", "bench", "test", "docs", "deploy")} <= shown


def test_the_words_of_the_glossary():
    """What the last column names occurs in the code; no term is explained twice."""
    rows = re.findall(r"^\| (.+?) \|.*\| ([^|]*) \|$", text_of(ROOT / "docs" / "glossary.md"), re.MULTILINE)
    terms = [term for row in rows for term in row[0].split(", ") if term != "Word"]
    assert len(terms) == len(set(terms))
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert len(names) > 30
    assert not names - words_of_the_code()


def test_words_that_were_given_up():
    """Neither the code nor today's pages say them; the glossary has the word that is meant."""
    in_pages = {word for path in OF_TODAY for word in re.findall(r"\w+", text_of(path))}
    assert not GIVEN_UP & (words_of_the_code() | in_pages)


def words_of_the_code() -> set[str]:
    """All words of the Python and CUDA sources that are not tests."""
    folders = ("rwkv_batch", "routes", "sampling", "cuda")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    return {word for path in (ROOT / "state_pool.py", *files) for word in re.findall(r"\w+", text_of(path))}


def test_the_fields_of_the_native_routes():
    """All of them, with their defaults."""
    table = text_of(ROOT / "docs" / "api" / "native.md").partition("## Fields")[2].partition("\n## ")[0]
    told = {}
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE):
        names, values = (re.findall(r"`(.*?)`", cell) for cell in (names, defaults))
        told |= dict(zip(names, values or [None] * len(names), strict=True))
    fields = SamplingBody.model_fields
    assert set(told) == {*fields, "password"}
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        if name not in ("seed", "noise"):
            assert told[name] == (default if isinstance(default, str) else json.dumps(default)), name


def test_configuration_is_current():
    assert text_of(ROOT / "docs" / "configuration.md") == page() + "\n", (
        "run: python -m rwkv_batch.config_page > docs/configuration.md"
    )
