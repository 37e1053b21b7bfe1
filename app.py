"""The command: `python app.py` and `rwkv-batch` start the supervisor, which starts this same file again for each child.

A word in front of the flags names another command than to serve. A child is told its role by `--role engine`, `--role http` or
`--role batch`; nobody else gives that flag.
"""

import os
import sys
from importlib import import_module

# Each has a function of this name, which gets the flags, the environment and what starts a child, and returns the exit code.
COMMANDS = {
    "serve": ("rwkv_batch.server.supervisor", "serve"),
    "batch": ("rwkv_batch.server.batch_command", "answer_file"),
    "check": ("rwkv_batch.server.check_command", "check_model"),
    "quantize": ("rwkv_batch.server.quantize_command", "quantize_file"),
}
# Each imports only what it needs: the one torch, the others the routes.
ROLES = {
    "engine": "rwkv_batch.server.engine_process",
    "store": "rwkv_batch.server.store_process",
    "http": "routes.process",
    "batch": "routes.offline.process",
}


def main() -> int:
    """Run a command, or be one of its processes; returns the exit code, see `rwkv_batch.server.exit_codes`."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first == "--role":
        return child(sys.argv[2])
    module, function = COMMANDS[first if first in COMMANDS else "serve"]
    program = [sys.executable, os.path.abspath(__file__)]
    return getattr(import_module(module), function)(sys.argv[1 + (first in COMMANDS) :], os.environ, program)


def child(role: str) -> int:
    """Be the engine, or what stands before it."""
    from rwkv_batch.server import control

    ours = control.begin(role)
    return import_module(ROLES[role]).run(ours)


if __name__ == "__main__":
    sys.exit(main())
