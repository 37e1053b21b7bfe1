"""Mixed load on all routes with processes killed meanwhile, by a checker that knows the right texts: bench/soak.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ROOT, ServerProcess

pytestmark = pytest.mark.faults

FEW_SESSIONS = ("--l1-sessions", "16", "--l2-sessions", "32")  # memory that fills with sessions is not what is looked for
MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))  # of the long one


def soak(server: ServerProcess, folder: Path, *args: str) -> dict:
    """Run the script; returns what it wrote. AssertionError with its examples when it found anything wrong."""
    out = folder / "soak.json"
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "--url", f"http://127.0.0.1:{server.port}", "--out", str(out)]
    command += ["--supervisor-pid", str(server.process.pid), *args]
    done = subprocess.run(command, capture_output=True, text=True)
    assert out.exists(), done.stderr + server.output
    result = json.loads(out.read_text())
    print(json.dumps({name: result[name] for name in ("counts", "rows", "processes", "sessions_checked")}))
    assert result["faults"] == {}, "\n".join(result["examples"])
    assert done.returncode == 0, done.stderr
    assert server.process.poll() is None
    assert result["rows"]["exact"] == result["rows"]["all"] > 0
    return result


def test_some_seconds_with_a_killed_engine(tiny_checkpoint, folder):
    flags = ("--threads", "1", "--slots", "16", "--http-workers", "1", "--heartbeat", "0.1", *FEW_SESSIONS)
    with ServerProcess(*flags, model=tiny_checkpoint, folder=folder) as server:
        short = ("--minutes", "0.06", "--prompts", "2", "--settle", "0.5", "--growth-mib", "160")
        result = soak(server, folder, *short, "--kills", "1")
    assert result["counts"]["kills of engine"] == 1


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 1200)
def test_soak_with_killed_processes(folder):
    flags = ("--threads", "1", "--slots", "16", "--heartbeat", "0.1", "--max-crashes", "100", *FEW_SESSIONS)
    with ServerProcess(*flags, model=ROOT / "demo" / "model.rwkv", folder=folder) as server:
        result = soak(server, folder, "--minutes", str(MINUTES), "--kills", "10", "--http-kills", "5")
    assert result["counts"]["kills of engine"] == 10
