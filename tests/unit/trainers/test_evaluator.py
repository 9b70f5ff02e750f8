"""`quartet eval` on tiny models: several samples, files, and one model against another."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.config.common import ModelConfig, SamplingConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.evaluation import ComparisonConfig, EvalRecipe, GradingConfig, NumberAnswer
from quartet.config.load import load_recipe
from quartet.config.rewards import JudgeReward, PairwiseJudge
from quartet.config.run import LogConfig
from quartet.rewards.source import GuardedReward
from quartet.trainers.evaluation import EvaluationModel, EvaluationResult, Evaluator
from quartet.trainers.evaluation_metrics import delete_evaluations_after, evaluation_path, write_json_lines

HOT = SamplingConfig(temperature=1.0, max_new_tokens=6)
QUIET = LogConfig(tensorboard=False)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def many_digits(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(sum(c.isdigit() for c in text) >= 3) for text in completions]


@pytest.fixture
def saved(tmp_path: Path, causal_lm: Any, tokenizer: Any) -> Callable[[int], str]:
    def save(seed: int) -> str:
        path = tmp_path / f"model-{seed}"
        causal_lm(seed).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return str(path)

    return save


@pytest.fixture
def evaluated(tmp_path: Path, causal_lm: Any, tokenizer: Any, prompts: list[str]) -> Callable[..., EvaluationResult]:
    def run(name: str, seed: int = 0, rewards: Any = (many_digits,), **changes: Any) -> EvaluationResult:
        values: dict[str, Any] = {"output_dir": str(tmp_path / name), "sampling": HOT, "log": QUIET}
        recipe = EvalRecipe(**{**values, **changes})
        model = causal_lm(seed)
        return Evaluator(recipe, model=model, tokenizer=tokenizer, rewards=rewards, prompts=prompts).run()

    return run


def test_every_sample_is_kept_with_its_scores(evaluated: Any, prompts: list[str]) -> None:
    found = evaluated("a", samples_per_prompt=4, grading=GradingConfig(pass_at=(1, 2, 4), answer=NumberAnswer()))
    rows = rows_of(found.path / "answers.jsonl")
    assert [(row["prompt"], row["sample"]) for row in rows] == [(p, r) for p in prompts for r in range(4)]
    right = [[row["rewards"]["many_digits"] for row in rows[4 * p : 4 * p + 4]] for p in range(len(prompts))]
    assert found.num_prompts == len(prompts)
    share = sum(map(sum, right)) / len(rows)
    assert 0 < share < 1, "an untrained model, so that the test sees both"
    assert found.metrics["eval/many_digits/exact_match"] == pytest.approx(share)
    assert found.metrics["eval/many_digits/pass@1"] == pytest.approx(share)
    assert found.metrics["eval/many_digits/pass@4"] == pytest.approx(sum(any(r) for r in right) / len(right))
    assert "eval/many_digits/maj@4" in found.metrics
    summary = json.loads((found.path / "summary.json").read_text())
    by_name = {row["figure"]: row for row in summary["figures"]}
    row = by_name["eval/many_digits/pass@2"]
    assert row["low"] <= row["value"] <= row["high"] and row["prompts"] == len(prompts)
    assert summary["stages"][0]["metrics"] == pytest.approx(found.metrics)


def test_samples_depend_on_seed_prompt_and_place_alone(evaluated: Any) -> None:
    """The first of several samples is the only one of a single-sample evaluation."""
    many = rows_of(evaluated("many", samples_per_prompt=3).path / "answers.jsonl")
    one = rows_of(
        evaluated("one", samples_per_prompt=1, engine=NativeEngineConfig(max_running=2)).path / "answers.jsonl"
    )
    assert [row["completion"] for row in many[::3]] == [row["completion"] for row in one]
    assert [row["completion"] for row in many[1::3]] != [row["completion"] for row in one]
    other = rows_of(evaluated("other", samples_per_prompt=1, seed=0).path / "answers.jsonl")
    assert other == one


def test_a_model_against_itself_is_always_the_same(evaluated: Any, saved: Any) -> None:
    found = evaluated("same", compare=ComparisonConfig(model=saved(0)))
    assert found.comparison is not None
    assert found.comparison.same == 12 and found.comparison.win_rate == 0.5
    assert found.metrics["eval/win_rate"] == 0.5
    rows = rows_of(found.path / "comparison.jsonl")
    assert all(row["completion"] == row["against"] and row["verdict"] == "same" for row in rows)


def test_two_models_by_a_rule(evaluated: Any, saved: Any) -> None:
    found = evaluated("two", compare=ComparisonConfig(model=saved(3), source="many_digits"), samples_per_prompt=2)
    rows = rows_of(found.path / "comparison.jsonl")
    expected = {1.0: "good", 0.0: "same", -1.0: "bad"}
    for row in rows:
        assert row["verdict"] == expected[row["rewards"]["many_digits"] - row["against_rewards"]["many_digits"]]
    counts = {name: sum(row["verdict"] == name for row in rows) for name in ("good", "same", "bad")}
    assert found.comparison is not None and len(rows) == 24
    assert (found.comparison.good, found.comparison.same, found.comparison.bad) == tuple(counts.values())
    assert counts["same"] < 24, "other weights give other answers"
    assert found.comparison.win_rate == (counts["good"] + counts["same"] / 2) / 24
    against = {figure.name: figure.value for figure in found.against}
    share = sum(row["against_rewards"]["many_digits"] for row in rows) / 24
    assert against["eval/many_digits"] == pytest.approx(share)
    assert [row["completion"] for row in rows_of(found.path / "against.jsonl")] == [row["against"] for row in rows]


def test_a_judge_behind_an_endpoint(evaluated: Any, saved: Any, serve: Any) -> None:
    """The longer answer wins, in whichever place; no reward is needed for that."""

    def verdict(body: Any) -> Any:
        shown = body["messages"][0]["content"]
        a, b = (shown.split(f"[answer {x}]\n")[1].split(f"\n[end of answer {x}]")[0] for x in "AB")
        better = "A" if len(a) > len(b) else "B" if len(b) > len(a) else "C"
        return 200, {"choices": [{"message": {"content": f"I think so. [[{better}]]"}}]}

    judge = JudgeReward(url=f"{serve(verdict).url}/v1", model="m", method=PairwiseJudge())
    found = evaluated("longer", rewards=(), compare=ComparisonConfig(model=saved(3), judge=judge))
    for row in rows_of(found.path / "comparison.jsonl"):
        ours, theirs = len(row["completion"]), len(row["against"])
        assert row["verdict"] == ("good" if ours > theirs else "bad" if theirs > ours else "same")
    assert found.comparison is not None and found.comparison.good + found.comparison.bad > 0


def test_the_first_model_is_gone_before_the_second_is_loaded(
    tmp_path: Path, saved: Any, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[weakref.ref[Any]] = []
    original = EvaluationModel.__init__

    def build(self: EvaluationModel, *arguments: Any, **objects: Any) -> None:
        gc.collect()
        assert all(model() is None for model in built), "both at once"
        original(self, *arguments, **objects)
        built.append(weakref.ref(self.packed.model))

    monkeypatch.setattr(EvaluationModel, "__init__", build)
    recipe = load_recipe(
        "eval",
        None,
        [f"model.path={saved(0)}", f"compare.model={saved(3)}", f"output_dir={tmp_path / 'out'}", "data.path=none"],
    )
    assert isinstance(recipe, EvalRecipe)
    Evaluator(recipe, prompts=prompts, rewards=[many_digits]).run()
    assert len(built) == 2


@pytest.mark.parametrize("fails", [False, True], ids=["after a run", "when the rest does not fit"])
def test_a_users_model_is_given_back(
    tmp_path: Path, causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: list[str], fails: bool
) -> None:
    """It computes with its own attention again, and the rewards' threads and connections are closed."""
    model, scorer, closed = causal_lm(), scalar_model(), []
    ids = torch.tensor([tokenizer("1+2=")["input_ids"]])
    before = model(ids).logits, scorer(ids).logits
    attention = model.config._attn_implementation, scorer.config._attn_implementation
    grading = GradingConfig(sources=("nobody",)) if fails else GradingConfig()
    recipe = EvalRecipe(output_dir=str(tmp_path / "out"), sampling=HOT, log=QUIET, grading=grading)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GuardedReward, "close", lambda self: closed.append(self.name))
        with pytest.raises(UserError) if fails else contextlib.nullcontext():
            Evaluator(recipe, model=model, tokenizer=tokenizer, rewards=[scorer, many_digits], prompts=prompts).run()
    assert (model.config._attn_implementation, scorer.config._attn_implementation) == attention
    assert torch.equal(model(ids).logits, before[0]) and torch.equal(scorer(ids).logits, before[1])
    assert closed == ["many_digits"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"compare": ComparisonConfig(model="./nowhere")}, "nowhere"),
        ({"compare": ComparisonConfig(model=".", source="digits")}, "many_digits"),
        ({"grading": GradingConfig(sources=("digits",))}, "many_digits"),
    ],
)
def test_mistakes_are_found_before_the_first_answer(
    evaluated: Any, tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(UserError) as caught:
        evaluated("wrong", **changes)
    assert part in str(caught.value)
    assert not (tmp_path / "wrong").exists()


def test_rows_survive_any_text(tmp_path: Path) -> None:
    texts = ["emoji 🎻", "lone \ud83d surrogate", "\u2028 line", 'quote " and \\ud83d', "שלום"]
    write_json_lines(tmp_path / "a" / "rows.jsonl", [{"text": text} for text in texts])
    assert [json.loads(line)["text"] for line in (tmp_path / "a" / "rows.jsonl").read_text().split("\n")[:-1]] == texts


def test_evaluations_after_a_step_are_dropped(tmp_path: Path) -> None:
    for step in (0, 50, 100, 12345678):
        write_json_lines(evaluation_path(tmp_path, step), [])
    (tmp_path / "step_notes.jsonl").write_text("")
    delete_evaluations_after(tmp_path, 50)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_00000000.jsonl",
        "step_00000050.jsonl",
        "step_notes.jsonl",
    ]
    delete_evaluations_after(tmp_path / "missing", 0)


