"""Rows that are checked when they are drawn: the same batches as of rows checked before, in bounded memory."""

from __future__ import annotations

import csv
import gc
import gzip
import json
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.config.common import DataConfig
from quartet.config.errors import UserError
from quartet.data.datasets import Mixture
from quartet.data.lazy import ConcatRows, TempFileRows
from quartet.text.tokenizer import TextCodec
from quartet.trainers.input_sources import (
    demonstration_reader,
    load_prompts,
    pair_or_judgement_reader,
    pair_reader,
    read_data,
)

NUM = 13
ROWS: list[dict[str, Any]] = [
    {
        "prompt": " ".join("abcdef"[: 1 + n % 5]) + "\n",
        "completion": " ".join("fedcba"[: 1 + n % 6]),
        "chosen": " ".join("fedcba"[: 1 + n % 4]),
        "rejected": "a a " + "b " * (1 + n % 3),
    }
    for n in range(NUM)
]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """One token per word: ``<e>`` 0, then a to f."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<e>", *"abcdef"])}, unk_token="<e>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<e>"))


def _jsonl(path: Path, rows: Iterable[dict[str, Any]] = ROWS) -> Path:
    """With a byte order mark, blank lines (a no-break space, too), a Windows line end, and none behind the last row."""
    path = path / "rows.jsonl"
    text = "\ufeff\n" + "\n \u00a0\n".join(json.dumps(row) for row in rows).replace("\n", "\r\n", 1)
    path.write_text(text, encoding="utf-8", newline="")
    return path


def _compressed(path: Path) -> Path:
    (path / "rows.jsonl.gz").write_bytes(gzip.compress(_jsonl(path).read_bytes()))
    return path / "rows.jsonl.gz"


def _array(path: Path) -> Path:
    (path / "rows.json").write_text("\n " + json.dumps(ROWS, indent=1), encoding="utf-8")
    return path / "rows.json"


def _csv(path: Path) -> Path:
    with (path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    assert '\n"' in (path / "rows.csv").read_text(), "line breaks in quotes"
    return path / "rows.csv"


def _parquet(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(ROWS), path / "rows.parquet")
    return path / "rows.parquet"


def read(config: DataConfig, codec: Any, reader: Any = demonstration_reader, room: int = 99, **options: Any) -> Any:
    return read_data(config, None, codec, room, "data", reader, **options)


@pytest.mark.parametrize("write", [_jsonl, _compressed, _array, _csv, _parquet])
@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("reader", [demonstration_reader, pair_reader])
def test_batches_do_not_depend_on_what_was_checked_before(
    write: Callable[[Path], Path], limit: int | None, reader: Any, tmp_path: Path, codec: TextCodec
) -> None:
    path = str(write(tmp_path))
    whole = read(DataConfig(path=path, limit=limit), codec, reader)
    data = read(DataConfig(path=path, limit=limit, check_rows=4), codec, reader)
    assert len(data) == len(whole) == (limit or NUM) and len(data.lengths) == 4
    (remark,) = data.warnings
    assert f"the first 4 of {limit or NUM} rows were checked" in remark and not whole.warnings
    assert list(data.items) == list(whole.items) == data.items[:] and data.items[-1] == whole.items[-1]
    for number in (0, 7, 3, 0):
        ours, theirs = data.batch(number, 4, seed=2), whole.batch(number, 4, seed=2)
        assert ours.ids == theirs.ids and torch.equal(ours.input_ids, theirs.input_ids)
        assert torch.equal(ours.token["loss_mask"], theirs.token["loss_mask"])
    assert data.seen == whole.seen and read(DataConfig(path=path, check_rows=4), codec, check_all=True).remarks == ()


def test_prompts_keep_their_ids_and_weighted_sources_their_order(tmp_path: Path, codec: TextCodec) -> None:
    sources = [{"path": str(_jsonl(tmp_path)), "weight": 3}, {"path": str(_csv(tmp_path)), "weight": 1}]
    whole = load_prompts(DataConfig(sources=sources), None, codec, 99, "data")
    data = load_prompts(DataConfig(sources=sources, check_rows=5), None, codec, 99, "data")
    assert list(data) == list(whole) and data.order == whole.order and len(whole.hashes) == 26
    assert {item.prompt_id for item in data} == {f"{p}{n}" for p in ("p", "s1p") for n in range(NUM)}
    assert data.columns == whole.columns and len(data.unchecked) == 2 and len(data.warnings) == 4
    mixture = Mixture((9, 5), (1.0, 2.0))
    drawn = [mixture.draw(3, place) for place in range(300)]
    assert len(mixture._orders) == 4, "two of each source, however many passes there are"
    assert drawn == [Mixture((9, 5), (1.0, 2.0)).draw(3, place) for place in range(300)]


def test_the_next_row_stands_for_one_that_is_left_out(tmp_path: Path, codec: TextCodec) -> None:
    """Whatever was drawn before; it is counted once, and said."""
    long = {**ROWS[0], "completion": "a " * 50}
    rows = [*ROWS[:3], long, ROWS[4], long, long, *ROWS[7:12], {**ROWS[12], "chosen": "a", "rejected": "a"}]
    config = DataConfig(path=str(_jsonl(tmp_path, rows)), check_rows=2, overlong="skip")
    data, other = read(config, codec, room=20), read(config, codec, room=20)
    assert len(data) == NUM and len(data.remarks) == 1
    lines = [int(data.items[n].place.rpartition(":")[2]) for n in (6, 3, 5, 4, 6)]
    assert lines == [int(other.items[n].place.rpartition(":")[2]) for n in (6, 3, 5, 4, 6)] == [16, 10, 16, 10, 16]
    assert "when drawn: 3 rows left out: sequence longer than 20 tokens" in data.remarks[1]
    pairs = read(config, codec, pair_reader, room=20)
    assert pairs.items[12] == pairs.items[2] and "chosen and rejected are the same" in pairs.remarks[1]
    nothing = read(
        DataConfig(path=str(_jsonl(tmp_path, [ROWS[0], long, long])), check_rows=1, overlong="skip"), codec, room=20
    )
    with pytest.raises(UserError, match="no row is left to use"):
        _ = nothing.items[2]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"prompt": "a"}', "completion"),
        ('{"prompt": "a", "completion": ""}', "is empty"),
        ('{"prompt": "a", "completion": "b b b b b b b b b"}', "longer than allowed"),
    ],
)
def test_a_bad_row_is_named_when_it_is_met(line: str, found: str, tmp_path: Path, codec: TextCodec) -> None:
    """At the start among those that are checked, else when it is drawn; other rows are not in its way."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 6 + line + "\n")
    with pytest.raises(UserError) as raised:
        read(DataConfig(path=str(path)), codec, room=9)
    later = read(DataConfig(path=str(path), check_rows=3), codec, room=9)
    assert len(later.items[5].input_ids) == 3
    with pytest.raises(UserError) as drawn:
        _ = later.items[6]
    for error in (raised.value, drawn.value):
        assert f"{path}:7" in error.found and found in str(error)


