"""Files as people have them, and every way in which they can be broken."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quartet.config.common import DataConfig
from quartet.config.errors import UserError
from quartet.data.readers import iter_rows

ROWS = [{"prompt": "a\u2028b", "n": 1}, {"prompt": "ü", "n": None}]


def read(path: Path, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(row.line, dict(row.values)) for row in iter_rows(DataConfig(path=str(path), **options))]


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json", "JSONL"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_json_lines(tmp_path: Path, ending: str, mark: bytes) -> None:
    path = tmp_path / f"rows.{ending}"
    lines = "\r\n".join(["", json.dumps(ROWS[0], ensure_ascii=False), "  ", json.dumps(ROWS[1]), ""])
    path.write_bytes(mark + lines.encode())
    assert read(path) == [(2, ROWS[0]), (4, ROWS[1])]


def test_csv_and_tsv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt, n\r\n"two\r\nlines, ""quoted""",1\r\n\r\nx,\r\n', encoding="utf-8", newline="")
    assert read(path) == [(3, {"prompt": 'two\r\nlines, "quoted"', "n": "1"}), (5, {"prompt": "x", "n": ""})]
    path = tmp_path / "rows.tsv"
    path.write_text("prompt\tn\na,b\t1\n")
    assert read(path) == [(2, {"prompt": "a,b", "n": "1"})]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert read(path) == [(1, ROWS[0]), (2, ROWS[1])]
    path.write_bytes(b"not parquet")
    with pytest.raises(UserError, match="cannot be read"):
        read(path)


@pytest.mark.parametrize("rows_per_group", [500, 10_000])
def test_a_parquet_file_is_never_in_memory_as_a_whole(rows_per_group: int, tmp_path: Path) -> None:
    """pyarrow reads all of it beforehand, or all of a row group, unless told not to."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = random.Random(0)
    table = pyarrow.Table.from_pylist([{"prompt": draw.randbytes(1000).hex()} for _ in range(10_000)])
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=rows_per_group, use_dictionary=False)
    del table
    before, most = pyarrow.total_allocated_bytes(), 0
    for _ in iter_rows(DataConfig(path=str(tmp_path / "rows.parquet"))):
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert (tmp_path / "rows.parquet").stat().st_size > 10e6 and most < 5e6


ROW = {"prompt": "p", "answer": "a"}


def test_a_directory_goes_through_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert read(tmp_path / "set") == [(1, {"prompt": "a"}), (2, {"prompt": "b"})]
    with pytest.raises(UserError, match="split 'tets'"):
        read(tmp_path / "set", split="tets")


def test_splits_slices_and_configurations(tmp_path: Path) -> None:
    """A data set in a directory, with two configurations and a split of its own."""
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main.jsonl}\n"
        "  - {split: held, path: held.jsonl}\n- config_name: other\n  data_files: other.jsonl\n---\n"
    )
    for name in ("main", "held", "other"):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name} {n}"}}\n' for n in range(10)))

    def prompts(**options: Any) -> list[str]:
        return [values["prompt"] for _, values in read(folder, **options)]

    assert prompts(config="main") == [f"main {n}" for n in range(10)]
    assert prompts(config="other", split="train[:3]") == ["other 0", "other 1", "other 2"]
    assert prompts(config="main", split="held[80%:]", limit=1) == ["held 8"]
    assert len(prompts(config="main", split="train+held")) == 20
    for options, found in (
        ({}, "Config name is missing"),
        ({"config": "mian"}, "config 'mian'"),
        ({"config": "main", "split": "test"}, "split 'test'"),
        ({"config": "main", "split": "train[:x]"}, "split 'train[:x]'"),
    ):
        with pytest.raises(UserError) as caught:
            prompts(**options)  # type: ignore[arg-type]
        assert found in caught.value.found, caught.value.found


def test_what_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = list(iter_rows(DataConfig(path="org/set", config="main", split="train[:1000]")))
    assert asked == [(("org/set",), {"name": "main", "split": "train[:1000]"})]
    assert [row.place for row in rows] == ["org/set:1", "org/set:2"]


def test_limit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\nbroken\n')
    assert read(path, limit=2) == [(1, {"a": 1}), (2, {"a": 2})]


@pytest.mark.parametrize(
    ("name", "content", "problem", "found"),
    [
        ("r.jsonl", b'{"a": 1}\n\n{"a": \n', "not valid JSON", "r.jsonl:3: Expecting value: '{\"a\":'"),
        ("r.jsonl", b'{"a": 1}\n[1]\n', "not an object", "r.jsonl:2: '[1]'"),
        ("r.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "not UTF-8", "r.jsonl:2"),
        ("r.json", b'[{"a": 1},\n {"a" 2}]', "not valid JSON", "r.json:2"),
        ("r.json", b'[{"a": 1}\n {"a": 2}]', "not valid JSON", "r.json:2: Expecting ',' delimiter"),
        ("r.json", b'[{"a": 1},\n 7]', "not an object", "r.json:2: '7'"),
        ("r.json", b'[{"a": 1}', "not valid JSON", "r.json:1"),
        ("r.json", b'[{"a": 1}]\n[2]', "not valid JSON", "r.json:2: Extra data"),
        ("r.csv", b"a,b\n1,2\n3\n", "one cell per column", "r.csv:3: "),
        ("r.csv", b"a,b\n1,2,3\n", "one cell per column", "r.csv:2: "),
        ("r.csv", b'a\n"1\n', "not valid CSV", "r.csv:2"),
        ("r.jsonl", b"", "no rows", "r.jsonl"),
        ("r.jsonl", b"\xef\xbb\xbf\n \n", "no rows", "r.jsonl"),
        ("r.json", b"[]", "no rows", "r.json"),
        ("r.csv", b"a,b\n", "no rows", "r.csv"),
        ("r.xlsx", b"x", "format is not known", "r.xlsx"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, problem: str, found: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(path)
    assert problem in caught.value.problem and found in caught.value.found


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"did you mean 'train\.jsonl'"):
        read(Path("trian.jsonl"))
    with pytest.raises(UserError, match="there is no such data file"):
        list(iter_rows(DataConfig(path="./nothing")))


def test_a_hub_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(name: str, split: str) -> None:
        raise ConnectionError(f"cannot reach {name}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match="neither a file here nor a data set") as caught:
        list(iter_rows(DataConfig(path="somebody/something")))
    assert "cannot reach somebody/something" in caught.value.found
