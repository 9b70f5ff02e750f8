"""Runs at a URL: what is in the store after a failure at any point, who may write there, what a resume finds."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from quartet.config import UserError
from quartet.config.recipe import CheckpointConfig, LogConfig, SFTRecipe
from quartet.extras.storage import remote_run
from quartet.extras.storage.remote_run import RemoteRun, upload_run
from quartet.extras.storage.store import Store, StoreError
from quartet.train.checkpoint import begin_checkpoint, complete_checkpoint, write_share
from quartet.trainers.run import RunDirectory
from quartet.trainers.run_files import completed_run, output_path
from saved_states import save as save_state
from saved_states import saved

URL = "memory://bucket/run"
RECIPE = SFTRecipe(
    log=LogConfig(tensorboard=False), steps=4, output_dir=URL, checkpoint=CheckpointConfig(upload_timeout_s=5)
)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    monkeypatch.setattr(remote_run, "_EVERY_S", 0.05)
    monkeypatch.setattr(remote_run, "_AGAIN_S", 0.05)
    move_to("first", monkeypatch, tmp_path)
    fsspec.filesystem("memory").store.clear()
    yield Store(URL)
    fsspec.filesystem("memory").store.clear()


def move_to(machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))


class Told(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)

    def has(self, part: str) -> int:
        return sum(part in text for text in self)


def opened(resume: Any = False, told: Told | None = None, recipe: SFTRecipe = RECIPE) -> RunDirectory:
    path = output_path(recipe.output_dir, "sft", resume)
    return RunDirectory(path, recipe, resume=resume, tell=told if told is not None else Told())


def save(run: RunDirectory, step: int, content: str = "") -> None:
    run.tracker.log(step, {"loss/sft": float(step)})
    save_state(run, step, {"x": step, "y": content})
    run.drain()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def whole(store: Store) -> list[int]:
    return [int(n.split("/")[1][5:]) for n in store.list("checkpoints") if n.endswith("/manifest.json")]


def train(steps: tuple[int, ...], resume: Any = False, told: Told | None = None) -> list[float]:
    """A run that saves after each of the steps; its metrics before."""
    with opened(resume, told) as run:
        found = run.latest()
        run.start(found.step if found is not None else 0)
        for step in steps:
            save(run, step)
            until(lambda step=step: step in whole(Store(URL)))
        rows = (run.path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["step"] for row in rows]


def test_everything_is_in_the_store_and_another_machine_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = Told()
    train((1, 2, 3), told=told)
    assert whole(store) == [2, 3], "as many as checkpoint.keep says"
    assert json.loads(store.read("run.json") or b"")["status"] == "done"
    assert told.has(f"uploaded to {URL}") == 1
    names = store.list()
    assert {"recipe.yaml", "metrics.jsonl", "spans.jsonl", "owner.json"} <= names.keys()
    assert {Path(name).name for name in names if Path(name).name.startswith(".")} == {".metadata"}

    move_to("second", monkeypatch, tmp_path)
    assert train((4,), resume=True, told=told) == [1, 2, 3, 4]
    assert whole(store) == [3, 4]
    view = Store(URL).records()
    assert (view / "metrics.jsonl").read_bytes() == store.read("metrics.jsonl") and not (view / "checkpoints").exists()


def test_a_second_run_is_refused_unless_it_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train((1,))
    for machine in ("first", "second"):
        move_to(machine, monkeypatch, tmp_path)
        with pytest.raises(UserError) as caught:
            opened()
        assert "already holds a run" in caught.value.problem and str(os.getpid()) in caught.value.found
        assert "--resume" in caught.value.remedy
    with pytest.raises(UserError, match="another recipe"), opened(True, recipe=RECIPE.model_copy(update={"seed": 7})):
        pass
    Store("memory://bucket/other").write("notes.txt", b"mine")
    with pytest.raises(UserError, match="not empty and holds no run"):
        opened(recipe=RECIPE.model_copy(update={"output_dir": "memory://bucket/other"}))


def test_a_run_that_was_taken_over_ends_and_writes_nothing_more(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="another process's now") as caught, opened() as former:
        former.start(0)
        save(former, 1)
        until(lambda: whole(store) == [1])
        move_to("second", monkeypatch, tmp_path)
        with opened(True) as run:
            assert run.latest() is not None
            run.start(1)
            save(run, 2, "ours")
            until(lambda: whole(store) == [1, 2])
            ours = store.read("checkpoints/step_00000002/manifest.json")
            for step in (2, 3, 4):
                save(former, step, "theirs")
                time.sleep(0.1)
    assert str(former.path) in caught.value.remedy
    assert whole(store) == [1, 2] and store.read("checkpoints/step_00000002/manifest.json") == ours


def test_what_another_machine_has_written_since_decides_and_nothing_here_is_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train((1, 2))
    shutil.copytree(output_path(URL, "sft", False), tmp_path / "kept")
    move_to("second", monkeypatch, tmp_path)
    train((3,), resume=True)
    move_to("first", monkeypatch, tmp_path)
    told = Told()
    assert train((4,), resume=True, told=told) == [1, 2, 3, 4]
    [aside] = output_path(URL, "sft", False).parent.glob("run.aside-*")
    assert told.has(str(aside)) == 1
    assert (aside / "metrics.jsonl").read_bytes() == (tmp_path / "kept" / "metrics.jsonl").read_bytes()
    # Where nobody else has written, the directory here is taken as it is, what was not uploaded too.
    told.clear()
    train((), resume=True, told=told)
    assert not told.has("bringing")


@pytest.mark.parametrize("deleted", ["*", "checkpoints/step_00000002"])
def test_what_was_deleted_here_is_brought_again(store: Store, deleted: str) -> None:
    """As by ``rm -rf DIRECTORY/*``, which leaves hidden files: the run in the store does not begin anew."""
    train((1, 2))
    for entry in output_path(URL, "sft", False).glob(deleted):
        if not entry.name.startswith("."):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    told = Told()
    assert train((3,), resume=True, told=told) == [1, 2, 3] and whole(store) == [2, 3]
    assert told.has("bringing") == 1 and told.has("aside") == (deleted != "*")


class Failing:
    """After ``number`` calls a method of stores fails; of an upload half arrives, where the store is so simple."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, number: int) -> None:
        self.has_failed, calls, original = False, 0, getattr(Store, method)

        def call(store: Store, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls <= number:
                return original(store, *args, **kwargs)
            if method == "upload" and not self.has_failed:
                store._fs.pipe_file(store._path(args[1]), args[0].read_bytes()[:-1])
            self.has_failed = True
            raise StoreError("no", found="nothing", remedy="none")

        monkeypatch.setattr(Store, method, call)


@pytest.mark.parametrize("method", ["upload", "write", "delete"])
def test_a_failure_of_any_call_leaves_no_checkpoint_that_is_not_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    """The machine is lost with the call that fails; what counts then is whole, and can be gone on with."""
    for number in range(100):
        fsspec.filesystem("memory").store.clear()
        move_to(f"{number}", monkeypatch, tmp_path)
        run = opened()
        run.path.mkdir(parents=True)
        run.remote.restore(False)
        assert isinstance(run.remote, RemoteRun)
        run.remote.claim(upload=False)
        with monkeypatch.context() as patch, contextlib.suppress(StoreError):
            failing = Failing(patch, method, number)
            for step in (1, 2, 3):
                (run.path / "run.json").write_text("{}")
                (run.path / "metrics.jsonl").write_text("{}\n" * step)
                write_checkpoint(run, step)
                run.remote.push()
        move_to(f"{number}-other", monkeypatch, tmp_path)
        told = Told()
        other = opened(True, told)
        other.path.mkdir(parents=True)
        other.remote.restore(True)
        assert not told.has("damaged"), told
        steps = other.saved_steps()
        assert steps == whole(store)[-1:]
        if steps:
            found = other.latest()
            assert found is not None and saved(found) == {"x": steps[0]}
        if not failing.has_failed:
            assert steps == [3] and number > 2
            return
    raise AssertionError("every call fails")


def write_checkpoint(run: RunDirectory, step: int) -> None:
    draft = begin_checkpoint(run.checkpoints, step)
    complete_checkpoint(draft, {}, {"engine": write_share(draft / "engine", {"rest": {"x": step}})}, keep=2)


def test_damaged_checkpoints_of_the_store_are_passed_over(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train((1, 2))
    data = store.read("checkpoints/step_00000002/engine/__0_0.distcp") or b""
    store.write("checkpoints/step_00000002/engine/__0_0.distcp", data[:-1] + bytes([data[-1] ^ 1]))
    move_to("second", monkeypatch, tmp_path)
    told = Told()
    assert train((3,), resume=True, told=told) == [1, 3] and told.has("damaged checkpoint") == 1
    assert whole(store) == [2, 3]
    for step in (2, 3):
        store.delete(f"checkpoints/step_0000000{step}/info.json")
    move_to("third", monkeypatch, tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint in .* can be used"), opened(True):
        pass


class Outage:
    """The store is away while ``is_on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on, self.num_refused = True, 0
        read = Store.read

        def refusing(store: Store, name: str) -> bytes | None:
            if self.is_on:
                self.num_refused += 1
                raise StoreError(f"{store.url} cannot be used", found="ConnectionError", remedy="look at the network")
            return read(store, name)

        monkeypatch.setattr(Store, "read", refusing)


def test_a_store_that_is_away_is_told_once_and_gets_everything_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    with opened(told=told) as run:
        run.start(0)
        outage = Outage(monkeypatch)
        for step in (1, 2, 3):
            save(run, step)
            until(lambda before=outage.num_refused: outage.num_refused > before + 1)
        assert told.has("not uploaded now") == 1 and whole(store) == []
        outage.is_on = False
        until(lambda: whole(store) == [3])
        until(lambda: told.has("can be written to again"))
    assert told.has("not uploaded now") == 1 and told.has("can be written to again") == 1
    assert (run.path / "metrics.jsonl").read_bytes() == store.read("metrics.jsonl")


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt()])
def test_a_store_that_stays_away(store: Store, monkeypatch: pytest.MonkeyPatch, failure: BaseException | None) -> None:
    told, short = Told(), RECIPE.model_copy(update={"checkpoint": CheckpointConfig(upload_timeout_s=0.3)})
    start = time.monotonic()
    with pytest.raises(type(failure) if failure else UserError) as caught, opened(told=told, recipe=short) as run:
        run.start(0)
        outage = Outage(monkeypatch)
        save(run, 1)
        if failure is not None:
            raise failure
    assert time.monotonic() - start < 5
    text = str(caught.value) if failure is None else "\n".join(told)
    assert "lacks what the run has written last" in text
    assert f"quartet upload {run.path}" in text
    outage.is_on = False
    assert upload_run(run.path, None, told) == URL
    assert whole(store) == [1] and (run.path / "run.json").read_bytes() == store.read("run.json")


def test_a_checkpoint_that_is_deleted_here_while_it_is_uploaded_arrives(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Store.upload
    with opened() as run:
        run.start(0)

        def slow(self: Store, file: Path, name: str) -> None:
            if "step_00000001" in name and "info.json" in name:
                for step in (2, 3, 4):
                    save(run, step)
                assert run.saved_steps() == [3, 4]
            upload(self, file, name)
            if "step_00000004" in name:
                assert whole(store) == [1]

        monkeypatch.setattr(Store, "upload", slow)
        save(run, 1)
        until(lambda: whole(store) == [1, 4])
    assert whole(store) == [1, 4] and not (run.path / ".uploading").exists()


def test_a_run_that_ends_during_an_upload_is_not_called_done_before_its_model_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records were listed before there was a model; the process is lost with this upload."""
    run = opened()
    run.path.mkdir(parents=True)
    run.remote.restore(False)
    assert isinstance(run.remote, RemoteRun)
    run.remote.claim(upload=False)
    for name in ("recipe.yaml", "run.json"):
        (run.path / name).write_text('{"status": "running"}')
    upload = Store.upload

    def ends_meanwhile(self: Store, file: Path, name: str) -> None:
        upload(self, file, name)
        if name == "recipe.yaml":
            (run.path / "model").mkdir()
            (run.path / "model" / "weights").write_bytes(b"w")
            for marker in ("summary.json", "run.json"):
                (run.path / marker).write_text('{"status": "done"}')

    monkeypatch.setattr(Store, "upload", ends_meanwhile)
    run.remote.push()
    assert store.read("run.json") == b'{"status": "running"}' and store.read("summary.json") is None
    run.remote.push()
    assert store.read("model/weights") == b"w"
    assert store.read("summary.json") == store.read("run.json") == b'{"status": "done"}'


def test_the_directory_here_says_which_commits_a_run_began_with(store: Store) -> None:
    """Also where the store lacks its first records, as after a kill before their upload."""
    with opened() as run:
        run.start(0)
    store.delete("run.json")
    marker = run.path / "run.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "commits": {"model.path": "owner/name@abc"}}))
    again = opened(resume=True)
    assert again._found["commits"] == {"model.path": "owner/name@abc"}


def test_runs_that_are_done_and_runs_that_were_local(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    local = RECIPE.model_copy(update={"output_dir": str(tmp_path / "local")})
    with RunDirectory(tmp_path / "local", local) as run:
        run.start(0)
        save(run, 1)
        (run.path / "model").mkdir()
        (run.path / "model" / "weights").write_bytes(b"w")
        (run.path / "model" / "config.json").write_text("{}", "utf-8")
        run.finish({"stages": [{"metrics": {}}]})
    with pytest.raises(UserError, match="nothing says where"):
        upload_run(tmp_path / "local", None, print)
    with pytest.raises(UserError, match="holds no run"):
        upload_run(tmp_path, URL, print)
    upload_run(tmp_path / "local", URL, print)
    assert whole(store) == [1] and store.read("model/weights") == b"w"
    done = completed_run(RECIPE, "auto")
    assert done is not None and done[1]["stages"] == [{"metrics": {}}]
    assert completed_run(RECIPE.model_copy(update={"output_dir": "memory://bucket/none"}), "auto") is None
    move_to("second", monkeypatch, tmp_path)
    with opened(True) as again:
        assert again.saved_steps() == [1] and not (again.path / "model").exists()


def test_of_two_that_start_at_once_the_first_ends_at_its_next_upload(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = opened("auto")
    move_to("second", monkeypatch, tmp_path)
    two = opened("auto")
    two.path.mkdir(parents=True)
    two.remote.restore(True)
    with pytest.raises(UserError, match="another process's now"), one:
        one.start(0)
        two.remote.claim(upload=False)
        save(one, 1)
        time.sleep(1)
