"""Where settings come from: flags, environment, settings file; what they are called there is the table of `config.py`.

A flag wins over the environment, the environment over the file, the file over the default.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rwkv_batch import __version__
from rwkv_batch.config import HEADINGS, PREFIX, Config, flag_of
from rwkv_batch.errors import UsageError
from rwkv_batch.secrets import exposed

MANY = [item.name for item in fields(Config) if item.metadata["many"]]


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Read flags, environment and settings file. Raises UsageError; `--help` and `--version` print and exit with 0."""
    return from_layers(read_flags(make_parser(), argv), environ)


def from_layers(flags: dict[str, Any], environ: Mapping[str, str]) -> Config:
    """The settings of these flags, the environment and the settings file. Raises UsageError."""
    path = flags.pop("config", None) or environ.get(PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    for layer in (read_file(path) if path else {}, read_environment(environ), flags):
        for pair in (("password", "password_file"), ("api_keys", "api_key_file")):
            if any(name in layer for name in pair):  # a secret replaces one from below, however either is given
                for name in pair:
                    values.pop(name, None)
        values.update(layer)
    return Config(**values)


def read_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The settings on the command line. Raises UsageError, which never shows what stands behind a flag that is not known."""
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise UsageError(f"argument {argv.index(unknown[0]) + 1} stands behind no flag that takes it (see --help)")
        like = difflib.get_close_matches(flag, [flag_of(name) for name in names()], 1)
        raise UsageError(f"no flag is called {flag}{f', did you mean {like[0]}?' if like else ''} (see --help)")
    return vars(known)


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the environment. Raises UsageError."""
    found = {name: environ[PREFIX + name.upper()] for name in names() if PREFIX + name.upper() in environ}
    return {name: convert(name, text, PREFIX + name.upper()) for name, text in found.items()}


def names() -> list[str]:
    """The settings in order."""
    return [item.name for item in fields(Config)]


def kind_of(name: str) -> type:
    """The plain type of a setting: str, int, float or bool."""
    hint = get_type_hints(Config)[name]
    if get_origin(hint) is Literal:
        return str
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)


def convert(name: str, text: str, source: str) -> str | int | float | bool:
    """A setting's value from text. Raises UsageError that names the source."""
    kind = kind_of(name)
    if kind is bool:
        word = text.strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off", ""):
            return False
        raise UsageError(f"{source}: wants true or false", param=name)
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{source}: wants {'a whole number' if kind is int else 'a number'}", param=name) from None


def read_file(path: str) -> dict[str, Any]:
    """The settings in a TOML file; keys are the field names, tables are not used. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise UsageError(f"--config: cannot read {path}: {error.strerror}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path}: {error}", param="config") from None
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in names():
            raise UsageError(f"--config: {path}: no setting is called {key}", param="config")
        kind = kind_of(name)
        if name in ("devices", "pp_devices") and isinstance(value, list):
            value = str(value)
        if name in MANY and isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = ",".join(value)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UsageError(f"--config: {path}: {key} wants {kind.__name__}, not {type(value).__name__}", param=name)
        if name in ("password", "api_keys") and exposed(mode):
            raise UsageError(f"--config: {path}: others may read it, and {key} is in it; run chmod 600 {path}", param=name)
        values[name] = value
    return values


class Joined(argparse.Action):
    """Puts commas between the values of a flag that is given several times."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Add one; called by argparse."""
        known = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{known},{values}" if known else values)


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong flag as UsageError instead of printing and leaving."""

    def error(self, message: str) -> None:
        """Raise UsageError; called by argparse."""
        raise UsageError(f"{message} (see --help)")


def make_parser() -> argparse.ArgumentParser:
    """The command line. Flags that are not given are absent from the result, so that they do not hide environment or file."""
    parser = OneLineParser(
        description="HTTP server for batch inference with RWKV-7.",
        epilog="In front of the flags, `batch IN OUT` answers the lines of a file instead, `quantize IN OUT` writes a "
        "checkpoint with quantised matrices, `check NAME` checks a model (see batch --help, quantize --help, check --help). "
        f"Each flag can also be set in the environment ({PREFIX}PORT=8000) or in the file of --config (port = 8000); "
        "a flag wins over the environment, the environment over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"rwkv_batch {__version__}")
    parser.add_argument("--config", metavar="FILE", help="settings file, TOML")
    groups = {key: parser.add_argument_group(title) for key, title in HEADINGS.items()}
    hints = get_type_hints(Config)
    for item in fields(Config):
        kind, flag, text = kind_of(item.name), flag_of(item.name), item.metadata["help"].replace("%", "%%")
        group = groups[item.metadata["group"]]
        if item.default is not None and kind is not bool:
            text += f" (default: {item.default})"
        if kind is bool:
            negative = "" if not item.default else " (default: on)"
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text + negative)
        elif get_origin(hints[item.name]) is Literal:
            group.add_argument(flag, choices=get_args(hints[item.name]), help=text)
        else:
            metavar = {int: "N", float: "X", str: "TEXT"}[kind]
            if item.name.endswith(("_path", "_file")):
                metavar = "FILE"
            if item.name.endswith("_dir"):
                metavar = "FOLDER"
            bare = item.metadata["bare"]
            optional = {} if bare is None else {"nargs": "?", "const": bare}
            if item.name in MANY:
                optional["action"] = Joined
            flags = [flag, "--model"] if item.name == "model_path" else [flag]
            group.add_argument(*flags, dest=item.name, type=kind, metavar=metavar, help=text, **optional)
    return parser
