"""A PostgreSQL of the tests' own: started as an ordinary user on a socket in a folder, and ended with the tests."""

import contextlib
import glob
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

# Nothing here has to survive a power loss, and few tests want much of it.
SETTINGS = {"listen_addresses": "", "fsync": "off", "shared_buffers": "16MB", "max_connections": "60", "wal_level": "minimal",
            "max_wal_senders": "0", "autovacuum": "off", "log_min_messages": "fatal", "full_page_writes": "off"}  # fmt: skip


def find_program(name: str) -> str | None:
    """Where a program of PostgreSQL is: Debian keeps most out of the path."""
    found = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), key=lambda path: int(path.split("/")[4]))
    return found[-1] if found else shutil.which(name)


class PostgresServer:
    """A cluster in a folder of its own. It refuses to run as root, so then it is Debian's user `postgres` who runs it."""

    def __init__(self, **settings: str):
        self.folder = Path(tempfile.mkdtemp(prefix="pg"))
        self._numbers = itertools.count(1)
        self._settings = SETTINGS | settings
        self._user = {}
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            self._user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        self._run("initdb", "-D", f"{self.folder}/data", "-U", "tests", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync",
                  "--no-instructions")  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = " ".join(f"-c {name}={value or chr(39) * 2}" for name, value in self._settings.items())
        options += f" -c unix_socket_directories={self.folder}"
        self._run("pg_ctl", "-D", f"{self.folder}/data", "-l", f"{self.folder}/log", "-o", options, "-w", "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it; `immediate` is as if the power went."""
        self._run("pg_ctl", "-D", f"{self.folder}/data", "-m", mode, "-w", "stop")

    def new_url(self) -> str:
        """The URL of a place where nothing is yet."""
        import psycopg

        name = f"s{next(self._numbers)}"
        with psycopg.connect(self.url) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{self.url}&options={quote(f'-csearch_path={name}')}"

    @property
    def url(self) -> str:
        """Of the cluster's own database."""
        return f"postgresql://tests@/postgres?host={quote(str(self.folder), safe='')}"

    def pids(self) -> list[int]:
        """The processes that serve connections."""
        import psycopg

        with psycopg.connect(self.url) as connection:
            query = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            return [row[0] for row in connection.execute(query)]

    def close(self) -> None:
        """End it and forget what was in it."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, name: str, *arguments: str) -> None:
        # Not to a pipe: the server inherits it, and whoever read it to the end would wait for the server.
        with tempfile.TemporaryFile() as out:
            command = [find_program(name), *arguments]
            try:
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", **self._user)
            except subprocess.CalledProcessError:
                out.seek(0)
                print(out.read().decode(errors="replace"))
                raise
