"""Code samples of the pages hold (the rules: tests/doc_samples.py), and what they call broken is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from doc_samples import complaints, samples

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_samples_of_a_page_hold(page: Path) -> None:
    assert complaints(page.read_text(encoding="utf-8")) == []


WHOLE = '```yaml title="mine.yaml"\njob: sft\nmodel: {path: m}\ndata: {path: d.jsonl}\n```\n'


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```yaml\nrollout: {sampling: {max_new_tokens: 5}}\n```", None),
        ("```yaml\nrollout: {sampling: {max_new_token: 5}}\n```", "unknown key 'max_new_token'"),
        ("```yaml\n- {type: length, max: many}\n```", "must be a valid integer"),
        ("<!-- sample: not checked -->\n\n```yaml\nkind: RayJob\n```", None),
        ('```yaml title="mine.yaml"\njob: sft\nmodel: {name: m}\n```', "unknown key 'name'"),
        (WHOLE + "```sh\nquartet sft mine.yaml steps=3 --resume=auto > log\n```", None),
        (WHOLE + "```sh\nquartet sft mine.yaml step=3\n```", "unknown key 'step'"),
        (WHOLE + "```sh\nquartet rl mine.yaml\n```", "is for another job"),
        ("```sh\nsrun torchrun \\\n  -m quartet rl their.yaml stepz=1\n```", "unknown key 'stepz'"),
        ("```sh\nquartet rl their.yaml output_dir=$RUN steps=$N\n```", None),
        ("```console\n$ quartet trian x.yaml\n```", "trian"),
        ("```sh\nquartet init rl --reward maths\n```", "maths"),
        ("`quartet rl x.yaml stepz=1`", "stepz"),
        ("`quartet generate`, `quartet rl …`, `quartet <job> RECIPE`", None),
        ('```python title="my.py"\ndef f(:\n```', "my.py"),
    ],
)
def test_what_does_not_hold_is_found(page: str, complaint: str | None) -> None:
    found = complaints(page)
    assert not found if complaint is None else len(found) == 1 and complaint in found[0]


RUN = [
    (page, n)
    for page in PAGES
    for n, each in enumerate(samples(page.read_text(encoding="utf-8")))
    if each.mark == "run"
]


@pytest.mark.parametrize(("page", "number"), RUN, ids=lambda value: getattr(value, "stem", str(value)))
def test_what_is_marked_to_run_runs(page: Path, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(samples(page.read_text(encoding="utf-8"))[number].text, str(page), "exec"), {"__name__": "sample"})
