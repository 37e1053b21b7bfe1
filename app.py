"""The command: `python app.py` and `rwkv-batch` start the supervisor, which starts this same file again for each child.

A child is told its role by `--role engine` or `--role http`; nobody else gives that flag.
"""

import os
import sys

from rwkv_batch.server import control, supervisor


def main() -> int:
    """Run the server, or be one of its processes; returns the exit code, see `rwkv_batch.server.exit_codes`."""
    if sys.argv[1:2] == ["--role"]:
        return child(sys.argv[2])
    return supervisor.serve(sys.argv[1:], os.environ, [sys.executable, os.path.abspath(__file__)])


def child(role: str) -> int:
    """Be the engine or an HTTP process; each imports only what it needs: the one torch, the other Robyn."""
    ours = control.begin(role)
    if role == "engine":
        from rwkv_batch.server.engine_process import run
    else:
        from routes.process import run
    return run(ours)


if __name__ == "__main__":
    sys.exit(main())
