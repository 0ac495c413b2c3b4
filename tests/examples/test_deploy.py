"""The contents of `examples/deploy/`, run as far as one machine goes: with the tools of their own ecosystems if these
are here, else with a stand-in for the scheduler only. CI runs the linters too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pccl.status import Course, Finding, LinkTraffic, MemberStatus, PeerTraffic, RunStatus, Totals
from pccl.web.prometheus import exposition
from tests.conftest import Command
from tests.support.streams import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
SUMS = "[ 6. 10. 14. 18.] is the sum over 4 peers"


def _run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PCCL_")}
    # What the scripts call `python` and `pccl` is what runs here.
    clean["PATH"] = f"{Path(sys.executable).parent}:{clean['PATH']}"
    return subprocess.run(
        command, capture_output=True, text=True, timeout=2 * TIMEOUT_S, cwd=ROOT, env={**clean, **environment}
    )


def _executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_grafana_board_shows_metrics_that_exist() -> None:
    link = LinkTraffic(2, 1, 1.0)
    member = MemberStatus(
        *(1, "vm:1", 0, "h:1", "accepted", 1.0), traffic=PeerTraffic(links=[link]), figures={"step": 1.0, "loss": 1.0}
    )
    run = RunStatus("r", 1, "1", 1.0, 5.0, 1, False, [], [member], Totals(), Course(1.0, []), [], [])
    run = msgspec.structs.replace(run, findings=[Finding("straggler", 1, 0, "", 1.0)])
    exported = exposition(run)[1].decode()
    known = {
        name: set(re.findall(r'(\w+)="', labels)) for name, labels in re.findall(r"^(pccl_\w+)(.*)$", exported, re.M)
    }
    board = json.loads((DEPLOY / "grafana" / "pccl.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"pccl_\w+", target["expr"])
            used = {*re.findall(r'(\w+)=~?"', target["expr"]), *re.findall(r"{{(\w+)}}", target["legendFormat"])}
            assert used - {"job"} <= known[name], panel["title"]
    assert len(board["panels"]) >= 10


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    units = []
    for source in sorted(DEPLOY.glob("systemd/*.service")):
        # It looks for what is to be started.
        text = (
            source.read_text().replace("/opt/pccl/bin/pccl", "/bin/true").replace("/opt/pccl/bin/python", "/bin/true")
        )
        unit = tmp_path / source.name.replace("@", "@0")
        unit.write_text(text)
        units.append(unit)
    assert len(units) == 2
    done = _run("systemd-analyze", "verify", "--man=no", *units)
    ours = [line for line in done.stderr.splitlines() if "pccl" in line and "Failed to connect" not in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_the_units_options_are_those_of_the_command(command: Command) -> None:
    unit = (DEPLOY / "systemd" / "pccl-master.service").read_text()
    (started,) = re.findall(r"^ExecStart=/opt/pccl/bin/pccl (.*)$", unit, re.MULTILINE)
    help_text = command("master", "--help").stdout
    options = set(re.findall(r"--[a-z-]+", " ".join([started, *_container_command()])))
    assert options == {"--listen", "--token-file", "--http", "--state"}
    assert all(option in help_text for option in options)


def _container_command() -> list[str]:
    text = (DEPLOY / "kubernetes" / "master.yaml").read_text()
    (args,) = re.findall(r"args: \[pccl, (.*?)\]", text, re.DOTALL)
    return [word.strip(' \n"') for word in str(args).split(",")]


@pytest.mark.slow
def test_a_slurm_job(tmp_path: Path) -> None:
    """`srun` is replaced by one that starts the tasks here; the first of them fails at first."""
    _executable(
        tmp_path / "srun",
        """#!/usr/bin/env bash
        while [[ $1 == --* ]]; do shift; done
        for SLURM_PROCID in 0 1 2 3; do SLURM_NTASKS=4 SLURM_PROCID=$SLURM_PROCID "$@" & done
        wait""",
    )
    _executable(tmp_path / "pccl", f"""#!/usr/bin/env bash\nexec {sys.executable} -m pccl "$@" """)
    command = _executable(
        tmp_path / "train",
        f"""#!/usr/bin/env bash
        [[ $PCCL_LAUNCH_INDEX != 0 || -e {tmp_path}/failed ]] || {{ touch {tmp_path}/failed; exit 3; }}
        exec {sys.executable} examples/hello.py""",
    )
    done = _run(
        "bash",
        DEPLOY / "slurm" / "train.sbatch",
        PATH=f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURMD_NODENAME="127.0.0.1",
        PCCL_COMMAND=str(command),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(SUMS) == 4
    assert "peer 0 ended with 3 for the 1. time" in done.stderr


def test_the_kubernetes_manifests_fit_together() -> None:
    yaml = pytest.importorskip("yaml")
    objects = {}
    for name in ("namespace", "master", "peers"):
        for found in yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()):
            objects[found["kind"], found["metadata"]["name"]] = found
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == ["master.yaml", "namespace.yaml", "peers.yaml"]
    assert ("Namespace", kustomization["namespace"]) in objects

    master = objects["StatefulSet", "pccl-master"]["spec"]
    peers = objects["StatefulSet", "pccl-peer"]["spec"]
    for workload in (master, peers):
        labels = workload["template"]["metadata"]["labels"]
        assert workload["selector"]["matchLabels"].items() <= labels.items()
        assert ("Service", workload["serviceName"]) in objects
    assert objects["Service", "pccl-master"]["spec"]["selector"] == master["selector"]["matchLabels"]
    assert objects["PodDisruptionBudget", "pccl-peer"]["spec"]["selector"] == peers["selector"]

    (container,) = master["template"]["spec"]["containers"]
    (claim,) = master["volumeClaimTemplates"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"][container["args"].index("--state") + 1].startswith(mounts[claim["metadata"]["name"]] + "/")

    (peer,) = peers["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in peer["env"]}
    host, port = environment["PCCL_MASTER"].split(":")
    assert {"name": "control", "port": int(port), "targetPort": "control"} in objects["Service", host]["spec"]["ports"]
    assert environment["PCCL_LAUNCH_COUNT"] == str(peers["replicas"])
    assert environment["PCCL_LISTEN"].endswith(f":{peer['ports'][0]['containerPort']}")
    (secret,) = kustomization["secretGenerator"]
    assert environment["PCCL_TOKEN"]["secretKeyRef"] == {"name": secret["name"], "key": secret["files"][0]}
    assert master["template"]["spec"]["volumes"][0]["secret"]["secretName"] == secret["name"]


def test_compose_file_fits_image_and_options(command: Command) -> None:
    yaml = pytest.importorskip("yaml")
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    found = yaml.safe_load(text)
    master, peer = found["services"]["master"], found["services"]["peer"]
    assert {mount.partition(":")[0] for each in (master, peer) for mount in each["volumes"]} == found["volumes"].keys()
    assert master["command"][:2] == ["pccl", "master"]
    help_text = command("master", "--help").stdout
    assert all(word in help_text for word in master["command"] if word.startswith("--"))
    assert (ROOT / "examples" / peer["command"][1]).exists()
    image = (DEPLOY / "kubernetes" / "Dockerfile").read_text()
    assert "WORKDIR /examples" in image
    assert "-o 10001 -g 10001 /state" in image  # a named volume has the owner of the image's folder
    example = (DEPLOY / "compose" / ".env.example").read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) == set(re.findall(r"^#?(\w+)=", example, re.MULTILINE))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kustomize_puts_the_token_and_the_image_in(tmp_path: Path) -> None:
    for source in (DEPLOY / "kubernetes").glob("*.yaml"):
        shutil.copy(source, tmp_path)
    (tmp_path / "token").write_text("secret")
    done = _run("kubectl", "kustomize", tmp_path)
    assert done.returncode == 0, done.stderr
    (secret,) = re.findall(r"^  name: (pccl-token-\w+)$", done.stdout, re.MULTILINE)
    assert len(re.findall(rf"[nN]ame: {secret}$", done.stdout, re.MULTILINE)) == 3  # itself, the master, the peers
    assert done.stdout.count("image: registry.example/pccl-training:latest") == 2


FAKE_RAY = """
import concurrent.futures, types

pool = concurrent.futures.ThreadPoolExecutor(16)
exceptions = types.SimpleNamespace(RayError=type("RayError", (Exception,), {}))
util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

def init(address=None):
    assert address is None

class remote:
    def __init__(self, function):
        self.function = function
    def options(self, *, num_cpus, scheduling_strategy, max_retries, retry_exceptions):
        assert (num_cpus, scheduling_strategy) == (1, "SPREAD")
        self.retries, self.errors = max_retries, tuple(retry_exceptions)
        return self
    def remote(self, *arguments):
        return pool.submit(self.run, *arguments)
    def run(self, *arguments):
        for left in reversed(range(self.retries + 1)):
            try:
                return self.function(*arguments)
            except self.errors:
                if not left:
                    raise

def get(future):
    return future.result()
"""


@pytest.mark.slow
def test_a_ray_job_with_a_stand_in_for_ray(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text(FAKE_RAY)
    (tmp_path / "ray" / "exceptions.py").write_text("class RayError(Exception): pass\n")
    script = tmp_path / "train.py"
    script.write_text(f"""
import os, pathlib, runpy, sys
mark = pathlib.Path({str(tmp_path)!r}, "failed")
if os.environ["PCCL_LAUNCH_INDEX"] == "0" and not mark.exists():
    mark.touch()
    sys.exit(3)
runpy.run_path({str(ROOT / "examples" / "hello.py")!r}, run_name="__main__")
""")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = _run(sys.executable, DEPLOY / "ray" / "launch.py", str(script), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(SUMS) == 4

    done = _run(sys.executable, DEPLOY / "ray" / "launch.py", "--retries", "0", "/nowhere.py", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.count("peer 0: peer 0 ended with 2") == 1
