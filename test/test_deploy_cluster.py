"""The recipes for several machines, as far as they can be read without running them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from models import ROOT

from routes import ROUTES
from rwkv_batch.config import PREFIX
from rwkv_batch.config_sources import load, names

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

DEPLOY = ROOT / "deploy"
OBJECTS = {
    (found["kind"], found["metadata"]["name"]): found for found in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
}


def pod(kind: str, name: str) -> dict:
    return OBJECTS[kind, name]["spec"]["template"]["spec"]


def test_the_servers_of_kubernetes_have_settings_and_probes_that_exist():
    (server,) = pod("StatefulSet", "rwkv-batch")["containers"]
    config = load(server["args"], {})
    assert config.drain_least_seconds == 2
    stop = config.drain_seconds + config.engine_stop_seconds
    assert stop < pod("StatefulSet", "rwkv-batch")["terminationGracePeriodSeconds"] <= stop + 15
    gets = {route.path for route in ROUTES if route.method == "GET"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["path"] in gets
    said = re.findall(rf"{PREFIX}([A-Z_]+)=", (DEPLOY / "kubernetes.yaml").read_text().replace("RWKV_BATCH_PORT=tcp", ""))
    assert {name.lower() for name in said} <= set(names())
    for kind, name in OBJECTS:
        spec = OBJECTS[kind, name]["spec"]
        if kind == "Service":
            assert any(spec["selector"] == other["spec"]["selector"]["matchLabels"] for other in OBJECTS.values()
                       if other["kind"] in ("StatefulSet", "Deployment"))  # fmt: skip


def test_haproxy_takes_the_recipe_as_kubernetes_rewrites_it(tmp_path: Path):
    """Its names cannot be looked up here, and it starts all the same."""
    haproxy = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/sbin:/usr/local/sbin")
    if haproxy is None:
        pytest.skip("haproxy is not installed")
    (container,) = pod("Deployment", "rwkv-haproxy")["containers"]
    (script,) = container["args"]
    rewrite = script.partition(" && ")[0].replace("/tmp/", f"{tmp_path}/").replace("/recipe", str(DEPLOY))
    subprocess.run(["sh", "-c", rewrite], check=True)
    text = (tmp_path / "haproxy.cfg").read_text()
    assert text.count(".rwkv-batch:8000 resolvers names") == 2 * OBJECTS["StatefulSet", "rwkv-batch"]["spec"]["replicas"]
    for config in (tmp_path / "haproxy.cfg", DEPLOY / "haproxy-cluster.cfg"):
        plain = tmp_path / "plain.cfg"
        plain.write_text(re.sub(r"^  (user|group) .*\n", "", config.read_text(), flags=re.MULTILINE))
        subprocess.run([haproxy, "-c", "-q", "-f", str(plain)], check=True)


def test_kustomize_finds_its_files():
    said = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    files = [*said["resources"], *(file for made in said["configMapGenerator"] for file in made["files"])]
    assert all((DEPLOY / name).is_file() for name in files)
