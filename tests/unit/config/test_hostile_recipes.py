"""Recipes that are far larger, deeper or stranger than any recipe are refused within a second."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quartet.config.addresses import secret_in
from quartet.config.errors import UserError
from quartet.config.load import load_recipe

LIMIT_S = 1.0


@contextmanager
def quickly() -> Iterator[None]:
    """This thread's own time, without collections of what a whole suite has left in the process."""
    gc.disable()
    try:
        began = time.thread_time()
        yield
        assert time.thread_time() - began < LIMIT_S
    finally:
        gc.enable()


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(BOMB, "values, aliases written out", id="alias bomb"),
        pytest.param("base: &b {x: 1}\nseed: {<<: [" + ",".join(["*b"] * 30000) + "]}", "aliases", id="merge bomb"),
        pytest.param("a: &a [*a]", "alias *a names nothing", id="alias of itself"),
        pytest.param("[" * 90_000, "64 levels", id="deep list"),
        pytest.param("{a: " * 40_000, "64 levels", id="deep mapping"),
        pytest.param("- " * 90_000, "64 levels", id="deep block"),
        pytest.param("? " * 90_000, "64 levels", id="deep keys"),
        pytest.param("".join(f"k{i}: 1\n" for i in range(11_000)), "20000 values", id="many keys"),
        pytest.param("seed: " + "9" * 100_000, "digits, more than 300", id="long number"),
        pytest.param("seed: 1" + "_0" * 50_000, "digits, more than 300", id="long number with underscores"),
        pytest.param("a: " + "x" * 300_000, "300003 characters", id="long text"),
        pytest.param("x" * 2_000_000, "2000000 bytes", id="large file"),
        pytest.param('output_dir: "\\ud800"', "U+D800", id="half a character"),
        pytest.param('output_dir: "a\\0b"', "output_dir holds a zero byte", id="zero byte"),
        pytest.param('output_dir: "runs/a\\n"', "output_dir has a line break, or white", id="line break at the end"),
        pytest.param('output_dir: "runs/a\\nb"', "output_dir has a line break, or white", id="line break inside"),
        pytest.param("output_dir: 'runs/a '", "output_dir has a line break, or white", id="space at the end"),
        pytest.param("seed: !!timestamp 2020-01-01", "tag", id="date"),
        pytest.param("!!python/object/apply:os.system ['true']", "tag", id="object"),
        pytest.param("threads: 1000000", "threads must be less than or equal to 1024", id="threads"),
        pytest.param("train: {optim: {betas: [2, 2]}}", "betas.0 must be less than 1", id="betas"),
        pytest.param("train: {optim: {betas: [0.9]}}", "betas", id="one beta"),
    ],
)
def test_a_hostile_recipe_is_refused_quickly(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with quickly(), pytest.raises(UserError) as caught:
        load_recipe("sft", path)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    ("override", "says"),
    [
        pytest.param(".".join(["a"] * 50_000) + "=1", "deeper than any recipe", id="deep key"),
        pytest.param("seed=" + "9" * 500_000, "500000 characters", id="long number"),
        pytest.param("seed=" + "[" * 50_000, "64 levels", id="deep value"),
        pytest.param("model=&a [*a]", "alias *a", id="alias of itself"),
        pytest.param("@" + "x" * 5_000, "File name too long", id="long fragment name"),
        pytest.param("x" * 100_000, "key=value", id="no value"),
    ],
)
def test_a_hostile_override_is_refused_quickly(override: str, says: str) -> None:
    with quickly(), pytest.raises(UserError) as caught:
        load_recipe("sft", None, [override])
    assert says in str(caught.value)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("https://me:hunter2@host/x.jsonl", "a password"),
        ("s3://hunter1:hunter2@bucket/x", "a password"),
        ("sftp://me:hunter2@host:22/x", "a password"),
        ("https://hunter2@host/x", "a password"),
        ("https://host/x?X-Amz-Expires=9&X-Amz-Signature=hunter2", "a secret (X-Amz-Signature)"),
        ("https://host/x?sv=1&sig=hunter2#part", "a secret (sig)"),
        ("https://host/x?apikey=hunter2", "a secret (apikey)"),
        ("https://host/x?authToken=hunter2", "a secret (authToken)"),
        ("https://host/x?access%5Ftoken=hunter2", "a secret (access%5Ftoken)"),
        ("s3://bucket/me:hunter2@x", None),
        ("abfs://container@account.dfs.core.windows.net/x", None),
        ("https://host/x?design=3&monkey=2&AWSAccessKeyId=1#token=a", None),
        ("me:hunter2@x?token=a", None),
    ],
)
def test_a_secret_in_a_url_is_neither_saved_nor_repeated(url: str, secret: str | None) -> None:
    places = ["data.path", "model.path", "model.tokenizer", "output_dir"]
    assert secret_in(url) == secret
    for place in places if secret else []:
        with pytest.raises(UserError, match="would be saved with the run") as caught:
            load_recipe("sft", None, ["model.path=m", "data.path=d", f"{place}={url}"])
        assert f"{place.rpartition('.')[2]} is a URL with {secret}" in str(caught.value)
        assert "hunter" not in str(caught.value)
