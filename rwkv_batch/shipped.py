"""Folders that are shipped with the package and are no Python: kernel sources and the page."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """`cuda`, `hip` or `web`: beside the package in a checkout, inside it in an installed wheel."""
    beside = PACKAGE.parent / name
    return beside if (PACKAGE.parent / "pyproject.toml").exists() else PACKAGE / name
