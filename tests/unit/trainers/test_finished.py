"""An evaluation that is stopped goes on where it was: nothing that it has finished is computed again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quartet.config import Interrupted, UserError
from quartet.config.common import LogConfig, SamplingConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.evaluation import ComparisonConfig, EvalRecipe
from quartet.rollout.protocol import Completion, FinishReason
from quartet.trainers.evaluation import EvaluationResult, Evaluator
from quartet.trainers.evaluation_metrics import EvaluationCache

HOT = SamplingConfig(temperature=1.0, max_new_tokens=6)
SAMPLES = 8  # of 12 prompts: two chunks of scoring, of 64 and 32


class Stop(Exception):
    """What a test lets happen in the middle."""


class Counted:
    """A reward that notes every completion it is asked about, and fails at the ``fails_at``-th call."""

    __name__ = "counted"

    def __init__(self, fails_at: int = 0) -> None:
        self.fails_at, self.calls = fails_at, 0
        self.asked: list[tuple[str, str]] = []

    def __call__(self, prompts: list[str], completions: list[str]) -> list[float | None]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise Stop
        self.asked += zip(prompts, completions, strict=True)
        return [float(len(text)) if text else None for text in completions]


@pytest.fixture
def evaluator(tmp_path: Path, causal_lm: Any, tokenizer: Any, prompts: list[str]) -> Callable[..., Evaluator]:
    def make(name: str, reward: Any, *, resume: bool = False, **changes: Any) -> Evaluator:
        objects = {"rewards": [reward] if reward else [], "prompts": changes.pop("prompts", prompts)}
        objects["judge"] = changes.pop("judge", None)
        recipe = EvalRecipe(
            output_dir=str(tmp_path / name),
            sampling=HOT,
            samples_per_prompt=SAMPLES,
            engine=NativeEngineConfig(max_running=16),
            log=LogConfig(tensorboard=False),
            **changes,
        )
        return Evaluator(recipe, model=causal_lm(0), tokenizer=tokenizer, resume=resume, **objects)

    return make


def texts(path: Path, name: str = "answers") -> str:
    return (path / f"{name}.jsonl").read_text(encoding="utf-8")


def same_result(one: EvaluationResult, other: EvaluationResult) -> None:
    assert texts(one.path) == texts(other.path)
    assert one.metrics == other.metrics and one.figures == other.figures and one.comparison == other.comparison


def test_scores_that_are_there_are_not_asked_for_again(evaluator: Any) -> None:
    whole = evaluator("whole", Counted()).run()
    first, second = Counted(fails_at=2), Counted()
    with pytest.raises(UserError, match="raised Stop"):
        evaluator("cut", first).run()
    assert len(first.asked) == 64
    rest = evaluator("cut", second, resume=True).run()
    assert len(second.asked) == 32
    same_result(whole, rest)
    third = Counted()
    same_result(whole, evaluator("cut", third, resume=True).run())
    assert third.asked == [], "also not of one that is done"


def test_what_a_reward_left_out_is_asked_again(evaluator: Any, tmp_path: Path) -> None:
    asked = tmp_path / "asked.txt"
    (tmp_path / "moody.py").write_text(
        "import os\n"
        "def moody(completions):\n"
        f"    open({str(asked)!r}, 'a').write(f'{{len(completions)}} ')\n"
        f"    if os.path.exists({str(tmp_path / 'down')!r}) and any(len(text) > 5 for text in completions):\n"
        "        raise ValueError('down')\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    moody = {"type": "function", "target": f"{tmp_path}/moody.py:moody", "on_error": "leave_out", "batch_size": 1}
    whole = evaluator("whole", None, rewards=(moody,)).run()
    asked.write_text("")
    (tmp_path / "down").touch()
    cut = evaluator("cut", None, rewards=(moody,)).run()
    (note,) = [note for note in cut.notes if "left out" in note]
    assert len(asked.read_text().split()) == 96
    asked.write_text("")
    (tmp_path / "down").unlink()
    rest = evaluator("cut", None, rewards=(moody,), resume=True).run()
    assert f"'moody': {len(asked.read_text().split())} samples left out" in note
    assert rest.notes == ()
    same_result(whole, rest)


def test_verdicts_that_are_there_are_not_asked_for_again(
    evaluator: Any, tmp_path: Path, causal_lm: Any, tokenizer: Any
) -> None:
    causal_lm(3).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")

    class Longer:
        def __init__(self, fails_at: int = 0, unsure: str = "none") -> None:
            self.fails_at, self.unsure, self.calls, self.pairs = fails_at, unsure, 0, 0

        async def compare(self, prompts: Any, a: Sequence[str], b: Sequence[str]) -> list[float | None]:
            self.calls += 1
            if self.calls == self.fails_at:
                raise KeyboardInterrupt
            self.pairs += len(prompts)
            return [
                None if prompt == self.unsure else float((len(x) > len(y)) - (len(x) < len(y)))
                for prompt, x, y in zip(prompts, a, b, strict=True)
            ]

    compare = ComparisonConfig(model=str(tmp_path / "other"))
    whole = evaluator("whole", None, compare=compare, judge=Longer()).run()
    with pytest.raises(Interrupted):
        evaluator("cut", None, compare=compare, judge=Longer(fails_at=3)).run()
    second = Longer()
    rest = evaluator("cut", None, compare=compare, judge=second, resume=True).run()
    assert second.pairs == 2 * 32, "each in both orders"
    same_result(whole, rest)
    assert texts(whole.path, "comparison") == texts(rest.path, "comparison")

    prompt = json.loads(texts(whole.path).splitlines()[0])["prompt"]
    unsure = evaluator("unsure", None, compare=compare, judge=Longer(unsure=prompt)).run()
    assert unsure.comparison is not None and unsure.comparison.no_verdict == SAMPLES
    again = Longer()
    rest = evaluator("unsure", None, compare=compare, judge=again, resume=True).run()
    assert again.pairs == 2 * SAMPLES
    same_result(whole, rest)


def test_other_data_are_refused(evaluator: Any, prompts: list[str]) -> None:
    with pytest.raises(UserError, match="raised Stop"):
        evaluator("cut", Counted(fails_at=1)).run()
    with pytest.raises(UserError, match="has changed"):
        evaluator("cut", Counted(), resume=True, prompts=[*prompts[:-1], "1+1="]).run()
    with pytest.raises(UserError, match="--resume"):
        evaluator("cut", Counted())


def test_a_file_cut_off_anywhere_loses_its_last_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "finished" / "answers.jsonl"
    kept = EvaluationCache(path, ["p"])
    kept.keep_completions([Completion("eval.0.0", "eval.0", (1, 2), (0.0, 0.0), (0, 0), FinishReason.LENGTH)])
    kept.keep_rewards("eval.0.0", {"a": 1 / 3, "b": math.nan})
    kept.keep_preference("0", -0.5)
    kept.close()
    data = path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(data) if byte == 10]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        found = EvaluationCache(path, ["p"])
        found.close()
        lines = sum(end <= cut for end in ends)
        assert (len(found.completions), len(found.rewards), len(found.preferences)) == (
            int(lines > 1),
            int(lines > 2),
            int(lines > 3),
        )
        assert path.read_bytes() == data[: ends[max(0, lines - 1)]]
    assert found.completions["eval.0.0"].token_ids == (1, 2)
    assert found.rewards["eval.0.0"]["a"] == 1 / 3 and math.isnan(found.rewards["eval.0.0"]["b"])
    with pytest.raises(UserError, match="other prompts"):
        EvaluationCache(path, ["q"])
