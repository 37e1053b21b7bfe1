"""The command `quantize IN OUT`: a checkpoint's large matrices, quantised once, so that later starts need not."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rwkv_batch.config_sources import OneLineParser
from rwkv_batch.engine.build import choose_device
from rwkv_batch.errors import RwkvBatchError, UsageError
from rwkv_batch.model.checkpoint import find_checkpoint
from rwkv_batch.model.quantized import FORMATS, Quantisation
from rwkv_batch.model.quantized_writer import write_quantised
from rwkv_batch.server.exit_codes import EXIT_LOST, EXIT_USAGE


def quantize_file(argv: Sequence[str], environ: Mapping[str, str], program: Sequence[str]) -> int:
    """Write OUT; returns the exit code."""
    try:
        flags = quantize_parser().parse_args(argv)
        source, target = find_checkpoint(flags.source), Path(flags.target)
        check_target(source, target)
        started = time.monotonic()
        size = write_quantised(source, target, Quantisation(flags.quant, flags.quant_head), choose_device(flags.device))
    except RwkvBatchError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except OSError as error:
        print(f"error: cannot write {target}: {error.strerror or error}", file=sys.stderr, flush=True)
        return EXIT_LOST
    seconds = time.monotonic() - started
    print(f"{target}: {size / 2**20:,.0f} MiB, of {source.stat().st_size / 2**20:,.0f}, in {seconds:.1f} s")
    return 0


def quantize_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(
        prog="rwkv-batch quantize",
        description="Writes a checkpoint with quantised matrices. It is loaded with --model-path like any other, and "
        "sessions go on in it as in IN with the same --quant.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="IN", help="checkpoint, .pth or .safetensors")
    parser.add_argument("target", metavar="OUT", help="the file to write, .safetensors; replaced if it is there")
    parser.add_argument("--quant", choices=list(FORMATS), required=True, help="the format, see docs/quantization.md")
    parser.add_argument(
        "--quant-head",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the matrix that makes the logits is quantised too (default: on)",
    )
    parser.add_argument("--device", default="auto", help="where: auto, cpu, cuda or cuda:N (default: auto)")
    return parser


def check_target(source: Path, target: Path) -> None:
    """Raise UsageError for a file that cannot be written or would not be found as a checkpoint."""
    if target.suffix not in (".safetensors", ".st"):
        raise UsageError(f"OUT must end in .safetensors: {target}")
    if target.exists() and target.samefile(source):
        raise UsageError("OUT is the same file as IN")
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}")
