#!/usr/bin/env python3
"""Draw the committed figures of `bench/results/` as plots, each once for light and once for dark pages.

    python bench/plots.py [--out docs/img]

decode   tokens/s against rows for each size of model: ours without and with sampling, the best of Albatross's trees on the same
         weights in the same run, and the roofline of `bench/engine.py`
latency  time to the first token and between tokens against requests at once, over HTTP
scale    tokens/s against the engines of a host, each on a card of its own, and of one engine over several cards against rows
fleet    what `bench/cluster/fleet.py` simulated: how calls are routed, and what comes after a loss, an upgrade, a cold start
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SIZES = ("0.1b", "1.5b", "7.2b")
THEMES = {  # text, grid, then one colour for each line; 4.5 : 1 on the ground of its kind of page
    "light": ("#1b1c25", "#d9dae3", ("#4f46e5", "#0f766e", "#c2410c", "#5a5d6e")),
    "dark": ("#ececf2", "#373b4a", ("#a5a1ff", "#5eead4", "#fdba74", "#a5a9bb")),
}
POLICIES = ("random", "two choices", "hash", "hash, 16 places", "bounded, 16 places", "bounded x 1.5", "bounded")
EVENTS = ("loss", "upgrade", "cold start")
LOADS = (("single", 1), ("singles_16", 16), ("streams", 320))  # entries of http-h200.json and their requests at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    args = parser.parse_args()
    for path in draw_all(args.out):
        print(path)


def draw_all(out: Path) -> list[Path]:
    """Write every plot in every theme; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    names = ("engine-h200.json", "http-h200.json", "fleet.json", "scale-h200.json", "tensor-parallel-h200.json")
    engine, http, fleet, scale, spread = (json.loads((RESULTS / name).read_text()) for name in names)
    plots = (
        ("decode", draw_decode, engine),
        ("latency", draw_latency, http),
        ("fleet", draw_fleet, fleet),
        ("scale", functools.partial(draw_scale, spread=spread), scale),
    )
    files = []
    for theme in THEMES:
        for name, draw, figures in plots:
            with plt.rc_context(style(theme)):
                figure = draw(figures)
                files.append(out / f"plot-{name}-{theme}.svg")
                figure.savefig(files[-1], transparent=True, metadata={"Date": None})
                plt.close(figure)
    return files


def style(theme: str) -> dict[str, Any]:
    """Matplotlib's settings for one kind of page; the same figures give the same file."""
    text, grid, colours = THEMES[theme]
    return {
        "svg.fonttype": "none", "svg.hashsalt": "rwkv_batch", "font.family": "sans-serif", "font.size": 11,
        "text.color": text, "axes.labelcolor": text, "axes.edgecolor": grid, "axes.titlecolor": text, "axes.grid": True,
        "axes.grid.which": "major", "grid.color": grid, "grid.linewidth": 0.8, "xtick.color": text, "ytick.color": text,
        "figure.titlesize": 13, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "lines.linewidth": 2, "lines.markersize": 5,
        "axes.prop_cycle": matplotlib.cycler(color=colours), "legend.frameon": False, "figure.constrained_layout.use": True,
    }  # fmt: skip


def draw_decode(engine: dict[str, Any]) -> Figure:
    """Tokens a second against the rows of a batch, a panel for each size."""
    figure, panels = plt.subplots(1, len(SIZES), figsize=(12, 4.4))
    for axes, size in zip(panels, SIZES, strict=True):
        entry = engine[f"random {size}"]
        rows = [row for row in entry["rows"] if "decode" in row]
        batches = [row["decode"] for row in rows]
        axes.plot(batches, [row["forward_tok_s"] for row in rows], "o-", label="rwkv_batch")
        axes.plot(batches, [row["engine_tok_s"] for row in rows], ":", label="rwkv_batch with sampling")
        peer = best_of(entry["peer"]["trees"])
        axes.plot(list(peer), list(peer.values()), "s-", label="Albatross, best of its trees")
        axes.plot(batches, [row["forward_tok_s"] / row["of_roofline"] for row in rows], "--", label="roofline")
        axes.set(title=f"RWKV-7 {size.upper()}", xlabel="rows decoded together", xscale="log", yscale="log")
        ticks(axes, [1, 8, 64, 320, 960])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panels[0].set_ylabel("tokens a second")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    first = engine[f"random {SIZES[-1]}"]
    figure.suptitle(f"Decode step, fp16, one {first['device']}, {first['date']}")
    return figure


