#!/usr/bin/env python3
"""Write the tables of docs/performance.md that come from `bench/results/`, each between its marks; the text around stays.

    python bench/card/tables.py

decode, prefill  tokens/s of `bench/engine.py` on one H200, with the best of Albatross's trees in the same run
cells            the newest of them, beside what is asked for, the goal and the roofline
layers           where a layer's time goes (`bench/card/layers.py`)
fixed            what a layer takes beyond its floor when it has few rows
h100             an H100 with its own kernels and with those for older cards
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
SIZES = ("7.2b", "1.5b", "0.1b")
STEPS = ("1", "8", "64", "320", "960", "1x1024", "32x512")
ASKED = {  # tokens/s: what is asked for, and the goal
    "7.2b": (
        (350, 390), (2_350, 2_500), (13_700, 14_800), (30_500, 34_000), (32_500, 36_500), (44_000, 48_000), (46_000, 50_000),
    ),
    "1.5b": (
        (1_250, 1_500), (9_000, 10_500), (46_000, 58_000), (102_000, 118_000), (118_000, 135_000), (155_000, 190_000),
        (210_000, 240_000),
    ),
    "0.1b": (
        (4_800, 6_500), (36_000, 48_000), (200_000, 280_000), (480_000, 620_000), (700_000, 850_000), (550_000, 800_000),
        (1_700_000, 2_200_000),
    ),
}  # fmt: skip
COLUMNS = {  # of the table of layers: the parts of each
    "norm, blends": ("norm_att",), "r, k, v and pairs": ("rkv", "pairs"), "recurrence": ("recurrence",), "output": ("output",),
    "norm, blend": ("norm_ffn",), "key": ("key",), "value": ("value",),
}  # fmt: skip
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


def written(page: str) -> str:
    """Return the page with its tables made anew."""
    return MARK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", page)


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = (f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", line) for line in lines)


def step_name(step: str) -> str:
    """As readers say it: rows of a decode step, or prompts × tokens."""
    return f"B = {step}" if step.isdecimal() else "{} × {:,}".format(*map(int, step.split("x")))


def speeds(entry: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Tokens/s forward, and share of the roofline, by step."""
    return {
        str(row.get("decode") or row["prefill"]): (row.get("forward_tok_s") or row["tok_s"], row.get("of_roofline", 0.0))
        for row in entry["rows"]
    }


def best_peer(entry: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """Tokens/s of the fastest of Albatross's trees, and its name, by step."""
    found: dict[str, tuple[float, str]] = {}
    for tree, cells in entry.get("peer", {"trees": {}})["trees"].items():
        for step, speed in cells.items():
            found[step] = max(found.get(step, (0.0, "")), (speed, tree))
    return found


def number(value: float) -> str:
    """Four or more digits, as tokens/s are told."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def ladder(steps: list[str], sizes: tuple[str, ...]) -> str:
    """Speeds of each size, with the best peer's below."""
    engine, rows = result("engine-h200"), []
    for size in sizes:
        entry = engine[f"random {size}"]
        ours, peer = speeds(entry), best_peer(entry)
        rows.append([size.upper(), *(number(ours[step][0]) if step in ours else "" for step in steps)])
        megakernel = {step: " (megakernel)" for step, (_, tree) in peer.items() if "megakernel" in tree}
        rows.append(
            ["Albatross", *(number(peer[step][0]) + megakernel.get(step, "") if step in peer else "" for step in steps)]
        )
    return table(["tokens/s", *map(step_name, steps)], rows)


def decode() -> str:
    return ladder(["1", "8", "16", "32", "64", "128", "320", "960"], tuple(reversed(SIZES)))


def prefill() -> str:
    return ladder(["1x512", "1x1024", "1x4096", "32x512"], tuple(reversed(SIZES)))


def cells() -> str:
    engine, rows = result("engine-h200"), []
    for size in SIZES:
        entry = engine[f"random {size}"]
        ours, peer = speeds(entry.get("latest", entry)), best_peer(entry)
        for step, (asked, goal) in zip(STEPS, ASKED[size], strict=True):
            speed, roofline = ours[step]
            theirs = peer[step][0] if step in peer else None
            share = f"{speed / asked:.2f}" if speed < asked else f"**{speed / asked:.2f}**"
            times = [number(theirs), f"{speed / theirs:.2f}"] if theirs else ["", ""]
            line = [size.upper(), step_name(step), number(speed), f"{asked:,}", share, f"{goal:,}", *times, f"{roofline:.0%}"]
            rows.append([cell.replace("%", " %") for cell in line])
    return table(["", "", "tokens/s", "asked", "of it", "goal", "Albatross", "times", "of the roofline"], rows)


def steps_of(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Size, step and its parts, in the order of the tables."""
    for size in SIZES:
        for step in STEPS:
            parts = found["models"].get(size, {}).get(f"{step} rows" if step.isdecimal() else step)
            if parts:
                yield size, step, parts


def layers() -> str:
    rows = []
    for size, step, parts in steps_of(result("layers-h200")):
        row = [size.upper(), step_name(step), us(parts["layer_us"]) + f" ({us(sum(parts['floor_us'].values()))})"]
        for members in COLUMNS.values():
            taken, floor = (sum(parts[kind].get(part, 0.0) for part in members) for kind in ("us", "floor_us"))
            row.append((us(taken) if taken else "") + (f" ({us(floor)})" if floor and taken else ""))
        rows.append(row)
    return table(["", "", "layer", *COLUMNS], rows)


def us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def fixed() -> str:
    rows = []
    for size, step, parts in steps_of(result("layers-h200")):
        if step not in ("1", "8"):
            continue
        beyond = {
            name: sum(parts["us"].get(part, 0.0) - parts["floor_us"].get(part, 0.0) for part in members)
            for name, members in COLUMNS.items()
        }
        floor, launches = sum(parts["floor_us"].values()), parts["launches"]
        whole = parts["layer_us"] - floor
        row = [size.upper(), step, us(parts["layer_us"]), us(floor), us(whole), f"{launches:g}", f"{whole / launches:.2f}"]
        rows.append(row + [us(value) for value in beyond.values()])
    return table(["", "rows", "layer", "floor", "beyond", "launches", "a launch", *COLUMNS], rows)


def h100() -> str:
    """Of kernels for sm_80 too, where there is a result."""
    found, rows = result("engine-h100"), []
    if (RESULTS / "engine-h100-sm80.json").exists():
        found |= result("engine-h100-sm80")
    for size in SIZES:
        for name, entry in (("", f"random {size}"), (", kernels for sm_80", f"random {size} sm_80")):
            ours = speeds(found[entry]) if entry in found else {}
            if ours:
                rows.append([size.upper() + name, *(number(ours[step][0]) if step in ours else "" for step in STEPS)])
    return table(["tokens/s", *map(step_name, STEPS)], rows)


TABLES: dict[str, Callable[[], str]] = {
    "decode": decode, "prefill": prefill, "cells": cells, "layers": layers, "fixed": fixed, "h100": h100,
}  # fmt: skip

if __name__ == "__main__":
    main()
