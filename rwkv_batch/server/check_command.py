"""The command `check NAME`: one of the checks, of a model loaded here or of a running server."""

import argparse
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from rwkv_batch.checks.checks import CHECKS, table
from rwkv_batch.checks.remote import RemoteTarget
from rwkv_batch.checks.target import Target
from rwkv_batch.config import Config
from rwkv_batch.config_sources import from_layers, make_parser, read_flags
from rwkv_batch.errors import CheckpointError, InvalidRequest, RwkvBatchError, UsageError
from rwkv_batch.secrets import read_password
from rwkv_batch.server.exit_codes import EXIT_DIFFERENT, EXIT_ENGINE, EXIT_USAGE
from rwkv_batch.server.supervisor import begin, own_folder

OPTIONS = ("prompt", "top", "rows", "max_tokens", "file", "lines", "out")  # parameters of the checks, and flags


def check_model(argv: Sequence[str], environ: Mapping[str, str], program: Sequence[str]) -> int:
    """Run a check and print what it found; returns the exit code."""
    try:
        flags = read_flags(check_parser(), argv)
        name, url, as_json = (flags.pop(key, None) for key in ("check", "url", "json"))
        options = options_of(name, flags)
        config = from_layers(flags, environ)
        if url is not None:
            password = read_password(config.password, config.password_file)
            result = run(name, RemoteTarget(url, password, config.served_model_name), options, config)
        else:
            result = run_here(name, options, config)
    except (UsageError, CheckpointError, InvalidRequest) as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except RwkvBatchError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_ENGINE
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print("\n".join([f"{name}: {result['model']}, {result['place']}", *table(name, result)]))
    return 0 if result.get("equal", True) else EXIT_DIFFERENT


def run_here(name: str, options: dict[str, Any], config: Config) -> dict[str, Any]:
    """Load the model of `config` in this process and check it."""
    from rwkv_batch.checks.local import LocalTarget  # takes torch

    config = begin(config)
    with own_folder() as folder:
        # No session is kept, so none needs memory or a file.
        nowhere = {"state_url": None, "snapshots": None, "state_key_file": None, "state_db": str(folder / "sessions.db")}
        return run(name, LocalTarget(replace(config, **nowhere, l1_sessions=1, l2_sessions=0)), options, config)


def run(name: str, target: Target, options: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return what a check found, and of which model."""
    check = CHECKS[name]
    known = inspect.signature(check).parameters
    options = {**options, **{key: getattr(config, key) for key in ("seed", "noise") if key in known}}
    try:
        return {"check": name, "model": target.model, "place": target.place, **check(target, **options)}
    finally:
        target.close()


def options_of(name: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Take a check's own options out of the flags. UsageError for those of other checks, and for what is missing."""
    found = {option: flags.pop(option) for option in OPTIONS if option in flags}
    known = inspect.signature(CHECKS[name]).parameters
    for option in found:
        if option not in known:
            raise UsageError(f"--{option.replace('_', '-')}: the check {name} has no such option")
    if name == "lambada" and "file" not in found:
        raise UsageError('--file: the check lambada needs a file of lines {"text": "..."}')
    if name == "questions":
        found.setdefault("out", f"batch_results_{datetime.now():%Y%m%d_%H%M%S}.jsonl")
    return found


def check_parser() -> argparse.ArgumentParser:
    """The command line: a check's name, its options, and what the server takes too."""
    parser = make_parser()
    parser.prog += " check"
    parser.description = (
        "Checks a model that is loaded here, as the server would load it, or with --url one that a server has. "
        "docs/checks.md says what each check does. --seed and --noise are those of the check."
    )
    parser.epilog = None
    parser.add_argument("check", choices=list(CHECKS), metavar="NAME", help=", ".join(CHECKS))
    own = parser.add_argument_group("the check")
    own.add_argument("--url", metavar="URL", help="a running server, http://HOST:PORT; --password is then for it, and "
                     "--served-model-name says which of its models")  # fmt: skip
    own.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    own.add_argument("--prompt", metavar="TEXT", action="append", help="next-token, generate, consistency: a prompt instead of "
                     "those built in; may be given several times")  # fmt: skip
    own.add_argument("--top", metavar="N", type=at_least_one, help="next-token: tokens shown (default: 5)")
    own.add_argument("--rows", metavar="N", type=at_least_one, help="questions, consistency: rows (default: 128, 16)")
    own.add_argument("--max-tokens", metavar="N", type=at_least_one, help="generate, questions, consistency: tokens of a row "
                     "(default: 10, 150, 64)")  # fmt: skip
    own.add_argument("--file", metavar="FILE", help='lambada: passages, one {"text": "..."} a line')
    own.add_argument("--lines", metavar="N", type=at_least_one, help="lambada: how many of them (default: all)")
    own.add_argument("--out", metavar="FILE", help="questions: where the answers go (default: batch_results_DATE_TIME.jsonl)")
    return parser


def at_least_one(text: str) -> int:
    """A number of things."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
