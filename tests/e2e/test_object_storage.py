"""Runs whose output_dir, model and data are at S3 URLs, against a server of the S3 protocol on this machine."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from quartet.extras.storage.store import Store

BUCKET = "s3://bucket"


class Server:
    """S3 on a port of its own, with one empty bucket; what it holds stays when it is stopped."""

    def __init__(self) -> None:
        self._port = 0
        self.start()

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._port = self._server.get_host_and_port()[1]
        self.stop = self._server.stop

    @property
    def environment(self) -> dict[str, str]:
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        address = f"http://127.0.0.1:{self._port}"
        return {**dict.fromkeys(names, "key"), "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    server = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem().mkdir("bucket")
        yield server
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def command(world: Any, processes: Any, s3: Server, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs a command on a machine of its own: its cache is all that it has."""

    def run(machine: str, *argv: object, kill: tuple[str, int] | None = None) -> tuple[int, str]:
        log = tmp_path / f"{machine}-{len(list(tmp_path.glob('*.log')))}.log"
        env = {**s3.environment, "XDG_CACHE_HOME": str(tmp_path / machine)}
        status = processes.run(*argv, cwd=world.path, output=log, kill=kill, env=env)
        return status, log.read_text()

    return run


def upload_folder(folder: Path, url: str) -> None:
    store = Store(url)
    for file in sorted(folder.iterdir()):
        store.upload(file, file.name)


def downloaded(url: str, target: Path) -> Path:
    store = Store(url)
    for name in store.list():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        store.download(name, target / name)
    return target


def whole_steps(url: str) -> list[int]:
    names = [name.split("/") for name in Store(url).list("checkpoints")]
    return [int(name[1].removeprefix("step_")) for name in names if name[2:] == ["manifest.json"]]


