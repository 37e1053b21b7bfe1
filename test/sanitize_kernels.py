#!/usr/bin/env python3
"""A few small cases of every GPU test of a kernel under NVIDIA's compute-sanitizer, many processes side by side.

    python test/sanitize_kernels.py [--seconds 300] [--memcheck 12] [--racecheck 4] [--out FOLDER] [test/test_gpu_linear.py ...]

Tests that capture no graph run without torch's caching of memory, which hides what lies beyond a tensor but within its block.
Two faults on purpose are looked for first: unless both are found, nothing is said of our kernels. Racecheck does not follow
barriers in shared memory that the copy engine completes; docs/kernels.md says which of its reports these are.

The file is a plugin of pytest as well: it chooses the cases, deals them out to the processes, the cheap ones first, and lets
none begin when the time is over.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BEGAN = time.monotonic()
NOT_KERNELS = ("tensor_parallel", "pipeline", "pace")  # several cards, and whole loops held to a pace
WITHOUT_RACES = ("engine", "adapters", "quant", "sampling", "mixed", "logprobs", "late_draws", "state")
ENGINES = (
    "test_gpu_engine",
    "test_gpu_adapters",
    "test_gpu_late_draws",
    "test_gpu_logprobs",
    "test_gpu_mixed",
    "test_gpu_state",
)
LEFT_OUT = (  # large, slow, or of no kernel
    "four_gibibytes", "spread_over_the_gpu_in_pieces", "test_wkv_prefill_of_4096", "large_models", "host_far_ahead",
    "flashinfer", "refused", "by_name", "errors_name", "does_not_fit", "configs_that", "configs_fit", "does_not_drift",
    "noticed", "prefill_equals_token_by_token", "without_kernels", "under_load", "reference_ops_run",
    "check_passes_here_and_notices", "test_cublaslt", "says_what_the_reference_says", "kept_set_and_boundary",
)  # fmt: skip
COSTLY = (*ENGINES, "test_gpu_quant.py::test_", "an_engine", "draws_follow", "company", "test_logits", "in_a_graph", "4096")
GRAPHS = re.compile(r"CUDAGraph|cuda\.graph|build_engine|Harness|captured|looped|DecodeGraphs")
FAULTS = """
#include <cstdio>
namespace rwkv {
__global__ void far(int* p) { p[threadIdx.x + 1000000] = 1; }
__global__ void race(int* p) {
    __shared__ int s[128];
    s[threadIdx.x] = p[threadIdx.x];
    p[threadIdx.x] = s[127 - threadIdx.x];
}
}
int main(int argc, char**) {
    int* p;
    cudaMalloc(&p, 512);
    if (argc > 1) rwkv::race<<<1, 128>>>(p);
    else rwkv::far<<<1, 128>>>(p);
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""


# The plugin.


def captures(item: pytest.Item, known: dict[Path, set[str]]) -> bool:
    """Whether the test captures a graph, by its source and that of the functions it calls."""
    if item.path.stem in ENGINES:
        return True
    if item.path not in known:
        text = item.path.read_text()
        functions = {node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body if hasattr(node, "name")}
        found = {name for name, source in functions.items() if GRAPHS.search(source)}
        while more := {
            name
            for name, source in functions.items()
            if name not in found and any(re.search(rf"\b{other}\b", source) for other in found)
        }:
            found |= more
        known[item.path] = found
    return item.cls.__name__ in known[item.path] if item.cls else item.originalname in known[item.path]


def cost(item: pytest.Item) -> tuple[bool, int]:
    product = 1
    for number in re.findall(r"\d+", item.nodeid.partition("[")[2]):
        product *= max(1, int(number))
    return any(word in item.nodeid for word in COSTLY), product


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cached, each = os.environ["SANITIZE_CACHED"] == "1", int(os.environ["SANITIZE_EACH"])
    group, of = map(int, os.environ["SANITIZE_GROUP"].split("/"))
    functions: dict[str, list[pytest.Item]] = {}
    known: dict[Path, set[str]] = {}
    for item in items:
        if captures(item, known) is cached and not any(word in item.nodeid for word in LEFT_OUT):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen: list[pytest.Item] = []
    for function in functions.values():
        kinds: dict[str, list[pytest.Item]] = {}
        for item in sorted(function, key=cost):
            kinds.setdefault(re.sub(r"\d+", "", item.nodeid), []).append(item)
        some = [kind[0] for kind in kinds.values()] + [kind[len(kind) // 2] for kind in kinds.values()]
        chosen += dict.fromkeys(some[:: max(1, -(-len(some) // each))])
    kept = sorted(chosen, key=cost)[group::of]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - BEGAN > float(os.environ["SANITIZE_SECONDS"]):
        pytest.skip("no time left")


# The command.


class Sanitizer:
    """compute-sanitizer, as it is here."""

    def __init__(self, out: Path, seconds: float):
        self.command = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        self.out, self.seconds = out, seconds

    def call(self, tool: str, number: int, *target: str) -> list[str]:
        """With a range of ports of its own; of kernels it watches ours, by their mangled names."""
        port = str(49_200 + 40 * number)
        flags = ["--port", port, "--max-connections", "30", "--launch-timeout", "60", "--kernel-name", "kns=4rwkv"]
        return [self.command, "--tool", tool, *flags, "--print-limit", "30", "--error-exitcode", "99", *target]

    def finds_faults(self) -> bool:
        """Whether both tools find the fault that is there for them."""
        source, program = self.out / "faults.cu", str(self.out / "faults")
        source.write_text(FAULTS)
        subprocess.run(["nvcc", "-arch=native", str(source), "-o", program], check=True)
        calls = self.call("memcheck", 0, program), self.call("racecheck", 1, program, "race")
        texts = [subprocess.run(call, capture_output=True, text=True).stdout for call in calls]
        return "Invalid __global__ write" in texts[0] and "Race reported" in texts[1]

    def run(self, tool: str, number: int, group: str, cached: bool, files: list[str]) -> str:
        """Run a share of the cases; returns what was said."""
        environment = os.environ | {
            "SANITIZE_GROUP": group, "SANITIZE_CACHED": str(int(cached)), "SANITIZE_SECONDS": str(self.seconds),
            "SANITIZE_EACH": "8" if tool == "memcheck" else "3", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        if not cached:
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        plugin = ["-o", "addopts=", "-o", "timeout=300", "-v", "-m", "gpu", "-W", "ignore", "-p", "sanitize_kernels"]
        target = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", *files]
        if tool == "memcheck" and not cached:
            target = ["--padding", "256", *target]
        file = self.out / f"{tool}-{'graphs-' if cached else ''}{group.replace('/', '-of-')}.txt"
        with file.open("w") as out:
            subprocess.run(self.call(tool, number, *target), env=environment, stdout=out, stderr=subprocess.STDOUT)
        return file.read_text(errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="tests, instead of all")
    parser.add_argument("--seconds", type=float, default=300, help="after which no case begins")
    parser.add_argument("--memcheck", type=int, default=12, help="processes")
    parser.add_argument("--racecheck", type=int, default=4, help="processes")
    parser.add_argument("--out", type=Path, default=Path("sanitized"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = sorted(str(file) for file in HERE.glob("test_gpu_*.py") if not any(word in file.name for word in NOT_KERNELS))
    files = args.files or found
    racing = args.files or [file for file in files if not any(word in file for word in WITHOUT_RACES)]
    sanitizer = Sanitizer(args.out, args.seconds)
    if not sanitizer.finds_faults():
        print("the faults on purpose are not found: nothing was looked for")
        return 2
    graphs = max(1, args.memcheck // 4)
    plain = max(1, args.memcheck - graphs)
    shares = [("memcheck", f"{n}/{plain}", False, files) for n in range(plain)]
    shares += [("memcheck", f"{n}/{graphs}", True, files) for n in range(graphs)]
    shares += [("racecheck", f"{n}/{args.racecheck}", False, racing) for n in range(args.racecheck)]
    with ThreadPoolExecutor(len(shares)) as pool:
        runs = [
            pool.submit(sanitizer.run, tool, n + 2, group, cached, some) for n, (tool, group, cached, some) in enumerate(shares)
        ]
        texts = [(share[0], run.result()) for share, run in zip(shares, runs, strict=True)]
    return max(told(tool, "\n".join(text for name, text in texts if name == tool)) for tool in ("memcheck", "racecheck"))


def told(tool: str, text: str) -> int:
    """Print what a tool found; returns 1 if that is anything."""
    ended = Counter(re.findall(r"^test\S*.* (PASSED|FAILED|ERROR|SKIPPED)", text, re.MULTILINE))
    print(f"{tool}: {ended['PASSED']} cases passed, {ended['FAILED'] + ended['ERROR']} failed, {ended['SKIPPED']} not begun")
    reports = Counter(re.findall(r"=========\s+((?:Error|Warning|Invalid|Misaligned|Program hit|and (?:Read|Write)).*)", text))
    for report, count in reports.most_common(30):
        print(f"  {count} times: {report[:200]}")
    return int(bool(reports))


if __name__ == "__main__":
    sys.exit(main())
