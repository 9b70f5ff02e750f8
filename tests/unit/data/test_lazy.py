"""Demonstrations read when they are needed: the same batches as a data set in memory, in a bounded part of it."""

from __future__ import annotations

import csv
import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.config.common import DataConfig
from quartet.config.errors import UserError
from quartet.data.datasets import SFTData, TokenLimit
from quartet.data.fields import Reading
from quartet.data.formats import demonstrations
from quartet.data.lazy import JsonLinesRows, LazyDemonstrations, ListedRows, SpooledRows, stored_rows
from quartet.data.readers import read_data_rows
from quartet.text.tokenizer import TextCodec

ROWS = [{"prompt": " ".join("abcdef"[: 1 + n % 5]), "completion": " ".join("fedcba"[: 1 + n % 6])} for n in range(13)]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """One token per word: ``<e>`` 0, then a to f."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<e>", *"abcdef"])}, unk_token="<e>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<e>"))


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path / "rows.jsonl"
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows) + "\r\n", encoding="utf-8")
    return path


def _array(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path / "rows.json"
    path.write_text("\n " + json.dumps(rows, indent=1), encoding="utf-8")
    return path


def _csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path / "rows.parquet")
    return path / "rows.parquet"


@pytest.mark.parametrize("write", [_jsonl, _array, _csv, _parquet])
@pytest.mark.parametrize("limit", [None, 5])
def test_batches_are_those_of_a_data_set_in_memory(
    write: Callable[..., Path], limit: int | None, tmp_path: Path, codec: TextCodec
) -> None:
    config = DataConfig(path=str(write(tmp_path, ROWS)), limit=limit)
    rows = stored_rows(config)
    assert isinstance(rows, JsonLinesRows if write is _jsonl else SpooledRows)
    lazy = LazyDemonstrations(rows, codec, TokenLimit(99))
    whole = SFTData.build(demonstrations(read_data_rows(config)), codec, TokenLimit(99))
    assert len(lazy) == len(whole) == (limit or 13)
    assert lazy.longest == max(len(item.input_ids) for item in whole.items)
    for number in (0, 7, 3, 0):
        ours, theirs = lazy.batch(number, 4, seed=2), whole.batch(number, 4, seed=2)
        assert ours.ids == theirs.ids and torch.equal(ours.input_ids, theirs.input_ids)
        assert torch.equal(ours.token["loss_mask"], theirs.token["loss_mask"])
        assert sum(len(b.input_ids) for b in [ours]) * 9 <= lazy.most_batch_bytes(4)


@pytest.mark.parametrize("write", [_jsonl, _array, _csv, _parquet, None])
def test_a_copy_in_another_process_reads_the_rows_itself(
    write: Callable[..., Path] | None, tmp_path: Path, codec: TextCodec
) -> None:
    """It is sent what was found about the rows, not the rows, unless Python code holds them."""
    rows = [{**row, "other": f"{n} " * 5000} for n, row in enumerate(ROWS)]
    path = write(tmp_path, rows) if write is not None else None
    stored = stored_rows(DataConfig(path=str(path), limit=9)) if path is not None else ListedRows(rows[:9], "mine")
    lazy = LazyDemonstrations(stored, codec, TokenLimit(9, "skip"))
    sent = pickle.dumps(lazy)
    # Through a tokenizer of its own, as a process that was started fresh has it.
    assert len(sent) < len(pickle.dumps(codec)) + (3000 if path is not None else 200_000)
    copy = pickle.loads(sent)
    assert 0 < len(copy) == len(lazy) < 9, "rows that were left out stay so"
    for number in (5, 0, 5):
        ours, theirs = copy.batch(number, 4, seed=2), lazy.batch(number, 4, seed=2)
        assert ours.ids == theirs.ids and torch.equal(ours.input_ids, theirs.input_ids)
    if path is not None:
        elsewhere = pickle.loads(sent)
        path.unlink()
        with pytest.raises(UserError, match=r"cannot be read|is not there|no such|not found"):
            elsewhere.batch(0, 4, seed=2)


def test_rows_from_python_and_mapped_columns(codec: TextCodec) -> None:
    rows = [{"q": row["prompt"], "a": row["completion"]} for row in ROWS]
    lazy = LazyDemonstrations(
        ListedRows(rows, "mine"), codec, TokenLimit(99), Reading({"prompt": "q", "completion": "a"})
    )
    whole = LazyDemonstrations(ListedRows(ROWS, "mine"), codec, TokenLimit(99))
    assert torch.equal(lazy.batch(1, 5, 0).input_ids, whole.batch(1, 5, 0).input_ids)


class Short:
    """Reads a prompt's number, so that a test of memory is not one of a tokenizer."""

    def encode_example(self, example: Any) -> tuple[list[int], list[bool]]:
        return [int(example.prompt), 1], [False, True]


