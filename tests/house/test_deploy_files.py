"""The files in `deploy/` are whole and agree with each other, and with what the holder and the training script take."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from thinwire.checkpoint.holder import metrics
from thinwire.checkpoint.holder.store import parse_bytes
from thinwire.lab.cli.main import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = ["torchrun/train.sh", "slurm/train.sbatch"]
PRIORITY, HOLDER, POLICY = yaml.safe_load_all((DEPLOY / "kubernetes/holder.yaml").read_text())
RUNTIME, JOB = yaml.safe_load_all((DEPLOY / "kubernetes/train.yaml").read_text())
SKY = yaml.safe_load((DEPLOY / "skypilot/train.yaml").read_text())
HOLDER_POD = HOLDER["spec"]["template"]["spec"]
TRAIN_POD = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
(HOLDER_CONTAINER,) = HOLDER_POD["containers"]
(TRAIN_CONTAINER,) = TRAIN_POD["containers"]
PORT = 7411


def options_of(words: list[str]) -> dict[str, Any]:
    """Let `thinwire holder` parse its words, and return its options."""
    group: Any = typer.main.get_command(app)
    assert words[:2] == ["thinwire", "holder"]
    _, command, rest = group.resolve_command(group.make_context("thinwire", list(words[1:])), list(words[1:]))
    return command.make_context("holder", rest).params


def holder_calls(script: str) -> list[list[str]]:
    """Return the calls of `thinwire holder` in a script, with variables as they are, so that paths stay words."""
    text = re.sub(r"\$\{memory:\+(.*?)\}", r"\1", script.replace("\\\n", " ")).replace('"$HOLDER_PORT"', str(PORT))
    text = text.replace('"$holder_port"', str(PORT))
    found = re.findall(r"^(?!#).*?(thinwire holder [^;&|>\n']*)", text, flags=re.MULTILINE)
    return [shlex.split(call) for call in found]


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_the_objects_are_those_that_clusters_know() -> None:
    assert [(entry["apiVersion"], entry["kind"]) for entry in (PRIORITY, HOLDER, POLICY, RUNTIME, JOB)] == [
        ("scheduling.k8s.io/v1", "PriorityClass"),
        ("apps/v1", "DaemonSet"),
        ("networking.k8s.io/v1", "NetworkPolicy"),
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    ]
    assert {entry["metadata"]["namespace"] for entry in (HOLDER, POLICY, RUNTIME, JOB)} == {"train"}


def test_every_call_of_the_holder_is_parsed() -> None:
    calls = [holder_calls((DEPLOY / script).read_text()) for script in SCRIPTS]
    assert [len(found) for found in calls] == [2, 3]
    starts = [options for found in calls for options in map(options_of, found) if options["bind"] != "127.0.0.1"]
    assert [options["port"] for options in starts] == [PORT, PORT]
    assert sum(options["status"] for found in calls for options in map(options_of, found)) == 2


def test_the_holder_of_a_node_is_reachable_for_its_peers_only() -> None:
    options = options_of(HOLDER_CONTAINER["command"])
    assert options["port"] == HOLDER_CONTAINER["ports"][0]["containerPort"] == PORT
    assert options["bind"] == "$(POD_IP)", "the one that Kubernetes puts in the environment"
    assert environment(HOLDER_CONTAINER)["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    rule, monitoring = POLICY["spec"]["ingress"]
    assert options["metrics"] == f"$(POD_IP):{HOLDER_CONTAINER['ports'][1]['containerPort']}"
    assert [port["port"] for port in monitoring["ports"]] == [HOLDER_CONTAINER["ports"][1]["containerPort"]]
    assert [list(peer) for peer in monitoring["from"]] == [["namespaceSelector"]]
    assert [port["port"] for port in rule["ports"]] == [PORT]
    label = HOLDER["spec"]["template"]["metadata"]["labels"]
    assert label == HOLDER["spec"]["selector"]["matchLabels"] == POLICY["spec"]["podSelector"]["matchLabels"]
    assert [peer["podSelector"]["matchLabels"] for peer in rule["from"]] == [label]


def test_the_memory_of_a_holder_fits_its_limit() -> None:
    """Slots count as memory of the holder's control group, and it starts only if they fit."""
    limit = parse_bytes(HOLDER_CONTAINER["resources"]["limits"]["memory"].replace("Gi", "GiB"))
    assert parse_bytes(options_of(HOLDER_CONTAINER["command"])["memory_budget"]) <= limit - 2**30


