"""Objects of a store, and copies of them on this machine; the store is in this process's memory."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from quartet.config import UserError
from quartet.config import plugins as config_plugins
from quartet.config.common import DataConfig
from quartet.config.strict import is_url
from quartet.data.readers import iter_rows
from quartet.extras.storage.store import Store, StoreError
from quartet.text.loading import resolve_model_directory
from quartet.trainers.run_files import output_path


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket/some/name"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is downloaded."""
    names: list[str] = []
    download = Store.download

    def counted(self: Store, name: str, file: Path) -> None:
        names.append(name)
        download(self, name, file)

    monkeypatch.setattr(Store, "download", counted)
    return names


@pytest.mark.parametrize("name", ["s3://bucket/name", "file:///tmp/x"])
def test_urls(name: str) -> None:
    assert is_url(name)


@pytest.mark.parametrize("name", ["owner/name", "~/a", "a:b", "", None])
def test_no_urls(name: object) -> None:
    assert not is_url(name)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_what_a_store_does(url: str, tmp_path: Path, kind: str) -> None:
    store = Store(url if kind == "memory" else f"file://{tmp_path}/store")
    assert store.list() == {} and store.read("a") is None
    store.write("one", b"1")
    store.write("one", b"22")
    assert store.read("one") == b"22"
    (tmp_path / "file").write_bytes(b"333")
    store.upload(tmp_path / "file", "deep/er/two")
    assert {name: entry.size for name, entry in store.list().items()} == {"one": 2, "deep/er/two": 3}
    assert list(store.list("deep/er")) == ["deep/er/two"] and store.list("dee") == {}
    store.download("deep/er/two", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"333"
    store.delete("deep/er/two", "never/there")
    assert list(store.list()) == ["one"]
    with pytest.raises(FileNotFoundError):
        store.upload(tmp_path / "gone", "gone")
    with pytest.raises(StoreError, match="is not there"):
        store.download("gone", tmp_path / "back")


def test_one_download_however_many_ask(url: str, downloads: list[str]) -> None:
    """Threads have descriptors of their own for the lock, as processes have."""
    Store(url).write("config.json", b"{}")
    Store(url).write("weights/part", b"w" * 1000)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(Store(url).local_copy())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(downloads) == ["config.json", "weights/part"] and len(set(found)) == 1
    assert (found[0] / "weights" / "part").read_bytes() == b"w" * 1000
    assert resolve_model_directory(url, "model") == str(found[0])


def test_what_has_changed_comes_again_and_what_is_gone_goes(url: str, downloads: list[str]) -> None:
    store = Store(url)
    for name in ("a", "b", "c"):
        store.write(name, b"old")
    path = Store(url).local_copy()
    store.write("a", b"new")
    store.delete("b")
    downloads.clear()
    assert Store(url).local_copy() == path and downloads == ["a"]
    assert {file.name: file.read_bytes() for file in path.glob("[!.]*")} == {"a": b"new", "c": b"old"}
    (path / "c").write_bytes(b"changed here")
    Store(url).local_copy()
    assert (path / "c").read_bytes() == b"old"


def test_an_interrupted_download_leaves_no_file_of_that_name(
    url: str, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(url).write("a", b"a")
    Store(url).write("b", b"whole")

    def cut_off(self: Store, name: str, file: Path) -> None:
        file.write_bytes((self.read(name) or b"")[:2])

    with monkeypatch.context() as patch:
        patch.setattr(Store, "download", cut_off)
        with pytest.raises(StoreError, match="did not arrive whole"):
            Store(url).local_copy()
    path = Store(url).local_copy()
    assert (path / "b").read_bytes() == b"whole" and downloads == ["b"]


def test_rows_at_a_url(url: str) -> None:
    Store(url).write("rows.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}\n')
    config = DataConfig(path=f"{url}/rows.jsonl")
    rows = list(iter_rows(config))
    assert [row.values["prompt"] for row in rows] == ["a", "b"] and rows[1].place == f"{url}/rows.jsonl:2"


def test_a_disk_that_fills_while_something_is_brought(url: str) -> None:
    Store(url).write("large", b"x" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # the system's own refusal, as of a full disk
    try:
        with pytest.raises(UserError) as caught:
            Store(url).local_copy()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "could not be written" in caught.value.problem and "too large" in caught.value.found
    assert Store(url).local_copy().joinpath("large").stat().st_size == 100_000


def test_bad_urls(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, part in ((url, "there is nothing at"), ("gs://b/x", "needs a package"), ("none://b/x", "cannot be used")):
        with pytest.raises(UserError, match=part):
            Store(name).local_copy()
    Store(url).write("run.json", b"{}")
    with pytest.raises(UserError) as caught:
        resolve_model_directory(url, "model")
    assert caught.value.remedy == f"name {url}/model, or another folder that the run has written"
    names = ("run.json", "../../../etc")
    monkeypatch.setattr(type(Store(url)._fs), "find", lambda *_, **__: {f"/bucket/some/name/{n}": {} for n in names})
    with pytest.raises(UserError, match="no path"):
        Store(url).records()


def test_without_a_plug_in_urls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_plugins, "installed_plugins", tuple)
    for read in (
        lambda: resolve_model_directory("s3://bucket/model", "model"),
        lambda: output_path("s3://bucket/run", "rl", False),
    ):
        with pytest.raises(UserError, match="nothing here serves URLs"):
            read()