def test_rows_of_another_kind_are_named(tmp_path: Path, codec: TextCodec) -> None:
    judged = {"prompt": "a", "completion": "b", "label": True}
    config = DataConfig(path=str(_jsonl(tmp_path, [*ROWS, judged])), check_rows=4)
    data = read(config, codec, pair_or_judgement_reader)
    with pytest.raises(UserError, match="some rows hold pairs and others answers") as raised:
        _ = data.items[13]
    assert raised.value.found.endswith(":28")


# Memory --------------------------------------------------------------------------------------------------


class Short:
    """Reads a prompt's number, so that a test of memory is not one of a tokenizer."""

    tokenizer = SimpleNamespace(chat_template=None)

    def limited(self, _: int) -> Short:
        return self

    def without_end(self, text: str) -> str:
        return text

    def holds_end(self, _: str) -> bool:
        return False

    def encode_completion(self, prompt: Any, text: str) -> tuple[list[int], list[int]]:
        return [int(prompt) % 7, 1], [2] * len(text)


def _sizes(path: Path, num: int, write: str, check_rows: int) -> tuple[float, int]:
    """Bytes at the peak, and objects that the garbage collector knows, of ``num`` pairs, read and drawn."""
    pair = {"chosen": "y" * 9, "rejected": "z" * 30, "other": "x" * 300}
    rows = ({"prompt": str(n), **pair} for n in range(num))
    if write == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(list(rows)), path)
        del pyarrow
    del rows
    gc.collect()
    known = len(gc.get_objects())
    tracemalloc.start()
    data = read(DataConfig(path=str(path), check_rows=check_rows), Short(), pair_reader)
    batches = [data.batch(number, 8, seed=0) for number in range(20)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gc.collect()
    assert len(data) == num and len(batches[0]) == 16
    return peak, len(gc.get_objects()) - known


@pytest.mark.parametrize(("write", "check_rows"), [("jsonl", 300), ("parquet", 300), ("jsonl", 20_000)])
def test_memory_holds_a_few_bytes_per_row(
    write: str, check_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty times the rows, of half a kilobyte each: 8 bytes of place and 4 of order for each, and no object."""
    monkeypatch.setattr("quartet.data.lazy._IN_MEMORY", 1 << 17)
    _sizes(tmp_path / f"warm.{write}", 50, write, 300)
    few, many = (_sizes(tmp_path / f"{num}.{write}", num, write, check_rows) for num in (300, 6_000))
    assert many[1] - few[1] < 300, "none for each row"
    assert many[0] - few[0] < 5_700 * 60 + (1 << 19), "tuples of their ids alone would be 2 MB"


def test_a_spool_is_read_from_disk_and_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.data.lazy._IN_MEMORY", 1000)
    rows = [{"n": n, "text": "ü" * (n % 50)} for n in range(200)]
    spool = TempFileRows(rows)
    assert spool._file is not None and spool._waiting, "a part is written, a part waits"
    assert list(spool) == rows and spool[-1] == rows[-1] and spool[3:190:7] == rows[3:190:7]
    first, empty = TempFileRows(rows[:5]), TempFileRows[Any]()
    both = ConcatRows([spool, empty, first])
    assert len(both) == 205 and [both[n] for n in (0, 199, 200, 204)] == [rows[n] for n in (0, 199, 0, 4)]
    with pytest.raises(IndexError, match="row 205 of 205"):
        _ = both[205]

    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match="temporary file") as raised:
        TempFileRows(rows)
    assert "No space left" in raised.value.found and "TMPDIR" in raised.value.remedy