def test_memory_holds_a_few_bytes_per_row_and_not_the_file(tmp_path: Path) -> None:
    path, filler = tmp_path / "rows.jsonl", "x" * 2000
    with path.open("w") as file:
        for n in range(4000):
            file.write(json.dumps({"prompt": str(n), "completion": "y", "other": filler}) + "\n")
    config, codec = DataConfig(path=str(path)), Short()
    peaks = []
    for build in (
        lambda: LazyDemonstrations(stored_rows(config), codec, TokenLimit(9)),  # type: ignore[arg-type]
        lambda: SFTData.build(demonstrations(read_data_rows(config)), codec, TokenLimit(9)),  # type: ignore[arg-type]
    ):
        tracemalloc.start()
        data = build()
        batch = data.batch(3, 8, 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(batch) == 8 and len(data) == 4000
    assert peaks[0] < 4000 * 60 + 500_000, "60 bytes per row, and what one row and one batch need"
    assert peaks[1] > 8_000_000, "the file has 8 MB"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"prompt": "a"}', "completion"),
        ('{"prompt": "a", "completion": ""}', "is empty"),
        ("{oops", "not valid JSON"),
        ("[1]", "not an object"),
        (b'{"prompt": "\xff", "completion": "a"}', "not UTF-8"),
    ],
)
def test_a_bad_row_is_found_at_the_start_with_its_line(
    line: str | bytes, found: str, tmp_path: Path, codec: TextCodec
) -> None:
    path = tmp_path / "rows.jsonl"
    data = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n' * 6 + data + b"\n")
    with pytest.raises(UserError) as raised:
        LazyDemonstrations(stored_rows(DataConfig(path=str(path))), codec, TokenLimit(9))
    assert f"{path}:7" in raised.value.found and found in str(raised.value)


def test_long_rows_are_an_error_or_left_out(tmp_path: Path, codec: TextCodec) -> None:
    path = _jsonl(tmp_path, ROWS)
    config = DataConfig(path=str(path))
    with pytest.raises(UserError) as raised:
        LazyDemonstrations(stored_rows(config), codec, TokenLimit(9))
    whole = demonstrations(read_data_rows(config))
    with pytest.raises(UserError) as expected:
        SFTData.build(whole, codec, TokenLimit(9))
    assert str(raised.value) == str(expected.value)
    lazy = LazyDemonstrations(stored_rows(config), codec, TokenLimit(9, "skip"))
    data = SFTData.build(whole, codec, TokenLimit(9, "skip"))
    assert lazy.warnings == data.warnings and len(lazy) == len(data) < 13
    assert torch.equal(lazy.batch(0, 6, 1).input_ids, data.batch(0, 6, 1).input_ids)
    with pytest.raises(UserError, match="every sequence"):
        LazyDemonstrations(stored_rows(config), codec, TokenLimit(1, "skip"))


def test_conversions_are_reported_once_with_their_count(codec: TextCodec) -> None:
    rows = [*ROWS, {"prompt": "a", "completion": 7}, {"prompt": "b", "completion": 8}]
    (warning,) = LazyDemonstrations(ListedRows(rows, "mine"), codec, TokenLimit(99)).warnings
    assert warning.startswith("2 rows: completion was not text") and "14" in warning


def test_data_without_rows_are_refused(tmp_path: Path, codec: TextCodec) -> None:
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="no rows"):
        LazyDemonstrations(stored_rows(DataConfig(path=str(tmp_path / "rows.jsonl"))), codec, TokenLimit(9))
    with pytest.raises(UserError, match="no such data file"):
        LazyDemonstrations(stored_rows(DataConfig(path=str(tmp_path / "none.jsonl"))), codec, TokenLimit(9))
    with pytest.raises(UserError, match="no rows"):
        LazyDemonstrations(ListedRows([], "mine"), codec, TokenLimit(9))
