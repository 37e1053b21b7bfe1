"""What README names is there."""

import re
from dataclasses import fields
from pathlib import Path

from rwkv_batch.config import Config

ROOT = Path(__file__).parent.parent
NAMES = re.findall(r"`([^`\n]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
OTHER_FLAGS = {"--help", "--config", "--version"}


def test_settings():
    known = OTHER_FLAGS | {f"--{no}{field.name.replace('_', '-')}" for field in fields(Config) for no in ("", "no-")}
    named = {flag for name in NAMES for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", name)}
    assert len(named) > 20
    assert named <= known


def test_files():
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name[0] != "."]
    there = {path.name for folder in (ROOT, *folders) for path in (folder.glob if folder == ROOT else folder.rglob)("*.py")}
    paths = {name for name in NAMES if re.fullmatch(r"\w[\w/]*/([\w.]+\.(py|sh|json|txt|md))?", name)}
    modules = {name for name in NAMES if re.fullmatch(r"\w+\.py", name)}
    assert min(len(paths), len(modules)) > 5
    assert not {name for name in paths if not (ROOT / name).exists()}
    assert modules <= there
