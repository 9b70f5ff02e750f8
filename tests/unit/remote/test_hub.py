"""Models of the hub against a stand-in: what is fetched, once per machine, offline; what is pushed; every refusal."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from huggingface_hub import constants

from hub_server import Hub
from quartet.config import UserError
from quartet.remote.hub import current_commit, download_model, pin_revision, upload_folder

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": b"weights",
    "README.md": b"---\nlicense: mit\n---\n",
    "consolidated.safetensors": b"the same once more",
    "onnx/model.onnx": b"another",
    "original/part.safetensors": b"another",
}
SHOWN = {"config.json", "tokenizer.json", "model.safetensors", "README.md"}


@pytest.fixture(autouse=True)
def _model(hub: Hub) -> None:
    hub.put("a/model", FILES)


def names(directory: Path) -> set[str]:
    return {file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()}


def refused(name: str) -> str:
    """The whole error of a model that cannot be had, as a traceback shows it."""
    with pytest.raises(UserError) as caught:
        download_model(name)
    return "".join(traceback.format_exception(caught.value))


# Fetching ---------------------------------------------------------------------------------------------------


def test_a_branch_a_tag_and_a_commit_are_fetched_without_what_nothing_reads(hub: Hub) -> None:
    old = hub.put("a/model", FILES | {"config.json": b'{"old": 1}'}, "v1")
    main = hub.branches["a/model"]["main"]
    assert download_model("a/model").name == download_model("a/model@main").name == main
    assert names(download_model("a/model")) == SHOWN
    assert download_model("a/model@v1").name == download_model(f"a/model@{old}").name == old
    assert (download_model("a/model@v1") / "config.json").read_bytes() == b'{"old": 1}'


def test_a_tokenizer_comes_without_weights_which_a_model_then_adds(hub: Hub) -> None:
    assert names(download_model("a/model", weights=False)) == SHOWN - {"model.safetensors"}
    assert names(download_model("a/model")) == SHOWN


def test_pickled_weights_come_where_there_are_no_others(hub: Hub) -> None:
    hub.put("a/old", {"config.json": b"{}", "pytorch_model.bin": b"w", "optimizer.bin": b"o"})
    hub.put("a/both", FILES | {"pytorch_model.bin": b"w"})
    assert names(download_model("a/old")) == {"config.json", "pytorch_model.bin"}
    assert names(download_model("a/both")) == SHOWN


def test_a_commit_that_is_there_is_not_asked_for_again(hub: Hub) -> None:
    name, remark = pin_revision("a/model")
    assert name == f"a/model@{hub.branches['a/model']['main']}" and remark is None
    hub.asked.clear()
    assert download_model(name) == download_model(name) and pin_revision(name) == (name, None)
    assert not hub.asked


PROGRAM = "import sys; from quartet.remote.hub import fetch, pin; print(fetch(pin('a/model')[0]))"


def environment(hub: Hub, tmp_path: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "shared"), **more}


def test_of_several_processes_one_downloads_and_then_none_needs_the_hub(hub: Hub, tmp_path: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment(hub, tmp_path), stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    found = {process.communicate(timeout=60)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(found) == 1
    assert hub.downloads() == dict.fromkeys(SHOWN, 1)
    hub.refusal = (500, "", "not now")
    offline = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(hub, tmp_path, HF_HUB_OFFLINE="1"),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert {offline.stdout} == found


def test_a_download_that_broke_off_is_completed(hub: Hub) -> None:
    hub.refusal, hub.refused = (404, "EntryNotFound", ""), "model.safetensors"
    assert "could not be fetched" in refused("a/model")
    commit = hub.branches["a/model"]["main"]
    partial = Path(constants.HF_HUB_CACHE) / "models--a--model" / "snapshots" / commit
    assert "model.safetensors" not in names(partial)
    hub.refusal = None
    assert names(download_model(f"a/model@{commit}")) == SHOWN


def test_a_hub_that_does_not_answer_leaves_what_the_cache_has_and_it_is_told(hub: Hub) -> None:
    found = download_model("a/model")
    hub.refusal = (503, "", "maintenance")
    name, remark = pin_revision("a/model")
    assert (
        name == f"a/model@{found.name}" and remark is not None and found.name[:12] in remark and "no answer" in remark
    )
    assert current_commit("a/model") is None


def test_offline_the_cache_is_used_and_what_it_lacks_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = download_model("a/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert download_model("a/model") == found
    assert "HF_HUB_OFFLINE" in str(pin_revision("a/model")[1])
    (found / "model.safetensors").unlink()
    for name in ("a/model", f"a/model@{found.name}", "a/other"):
        text = refused(name)
        assert "HF_HUB_OFFLINE (True)" in text and "hf download a/" in text, name
    assert not hub.asked


# Refusals ---------------------------------------------------------------------------------------------------


def test_a_gated_model_says_what_to_do_and_shows_no_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("a/model")
    text = refused("a/model")
    assert f"accept its licence at {hub.url}/a/model" in text and "hf auth login" in text
    assert "nobody is logged in" in text
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    text = refused("a/model")
    assert "a token is set" in text and "hf_of_somebody" not in text
    hub.refusal = (403, "", "hf_of_somebody lacks the scope")
    assert "hf_of_somebody" not in refused("a/model")
    hub.refusal = None
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert names(download_model("a/model")) == SHOWN


@pytest.mark.parametrize(
    ("name", "problem", "remedy"),
    [
        ("a/model@v9", "has no revision 'v9'", "branch, a tag or a whole commit"),
        ("a/missing", "the hub does not give a/missing to you", "give its directory"),
        ("a/mo del", "this is no name of the hub", "owner/name"),
    ],
)
def test_what_the_hub_lacks_is_told_apart(name: str, problem: str, remedy: str) -> None:
    text = refused(name)
    assert problem in text and remedy in text


def test_a_hub_that_is_down_or_not_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.refusal = (500, "", "broken")
    assert "could not be fetched" in refused("a/model")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    text = refused("a/model")
    assert "could not be fetched" in text and "http://127.0.0.1:9" in text and "Connect" in text


# Pushing ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name in SHOWN:
        (made / name).write_bytes(FILES[name])
    return made


def test_a_folder_is_pushed_whole_into_a_repository_that_is_made(hub: Hub, folder: Path) -> None:
    address = upload_folder(folder, "me/mine", private=True, token="hf_written_nowhere", message="First")
    assert address == f"{hub.url}/me/mine/commit/1"
    assert hub.sent["me/mine"]["main"] == {name: FILES[name] for name in SHOWN}
    assert hub.created[0]["visibility"] == "private"
    assert hub.tokens == {"Bearer hf_written_nowhere"}


def test_a_branch_is_made_and_a_name_alone_is_the_users(hub: Hub, folder: Path) -> None:
    upload_folder(folder, "mine", revision="dpo")
    assert set(hub.sent["me/mine"]["dpo"]) == SHOWN and not hub.sent["me/mine"]["main"]


@pytest.mark.parametrize(("status", "where"), [(401, ""), (403, "commit"), (412, "commit"), (503, "preupload")])
def test_a_push_that_is_refused_loses_nothing(hub: Hub, folder: Path, status: int, where: str) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub.refusal, hub.refused = (status, "", "hf_very_secret is not enough"), where
    with pytest.raises(UserError) as caught:
        upload_folder(folder, "me/mine", token="hf_very_secret")
    text = "".join(traceback.format_exception(caught.value))
    assert f"the model is whole in {folder}" in text and str(status) in caught.value.found
    assert "hf_very_secret" not in str(caught.value)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    hub.refusal = None
    upload_folder(folder, "me/mine")
    assert set(hub.sent["me/mine"]["main"]) == SHOWN


def test_a_push_without_a_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="could not be uploaded"):
        upload_folder(folder, "me/mine")