def test_trainers_find_the_holder_of_their_node() -> None:
    """By a socket in a directory of the node that both mount, of one user, with one secret."""
    holder, trainer = environment(HOLDER_CONTAINER), environment(TRAIN_CONTAINER)
    assert holder["THINWIRE_HOLDER"] == trainer["THINWIRE_HOLDER"] == "/run/thinwire/holder.sock"
    assert (
        holder["THINWIRE_SECRET"]
        == trainer["THINWIRE_SECRET"]
        == {"secretKeyRef": {"name": "thinwire", "key": "secret"}}
    )
    for pod, containers in ((HOLDER_POD, HOLDER_POD["initContainers"] + HOLDER_POD["containers"]),
                            (TRAIN_POD, TRAIN_POD["containers"])):  # fmt: skip
        assert pod["volumes"][0]["hostPath"]["path"] == "/run/thinwire/" + HOLDER["metadata"]["namespace"]
        mounts = [mount for container in containers for mount in container["volumeMounts"] if mount["name"] == "socket"]
        assert {(mount["name"], mount["mountPath"]) for mount in mounts} == {
            (pod["volumes"][0]["name"], "/run/thinwire")
        }
    user = HOLDER_CONTAINER["securityContext"]["runAsUser"]
    assert user == TRAIN_POD["securityContext"]["runAsUser"]
    assert str(user) in HOLDER_POD["initContainers"][0]["command"], "who owns the directory"
    assert HOLDER_POD["nodeSelector"] == TRAIN_POD["nodeSelector"]


def test_holders_are_where_gpus_are_and_outlive_what_presses_on_the_node() -> None:
    """Tainted GPU nodes are tolerated, trainings are preempted first, and no update takes two copies of a shard."""
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert HOLDER_POD["tolerations"] == TRAIN_POD["tolerations"] == [taint]
    assert HOLDER["spec"]["updateStrategy"] == {"type": "OnDelete"}, "RollingUpdate deletes what is not ready first"
    assert HOLDER_POD["priorityClassName"] == PRIORITY["metadata"]["name"]
    for container in (*HOLDER_POD["initContainers"], HOLDER_CONTAINER):
        limits = container["resources"]["limits"]
        assert set(limits) == {"cpu", "memory"}
        assert container["resources"].get("requests", limits) == limits, "Guaranteed"


def test_probes_ask_for_what_they_mean() -> None:
    """They start no process, and nothing short of ten minutes of silence ends a holder, with all that it has."""
    ready, alive = HOLDER_CONTAINER["readinessProbe"], HOLDER_CONTAINER["livenessProbe"]
    assert [probe["httpGet"] for probe in (ready, alive)] == [
        {"path": path, "port": HOLDER_CONTAINER["ports"][1]["name"]} for path in ("/readyz", "/livez")
    ]
    assert {b"/readyz", b"/livez"} <= set(metrics._PROBES)
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 600
    *_, code = HOLDER_CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    (seconds,) = re.findall(r"monotonic\(\) \+ (\d+)", code)
    assert HOLDER_POD["terminationGracePeriodSeconds"] >= int(seconds) + 15
    assert f":{HOLDER_CONTAINER['ports'][1]['containerPort']}/readyz" in code
    compile(code, "preStop", "exec")