def best_of(trees: dict[str, dict[str, float]]) -> dict[int, float]:
    """The fastest of a peer's trees for each number of rows; entries of prefills are left out."""
    best: dict[int, float] = {}
    for figures in trees.values():
        for rows, speed in figures.items():
            if rows.isdigit():
                best[int(rows)] = max(best.get(int(rows), 0.0), speed)
    return dict(sorted(best.items()))


def draw_latency(http: dict[str, Any]) -> Figure:
    """Milliseconds to the first token and between tokens against the requests at once."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2))
    loads = [count for _, count in LOADS]
    for axes, key, title in zip(panels, ("ttft_ms", "itl_ms"), ("to the first token", "between two tokens"), strict=True):
        for share in ("p50", "p90", "p99"):
            axes.plot(loads, [http[name][key][share] for name, _ in LOADS], "o-", label=share)
        axes.set(title=title, xlabel="requests at once", ylabel="milliseconds", xscale="log")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.08)
        ticks(axes, loads)
    panels[0].legend(loc="upper left")
    figure.suptitle(f"Latency over HTTP, streamed, 7.2B in fp16, one {http['device']}, {http['date']}")
    return figure


def draw_fleet(fleet: dict[str, Any]) -> Figure:
    """The time to the first token by policy, and second by second while something happens."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), width_ratios=(2, 3))
    small, large = (f"{int(engines):,} GPUs" for engines in fleet["fleets"])
    policies = fleet["fleets"][min(fleet["fleets"], key=int)]["policies"]
    shown = [name for name in POLICIES if name in policies]
    for share in ("p50", "p99"):
        left.plot([policies[name]["ttft_ms"][share] for name in shown], range(len(shown)), "o", label=share)
    left.set_yticks(range(len(shown)), shown)
    left.set(title=f"by policy, {small}", xlabel="milliseconds to the first token", xscale="log", ylim=(-0.5, len(shown) - 0.5))
    left.invert_yaxis()
    left.legend(loc="lower right")
    for (engines, found), line in zip(fleet["fleets"].items(), ("-", ":"), strict=True):
        for number, name in enumerate(EVENTS):
            p99 = found["events"][name]["ttft_p99_ms"][:60]
            label = f"{name}, {int(engines):,}"
            right.plot(
                range(15, 15 + len(p99)), [value or float("nan") for value in p99], line, color=f"C{number}", label=label
            )
    right.set(title="p99 while something happens", xlabel="second", ylabel="milliseconds to the first token", yscale="log")
    right.legend(loc="upper right", ncols=2)
    figure.suptitle(f"Simulated fleets of {small} and {large} at 75 % load, costs of one {fleet['device']}, {fleet['date']}")
    return figure


def draw_scale(scale: dict[str, Any], spread: dict[str, Any]) -> Figure:
    """Tokens a second of 1, 2 ... engines, and of one engine over as many cards as ranks. `spread`: results of `--tp`."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    counts = [int(count) for count in scale["counts"]]
    for key, label in (("forward", "engines alone"), ("request", "one request over HTTP"), ("streams", "streams over HTTP")):
        left.plot(counts, [found[key] for found in scale["counts"].values()], "o-", label=label)
    left.plot(counts, [scale["counts"]["1"]["forward"] * count for count in counts], ":", label="linear")
    left.set(title=f"an engine on each card, {scale['rows']} rows each", xlabel="cards", ylabel="tokens a second")
    left.set_xticks(counts)
    for row in spread["rows"]:
        rows = sorted(int(name.removeprefix("tok_s_")) for name in row if name.startswith("tok_s_"))
        label = "one card" if row["tp"] == 1 else f"--tp {row['tp']}"
        right.plot(rows, [row[f"step_ms_{count}"] for count in rows], "o-", label=label)
    right.set(title="one engine", xlabel="rows decoded together", ylabel="milliseconds a step", xscale="log")
    ticks(right, rows)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.legend(loc="upper left")
    figure.suptitle(f"7.2B in fp16, {scale['device']}, {scale['date']}")
    return figure


def ticks(axes: Axes, rows: list[int]) -> None:
    """Whole numbers below a logarithmic axis."""
    axes.set_xticks(rows, [f"{count:,}" for count in rows])
    axes.xaxis.minorticks_off()
    axes.yaxis.minorticks_off()


if __name__ == "__main__":
    main()