def test_a_run_killed_while_it_uploads_goes_on_on_another_machine(
    world: Any,
    recipes: Any,
    processes: Any,
    command: Callable[..., tuple[int, str]],
    same_run: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    """PPO with its model and prompts at URLs, too; killed in the midst of a checkpoint, and before its manifest."""
    name = "there"
    content = recipes["rl"](output_dir=f"runs/not-{name}")
    here = world.recipe("here", content)
    log = tmp_path / "here.txt"
    assert processes.run("rl", here, cwd=world.path, output=log) == 0, log.read_text()
    upload_folder(world.path / "model", f"{BUCKET}/model")
    Store(BUCKET).upload(world.path / "prompts.jsonl", "prompts.jsonl")
    url = f"{BUCKET}/runs/{name}"
    content["actor"]["model"]["path"] = f"{BUCKET}/model"
    content["data"] = {"path": f"{BUCKET}/prompts.jsonl"}
    there = world.recipe("there", {**content, "output_dir": url})

    status, told = command("first", "rl", there, kill=("upload", 3))
    assert status == -signal.SIGKILL, told
    left = Store(url).list()
    assert "owner.json" in left and "run.json" in left and whole_steps(url) == []
    assert any("checkpoints/step_00000002/" in name for name in left), "killed in the midst of a checkpoint"
    status, told = command("second", "rl", there)
    assert status == 2 and "already holds a run" in told and "--resume" in told

    status, told = command("second", "rl", there, "--resume=auto", kill=("manifest", 2))
    assert status == -signal.SIGKILL, told
    assert whole_steps(url) == [2]
    status, told = command("third", "rl", there, "--resume=auto")
    assert status == 0, told
    assert "bringing the run" in told and "nothing to resume" not in told
    assert whole_steps(url) == [4, 5]
    same_run(world.path / "runs" / f"not-{name}", downloaded(url, tmp_path / "copy"))

    status, told = command("fourth", "rl", there, "--resume=auto")
    assert status == 0 and "done" in told, told
    status, told = command("fourth", "report", url)
    assert status == 0 and told.strip().endswith(f"{url}/report.html"), told
    assert b"<html" in (Store(url).read("report.html") or b"")[:2000].lower()
    status, told = command("fourth", "generate", "--model", f"{url}/model", "--prompt", "1+2=", "--max-new-tokens", 4)
    assert status == 0 and "1+2=" in told, told
    status, told = command("fourth", "generate", "--model", url, "--prompt", "1+2=")
    assert status == 2 and f"name {url}/model" in told


def test_an_iterated_run_goes_on_on_another_machine(
    world: Any,
    recipes: Any,
    processes: Any,
    command: Callable[..., tuple[int, str]],
    same_run: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    """Killed while the first stage's checkpoint is uploaded, and before the end of the second stage."""
    url = f"{BUCKET}/runs/iterated"
    reward_model = {"steps": 2, "checkpoint": {"every_steps": 1}, "evaluation_data": None}
    rl = {"steps": 12, "rewards": [], "checkpoint": {"every_steps": 1}}
    content = {
        "rounds": 1,
        "collect": {
            "labeller": {"type": "function", "target": "rewards.py:digits"},
            "prompts_per_round": 8,
        },
        "reward_model": recipes["reward-model"](**reward_model),
        "rl": recipes["rl"]("rloo", **rl),
    }
    log = tmp_path / "here.txt"
    here = world.recipe("iterated", {**content, "output_dir": "runs/iterated"})
    assert processes.run("iterated-reward-model", here, cwd=world.path, output=log) == 0, log.read_text()
    there = world.recipe("iterated-there", {**content, "output_dir": url})
    for machine, kill in (("first", ("upload", 3)), ("second", ("finish", 1))):
        status, told = command(machine, "iterated-reward-model", there, "--resume=auto", kill=kill)
        assert status == -signal.SIGKILL, told
    status, told = command("third", "iterated-reward-model", there, "--resume=auto")
    assert status == 0 and "bringing the run" in told, told
    copy = downloaded(url, tmp_path / "copy")
    same_run(world.path / "runs" / "iterated", copy)
    for stage in ("round_1_reward_model", "round_1_rl"):
        same_run(world.path / "runs" / "iterated" / stage, copy / stage)
    status, told = command("fourth", "generate", "--model", f"{url}/model", "--prompt", "1+2=", "--max-new-tokens", 4)
    assert status == 0 and "1+2=" in told, told


def test_a_run_that_loses_its_store_goes_on_and_is_uploaded_later(
    world: Any, recipes: Any, processes: Any, command: Callable[..., tuple[int, str]], s3: Server, tmp_path: Path
) -> None:
    url, log = f"{BUCKET}/runs/lost", tmp_path / "lost.txt"
    recipe = world.recipe("lost", recipes["sft"](output_dir=url, steps=60))
    env = {**s3.environment, "XDG_CACHE_HOME": str(tmp_path / "only")}
    options: dict[str, Any] = {"cwd": world.path, "output": log, "env": env}
    run = processes.start("sft", recipe, "checkpoint.upload_timeout_s=0.5", **options)
    while not whole_steps(url):
        time.sleep(0.01)
    s3.stop()
    try:
        status, told = processes.wait(run), log.read_text()
    finally:
        s3.start()
    [draft] = (tmp_path / "only" / "quartet" / "runs").glob("*/lost")
    assert status == 2 and "lacks what the run has written last" in told and f"quartet upload {draft}" in told, told
    assert told.count("not uploaded now") <= 1
    assert json.loads((draft / "run.json").read_text())["status"] == "done"
    assert whole_steps(url)[-1] < 60 and "summary.json" not in Store(url).list()

    status, told = command("only", "upload", draft)
    assert status == 0 and url in told, told
    assert whole_steps(url)[-1] == 60
    names = {file.relative_to(draft).as_posix() for file in draft.rglob("*") if file.is_file()}
    assert {name for name in names if not name.startswith((".", "checkpoints/"))} <= Store(url).list().keys()
    status, told = command("other", "upload", downloaded(url, tmp_path / "lost"))
    assert status == 2 and "already holds a run" in told


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}, ("credentials",)),
        ({"URL": "s3://no-such-bucket/run"}, ("is not there", "make the bucket")),
    ],
    ids=["no credentials", "no bucket"],
)
def test_what_is_wrong_with_a_store_is_told_at_the_start(
    world: Any,
    recipes: Any,
    quartet: Any,
    s3: Server,
    change: dict[str, str],
    parts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    s3fs.S3FileSystem.clear_instance_cache()  # made with the variables of before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    url = change.get("URL", f"{BUCKET}/runs/wrong")
    recipe = world.recipe("wrong", recipes["sft"](output_dir=url))
    quartet("sft", recipe).expect_user_error(*parts)
    s3fs.S3FileSystem.clear_instance_cache()
