"""Foreign text that reaches a terminal or a page cannot act there."""

from __future__ import annotations

import io
import re
import sys
import unicodedata
from pathlib import Path

import pytest
import typer
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM

import quartet
from quartet.cli import main as cli
from quartet.cli.show import show_run
from quartet.config.errors import _UNSAFE, UserError, escape_control
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.observe.progress import Progress

EVERYTHING = "".join(map(chr, range(sys.maxunicode + 1)))
HOSTILE = "a\x1b[2Jb\x9b31mc\rd\u202ee\u2066f\x07g\ud800h\U000e0041i\u200bj\u2028k"
PLAIN = r"a\x1b[2Jb\x9b31mc\rd\u202ee\u2066f\x07g\ud800h\U000e0041i\u200bj\u2028k"


def test_what_acts_is_written_out_and_the_rest_stays() -> None:
    assert escape_control(HOSTILE) == PLAIN == escape_control(PLAIN)
    for harmless in ("two\nlines\tand tabs", "größer → 数学 عربي", "👩\u200d👧 نمی\u200cخواهم", "a\u00adb"):
        assert escape_control(harmless) == harmless
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    acting = {
        character
        for character in EVERYTHING
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(character) in directions
    }
    assert acting - {"\n", "\t"} <= set(_UNSAFE.findall(EVERYTHING))


def test_the_report_knows_the_same_characters() -> None:
    script = Path(quartet.__file__).with_name("extras") / "report" / "assets" / "dom.js"
    found = re.search(r"const UNSAFE = /(\[.*\])/gu;", script.read_text(encoding="utf-8"))
    assert found is not None
    pattern = re.compile(re.sub(r"\\u\{(\w+)\}", lambda match: f"\\U{int(match[1], 16):08x}", found[1]))
    assert pattern.findall(EVERYTHING) == _UNSAFE.findall(EVERYTHING)


def test_errors_hold_no_foreign_escapes() -> None:
    error = UserError("a row is bad", found=HOSTILE, remedy="mend it")
    assert PLAIN in str(error) and escape_control(str(error)) == str(error)
    assert error.found == HOSTILE, "programs see what was found as it is"


def test_errors_are_of_bounded_length() -> None:
    error = UserError("p" * 9_000, found="f" * 9_000_000, remedy="\x1b" * 9_000)
    assert len(str(error)) < 60_000 and "(9,000,000 characters)" in str(error) and len(error.found) == 9_000_000


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_prints_no_foreign_escapes(terminal: bool) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=terminal, width=200, color_system=None)) as progress:
        progress.print(HOSTILE)
        with progress.stage(f"stage {HOSTILE}", 1) as bar:
            bar.advance(1, figure=HOSTILE)
    text = out.getvalue()
    assert text.count(PLAIN) >= 3
    assert "\x1b[2J" not in text and not re.search("[\x9b\u202e\u2066\x07\ud800]", text)


def test_summaries_print_no_foreign_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alarm = {"raised": True, "text": HOSTILE}
    show_run(tmp_path, {"stages": [], "notes": [HOSTILE], "reward_hacking": alarm})
    out = capsys.readouterr().out
    assert out.count(PLAIN) == 2 and "\x1b[2J" not in out and "\u202e" not in out


@pytest.mark.parametrize("terminal", [True, False])
def test_generated_text_is_escaped_on_a_terminal_alone(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer:
        text = "\x1b[2J\u202e"

    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    for part in (Qwen2ForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path)
    monkeypatch.setattr("quartet.trainers.evaluation.generate", lambda *_, **__: [[Answer()]])
    echoed: list[str] = []
    monkeypatch.setattr(typer, "echo", lambda text, err=False: None if err else echoed.append(text))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    cli.add_plugins()
    cli.app(["generate", "--model", str(tmp_path), "--prompt", "1+1="], standalone_mode=False)
    assert echoed == [r"1+1=\x1b[2J\u202e" if terminal else "1+1=\x1b[2J\u202e"]
