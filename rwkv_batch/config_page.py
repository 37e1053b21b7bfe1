"""The settings as a page of Markdown: `python -m rwkv_batch.config_page > docs/configuration.md`.

Knows nothing but the fields of `Config`; `test/test_docs.py` holds the page to what it prints.
"""

from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rwkv_batch.config import HEADINGS, PREFIX, Config, flag_of

INTRODUCTION = f"""# Configuration

This page is made by `python -m rwkv_batch.config_page > docs/configuration.md` from the help texts in `rwkv_batch/config.py`.

Each setting is a flag (`--max-stops 128`), an environment variable (`{PREFIX}MAX_STOPS=128`) and a key of a TOML file
(`max_stops = 128`), which is named by `--config server.toml` or `{PREFIX}CONFIG`. A flag wins over the environment, the
environment over the file. For a switch that is on by default, the flag shown turns it off. `python app.py --help` prints
the same list.

Without a password the server listens on 127.0.0.1 only, with one on 0.0.0.0; `--host` overrides. `--password-file` and
`{PREFIX}PASSWORD` keep the secret out of `ps`. A file that holds a password or API keys must be readable by its owner only.
`--model` is short for `--model-path`."""


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for group, title in HEADINGS.items():
        rows = [_row(item) for item in fields(Config) if item.metadata["group"] == group]
        parts.append("\n".join([f"## {title.capitalize()}", "", "| Setting | Default | |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _row(item: Field) -> str:
    flag = flag_of(item.name)
    if item.default is True:
        flag = f"--no-{flag[2:]}"
    text = item.metadata["help"].replace("|", "\\|")
    return f"| `{flag}` | {_default(item.default)} | {text}{_values(item)} |"


def _default(value: Any) -> str:
    if value is None:
        return ""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"`{value}`"


def _values(item: Field) -> str:
    kind = get_type_hints(Config)[item.name]
    if get_origin(kind) is Literal:
        return f" ({', '.join(f'`{value}`' for value in get_args(kind))})"
    low, high = item.metadata["low"], item.metadata["high"]
    return "" if low is None else f" ({low:,} to {high:,})"


if __name__ == "__main__":
    print(page())
