"""Pages of docs/how-to that need no GPU: the files they show are written, and their commands run as they stand."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_recipes import _model, _tokenizer
from transformers import Qwen2ForCausalLM

from doc_samples import SHELL, commands, samples

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder but for a small model under the name that the pages have for theirs."""
    tokenizer = _tokenizer()
    for part in (_model(Qwen2ForCausalLM, tokenizer), tokenizer):
        part.save_pretrained(tmp_path / "Qwen" / "Qwen2.5-0.5B")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["own-data", "own-reward", "own-environment", "own-model"])
def test_a_page_works_by_copy_and_paste(name: str, folder: Path, quartet: Callable[..., Any]) -> None:
    for sample in samples((PAGES / f"{name}.md").read_text(encoding="utf-8")):
        if sample.title:
            (folder / sample.title).write_text(sample.text, encoding="utf-8")
        for line in sample.text.splitlines() if sample.language in SHELL else ():
            for words in commands(line):
                done = quartet(*words)
                assert done.status == 0, (line, done.err)
                if words[0] == "init":
                    (folder / shlex.split(line)[-1]).write_text(done.out, encoding="utf-8")
    for run in (folder / "runs").iterdir():
        assert json.loads((run / "run.json").read_text(encoding="utf-8"))["status"] == "done"
        assert (run / "model" / "config.json").exists()
