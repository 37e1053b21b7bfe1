"""The curls of the README and of docs/, run as they stand, one after another, against one server with a password."""

import os
import re
import shutil
import subprocess

import pytest
from scripted_server import PASSWORD
from server_process import ROOT

from routes import ROUTES

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPEN = {route.path for route in ROUTES if route.access in ("open", "translate")}
ADDRESS = re.compile(r"(?:localhost|127\.0\.0\.1):8000")


def curls() -> list[str]:
    """The commands of all pages that begin with curl, each as one."""
    commands, begun = [], ""
    for path in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.splitlines():
                if begun or line.startswith("curl "):
                    begun += line + "\n"
                    if begun.count("'") % 2 == 0:
                        commands.append(begun.strip())
                        begun = ""
    return commands


def test_every_curl_of_the_pages(locked_scripted, tmp_path):
    """Those that say nothing of a password are refused where one is needed."""
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    commands = curls()
    assert len(commands) > 30
    for command in commands:
        asked = ADDRESS.sub(f"127.0.0.1:{locked_scripted.port}", command)
        asked = asked.replace("curl ", "curl -sS -w '\\n%{http_code}' ", 1)
        environ = os.environ | {"PASSWORD": PASSWORD}
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, cwd=tmp_path, env=environ)
        *answer, status = done.stdout.splitlines() or [""]
        path = re.search(ADDRESS.pattern + r"(/[^\s\"'?]*)", command)[1]
        welcome = PASSWORD in command or "$PASSWORD" in command or path in OPEN
        assert status == ("200" if welcome else "401"), (command, answer, done.stderr)
        assert not any(line.startswith(('{"error"', 'data: {"error"')) for line in answer) or not welcome, (command, answer)