def test_trainers_have_shared_memory_within_a_limit() -> None:
    (shared,) = [volume["emptyDir"] for volume in TRAIN_POD["volumes"] if volume["name"] == "shm"]
    assert shared["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in TRAIN_CONTAINER["volumeMounts"]
    resources = JOB["spec"]["trainer"]["resourcesPerNode"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    sizes = [parse_bytes(size.replace("Gi", "GiB")) for size in (shared["sizeLimit"], resources["limits"]["memory"])]
    assert sizes[0] < sizes[1]


def test_nothing_is_installed_by_a_name_that_is_not_ours() -> None:
    """No registry has a package of this name from us: whoever takes it would get the secret of the job."""
    for path in [*DEPLOY.rglob("*.*"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        assert not re.search(r"pip install (-\S+ )*thinwire\b(?!\[)", path.read_text()), path
    for container in (*HOLDER_POD["initContainers"], HOLDER_CONTAINER, TRAIN_CONTAINER):
        assert re.fullmatch(r"registry\.example/\w+@sha256:DIGEST", container["image"]), "a name that nobody can have"


def test_the_job_runs_in_its_runtime() -> None:
    reference = JOB["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (RUNTIME["kind"], RUNTIME["metadata"]["name"])
    group, _ = RUNTIME["apiVersion"].split("/")
    assert reference["apiGroup"] == group
    step = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["metadata"]["labels"]
    assert step == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}, "which container gets the command"
    assert TRAIN_CONTAINER["name"] == "node"
    assert JOB["spec"]["trainer"]["command"][0] == "torchrun"


def test_the_environment_is_documented() -> None:
    """Every variable of ours that a file sets is one that thinwire reads."""
    known = set(re.findall(r"THINWIRE_\w+", (ROOT / "docs/reference/environment.md").read_text()))
    for path in DEPLOY.rglob("*.*"):
        used = set(re.findall(r"THINWIRE_[A-Z_]+", path.read_text()))
        assert used <= known, path


def test_the_training_takes_the_arguments_that_are_passed() -> None:
    """Those of the Kubernetes job, and of the calls in comments and scripts."""
    text = "\n".join(path.read_text().replace("\\\n", " ") for path in DEPLOY.rglob("*.*"))
    passed = {
        option for call in re.findall(r"deploy/train\.py([^\"\n]*)", text) for option in re.findall(r"--[\w-]+", call)
    }
    passed |= {word for word in JOB["spec"]["trainer"]["args"] if word.startswith("--")}
    assert passed >= {"--replicas", "--persistent"}
    declared = set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", (DEPLOY / "train.py").read_text()))
    assert passed <= declared
    assert (ROOT / JOB["spec"]["trainer"]["command"][1]).exists()


@pytest.mark.parametrize("script", [*SCRIPTS, "skypilot"])
def test_the_scripts_are_shell(script: str) -> None:
    text = SKY["run"] if script == "skypilot" else (DEPLOY / script).read_text()
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


STAND_INS = {
    "thinwire": """echo "thinwire $*" >> log
case "$*" in
  *--status*) [[ -f up ]] ;;
  *--stop*) rm -f up ;;
  *) touch up; while [[ -f up ]]; do sleep 0.1; done ;;
esac""",
    "torchrun": 'echo "torchrun $*" >> log; exit $RETURNS',
    "srun": 'while [[ $1 == --* ]]; do [[ $1 == --cpus* ]] && echo "srun $1" >> log; shift; done; exec "$@"',
    "getent": 'echo "10.9.9.9 STREAM $2"',
    "ip": """case "$*" in
  *address*) echo "2: ib0    inet 10.1.2.3/24 brd 10.1.2.255 scope global ib0" ;;
  *route*) echo "$4 via 10.0.0.1 dev eth0 src 10.0.0.7 uid 0" ;;
esac""",
    "scontrol": 'if [[ $1 == show ]]; then echo host-1; else echo "scontrol $*" >> log; fi',
}


@pytest.mark.parametrize(("returns", "interface", "address"), [(0, "", "10.0.0.7"), (3, "ib0", "10.1.2.3")])
def test_a_job_of_slurm_has_its_holder_and_is_requeued_if_it_fails(
    returns: int, interface: str, address: str, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for name, code in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": tmp_path.name, "SLURM_JOB_NODELIST": "host-1", "SLURM_JOB_NUM_NODES": "1"}
    slurm |= {"SLURM_CPUS_PER_TASK": "16", "GLOO_SOCKET_IFNAME": interface}
    ran = subprocess.run(
        ["bash", DEPLOY / "slurm/train.sbatch", "train.py", "--steps", "9"],
        cwd=tmp_path, env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "RETURNS": str(returns), **slurm},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    Path(f"/tmp/thinwire-{tmp_path.name}").rmdir()
    assert ran.returncode == returns, ran.stderr
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "--status" not in line]
    assert lines.count("srun --cpus-per-task=16") == 4, "every step"
    holder, launch, stop, *requeue = [line for line in lines if not line.startswith("srun")]
    assert f"--bind {address} --port {PORT}" in holder
    assert launch.endswith(f"--rdzv-endpoint host-1:29500 --rdzv-id slurm-{tmp_path.name} train.py --steps 9")
    assert stop == "thinwire holder --stop"
    assert requeue == ([f"scontrol requeue {tmp_path.name}"] if returns else [])


def test_sky_runs_the_script_of_torchrun_with_the_variables_that_it_reads() -> None:
    assert set(SKY) <= {"name", "num_nodes", "resources", "workdir", "envs", "secrets", "setup", "run", "file_mounts"}
    assert SKY["secrets"] == {"THINWIRE_SECRET": None}, "asked for at launch, never in the file"
    script = (DEPLOY / "torchrun/train.sh").read_text()
    exported = set(re.findall(r"(?:export | )([A-Z]+)=", SKY["run"])) | set(SKY["envs"])
    assert exported == {"ADDRESS", "HEAD", "NODES", "PROCESSES", "RUN"}
    assert all(f"${{{name}:-" in script for name in exported)
    assert "deploy/torchrun/train.sh deploy/train.py" in SKY["run"]


def test_no_secret_is_in_a_file() -> None:
    for path in DEPLOY.rglob("*.*"):
        assert not re.search(r"[0-9a-f]{32}", path.read_text()), path


def test_the_scripts_of_python_compile() -> None:
    for path in DEPLOY.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")
