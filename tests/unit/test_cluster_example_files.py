"""examples/cluster: batch scripts, manifests and Dockerfiles name only what there is.

No Docker engine or Kubernetes cluster is asked.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from doc_samples import check_command, commands

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
DOCKERFILES = sorted(FOLDER.glob("Dockerfile*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Slurm ----------------------------------------------------------------------------------------------------

OPTIONS = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "time": r"\d+:\d\d:\d\d",
    "output": r"[\w%.-]+",
    "open-mode": "append|truncate",
    "requeue": None,
    "signal": r"(?:[RB]:)?(?:INT|TERM|USR1)@\d+",
}
"""Options of sbatch with the form of their values; None: without one."""


def test_there_are_examples_of_each_kind() -> None:
    assert len(SCRIPTS) == 2 and len(MANIFESTS) == 2 and len(DOCKERFILES) == 2


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_batch_script_is_one(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n"), "sbatch refuses others"
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = text.splitlines()
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any("#SBATCH" in line for line in lines[first_command:]), "those behind a command do not count"
    for line in (line for line in lines if "#SBATCH" in line):
        option = re.fullmatch(r"#SBATCH --([\w-]+)(?:=(\S+))?", line)
        assert option is not None and option[1] in OPTIONS, line
        form = OPTIONS[option[1]]
        assert option[2] is None if form is None else re.fullmatch(form, option[2] or ""), line
    (command,) = commands(text.replace('"$job"', "sft"))
    check_command(command, {})
    assert command[-1] == "--resume=auto", "what is requeued goes on"


STAND_IN = """
case "$(basename "$0")" in
    srun) mkdir -p run; printf '{"status": "%s"}' "$STATUS" > run/run.json; touch -d "$AGE" run/run.json
          printf '%s\\n' "$@" > srun.log; exit 1 ;;
    scontrol) if [ "$1" = show ]; then printf 'n7\\nn8\\n'; else echo "$@" > requeued; fi ;;
esac
"""


@pytest.mark.parametrize(
    ("status", "age", "requeued"),
    [
        ("interrupted", "now", True),
        ("running", "now", True),
        ("interrupted", "1 hour ago", False),
        ("failed", "now", False),
        ("done", "now", False),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_only_what_was_stopped_just_now_is_requeued(
    script: Path, status: str, age: str, requeued: bool, tmp_path: Path
) -> None:
    """With stand-ins for Slurm's commands. A start that fails leaves the run.json of the turn before."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(f"#!/bin/bash{STAND_IN}", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[7-8]", "STATUS": status, "AGE": age}
    arguments = ["sft"] * (script.stem == "slurm-supervised") + ["my recipe.yaml", "run", "steps=3"]
    done = subprocess.run(
        ["bash", str(script), *arguments],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **job},
        check=False,
    )
    assert done.returncode == 1
    assert (tmp_path / "requeued").exists() == requeued
    said = (tmp_path / "srun.log").read_text(encoding="utf-8").splitlines()
    assert "n7:20077" in said and {"my recipe.yaml", "output_dir=run", "steps=3", "--resume=auto"} <= set(said)


# KubeRay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_has_the_fields_of_its_kind(manifest: Path) -> None:
    text = manifest.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    assert content["apiVersion"] == "ray.io/v1" and content.keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec = content["spec"]
    cluster = spec["rayClusterSpec"] if content["kind"] == "RayJob" else spec
    assert Requirement(PROJECT["optional-dependencies"]["ray"][0]).specifier.contains(cluster["rayVersion"])
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())}
        assert all(each["resources"]["limits"] == each["resources"]["requests"] for each in pod["containers"])
    if content["kind"] == "RayJob":
        check_command(shlex.split(spec["entrypoint"])[1:], {})
    assert f"kubectl apply -f examples/cluster/{manifest.name}" in text


# Docker ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_and_installs_what_there_is(dockerfile: Path) -> None:
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "CMD"}
    assert re.match(r"FROM python:3\.1[1-3]-", " ".join(lines[0])) and {line[0] for line in lines} <= known
    copied = [source for line in lines if line[0] == "COPY" for source in line[1].split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    assert {"pyproject.toml", "src", PROJECT["readme"]} <= set(copied), "what the package is built from"
    installed = shlex.split(" ".join(line[1] for line in lines if line[0] == "RUN"))
    (extras,) = (word[2:-1].split(",") for word in installed if word.startswith(".["))
    assert set(extras) <= PROJECT["optional-dependencies"].keys()
    (torch,) = {word for word in installed if word.startswith("torch")}
    assert f'"{torch}"' in (ROOT / "Makefile").read_text(encoding="utf-8"), "the tested versions"