def test_an_engine_that_reads_the_weights_itself_leaves_none_here(
    causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path
) -> None:
    causal_lm().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def evaluated(engine: NativeEngineConfig, device: str) -> list[str]:
        recipe = EvalRecipe(
            model=ModelConfig(path=str(tmp_path / "model")),
            output_dir=str(tmp_path / device),
            sampling=SamplingConfig(temperature=0.7, max_new_tokens=8),
            engine=engine,
        )
        evaluator = Evaluator(recipe, rewards=[digits], prompts=prompts)
        assert evaluator._evaluation_model is not None
        assert evaluator._evaluation_model.packed.device.type == device
        rows = (evaluator.run().path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(row)["completion"] for row in rows]

    assert evaluated(NativeEngineConfig(process=True), "meta") == evaluated(NativeEngineConfig(), "cpu")


def test_resume_makes_an_evaluation_anew(tmp_path: Path, causal_lm: Any, tokenizer: Any, prompts: Any) -> None:
    recipe = EvalRecipe(output_dir=str(tmp_path / "run"), sampling=HOT, log=QUIET)
    given: dict[str, Any] = {"tokenizer": tokenizer, "rewards": (many_digits,), "prompts": prompts}
    whole = rows_of(Evaluator(recipe, model=causal_lm(0), **given).run().path / "answers.jsonl")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "answers.jsonl").write_text('{"torn', encoding="utf-8")
    again = Evaluator(recipe, model=causal_lm(0), resume=True, **given).run()
    assert rows_of(again.path / "answers.jsonl") == whole
