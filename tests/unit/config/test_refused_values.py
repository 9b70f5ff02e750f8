"""What a recipe refuses of values that no run can use, or that must not be saved with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config.errors import UserError
from quartet.config.load import load_recipe
from quartet.config.strict import secret_in


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param('output_dir: "a\\0b"', "output_dir holds a zero byte", id="zero byte"),
        pytest.param('output_dir: "runs/a\\n"', "output_dir has a line break, or white", id="line break at the end"),
        pytest.param("output_dir: 'runs/a '", "output_dir has a line break, or white", id="space at the end"),
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
    ("url", "secret"),
    [
        ("https://me:hunter2@host/x.jsonl", "a password"),
        ("https://hunter2@host/x", "a password"),
        ("https://host/x?X-Amz-Expires=9&X-Amz-Signature=hunter2", "a secret (X-Amz-Signature)"),
        ("https://host/x?authToken=hunter2", "a secret (authToken)"),
        ("s3://bucket/me:hunter2@x", None),
        ("abfs://container@account.dfs.core.windows.net/x", None),
        ("https://host/x?design=3&monkey=2&AWSAccessKeyId=1#token=a", None),
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
