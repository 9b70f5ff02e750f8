"""What a recipe refuses of values that no run can use, or that must not be saved with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config.errors import UserError
from quartet.config.load import load_recipe


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("!!python/object/apply:os.system ['true']", "tag", id="object"),
        pytest.param("threads: 1000000", "threads must be less than or equal to 1024", id="threads"),
        pytest.param("train: {optim: {betas: [2, 2]}}", "betas.0 must be less than 1", id="betas"),
        pytest.param("train: {optim: {betas: [0.9]}}", "betas", id="one beta"),
    ],
)
def test_values_that_no_run_can_use(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_recipe("sft", path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@host/x.jsonl",
        "https://hunter2@host/x",
        "https://host/x?X-Amz-Expires=9&X-Amz-Signature=hunter2",
        "https://host/x?authToken=hunter2",
        "https://host/x?sv=1&sig=hunter2",
    ],
)
def test_a_secret_in_a_url_is_neither_saved_nor_repeated(url: str) -> None:
    for place in ["data.path", "model.path", "model.tokenizer", "output_dir"]:
        with pytest.raises(UserError, match="would be saved with the run") as caught:
            load_recipe("sft", None, ["model.path=m", "data.path=d", f"{place}={url}"])
        assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/me:hunter2@x", "abfs://container@account.dfs.core.windows.net/x", "https://host/x?design=3#token=a"],
)
def test_other_urls_are_taken(url: str) -> None:
    assert load_recipe("sft", None, ["model.path=m", f"data.path={url}"]).data.path == url  # type: ignore[union-attr]
