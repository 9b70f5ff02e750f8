"""Callbacks: when they are called, how they end a run, and what their errors say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.config.common import CheckpointConfig
from quartet.config.logs import CallbackConfig, LogConfig
from quartet.config.preference import PreferenceRecipe
from quartet.config.recipe import SFTRecipe
from quartet.observe.callbacks import Callback
from quartet.observe.trackers import read_metrics
from quartet.trainers.preference import PreferenceTrainer
from quartet.trainers.supervised import SFTTrainer

QUIET = LogConfig(tensorboard=False)


class Notes(Callback):
    """Notes every call, and asks for the end at ``point`` of ``step``."""

    def __init__(self, point: str = "", step: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stop = (point, step)

    def _note(self, point: str, step: int = 0) -> None:
        self.calls.append((point, step) if step else (point,))
        if (point, step) == self.stop:
            self.control.should_stop = True

    def on_train_begin(self) -> None:
        self._note("begin")

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("step", step)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        assert all(name.startswith(("eval/", "sft/", "alarm/")) for name in metrics)
        self._note("evaluate", step)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert read_metrics(self.control.path / "metrics.jsonl")[-1]["step"] == step
        with pytest.raises(TypeError):
            metrics["loss/sft"] = 1.0  # type: ignore[index]
        self._note("log", step)

    def on_save(self, step: int, path: Path) -> None:
        assert (path / "manifest.json").is_file()
        self.calls.append(("save", step))

    def on_train_end(self) -> None:
        assert (self.control.path / "summary.json").is_file() and (self.control.path / "model").exists()
        self._note("end")

    def on_exception(self, error: BaseException) -> None:
        self.calls.append(("exception", type(error).__name__))


@pytest.fixture
def sft(causal_lm: Any, tokenizer: Any, demonstrations: Any, tmp_path: Path) -> Any:
    def make(name: str, *callbacks: Callback, resume: bool = False, **changes: Any) -> SFTTrainer:
        values: dict[str, Any] = {
            "threads": 1, "steps": 5, "examples_per_step": 6, "evaluate_every_steps": 2, "log": QUIET,
            "checkpoint": CheckpointConfig(every_steps=2, background=False), "output_dir": str(tmp_path / name),
        }  # fmt: skip
        return SFTTrainer(
            SFTRecipe(**{**values, **changes}),
            model=causal_lm(),
            tokenizer=tokenizer,
            rows=demonstrations,
            evaluation_rows=demonstrations[:4],
            callbacks=callbacks,
            resume=resume,
        )

    return make


def test_the_points_of_a_run_in_their_order(sft: Any) -> None:
    notes = Notes()
    sft("run", notes).train()
    assert notes.calls == [
        ("begin",),
        *[("step", 1), ("log", 1)],
        *[("step", 2), ("evaluate", 2), ("log", 2), ("save", 2)],
        *[("step", 3), ("log", 3)],
        *[("step", 4), ("evaluate", 4), ("log", 4), ("save", 4)],
        *[("step", 5), ("evaluate", 5), ("log", 5), ("save", 5)],
        ("end",),
    ]


@pytest.mark.parametrize("point", ["step", "log"])
def test_a_stopped_run_ends_as_others_do_and_can_go_on(point: str, sft: Any, untimed: Any, tmp_path: Path) -> None:
    whole = sft("whole").train()
    notes = Notes(point, 3)
    stopped = sft("stopped", notes).train()
    path = tmp_path / "stopped"
    ended = [("step", 3), ("evaluate", 3), ("log", 3), ("save", 3), ("end",)]
    assert notes.calls[-5:] == ended if point == "step" else notes.calls[-3:] == ended[-3:]
    assert json.loads((path / "run.json").read_text())["status"] == "done"
    assert "Notes ended the run after step 3 of 5" in stopped.summary["notes"]
    again = Notes()
    resumed = sft("stopped", again, resume=True).train()
    assert again.calls[:2] == [("begin",), ("step", 4)] and again.calls[-1] == ("end",)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert [row["step"] for row in untimed(path)] == [1, 2, 3, 4, 5]


def test_an_error_in_a_callback_names_it_and_the_others_hear_of_it(sft: Any, tmp_path: Path) -> None:
    class Faulty(Callback):
        def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 3:
                raise KeyError("loss/sftt")

        def on_exception(self, error: BaseException) -> None:
            raise RuntimeError("this one, too")

    notes = Notes()
    with pytest.raises(UserError, match="the callback Faulty failed in on_log") as caught:
        sft("run", notes, Faulty()).train()
    assert "KeyError: 'loss/sftt'" in caught.value.found and isinstance(caught.value.__cause__, KeyError)
    assert notes.calls[-1] == ("exception", "UserError")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    with pytest.raises(UserError, match="derive the class from it"):
        sft("other", Notes)
    assert not (tmp_path / "other").exists()


def test_a_recipe_names_callbacks(sft: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from quartet import Callback\n"
        "class Stop(Callback):\n"
        "    def __init__(self, after):\n"
        "        self.after = after\n"
        "    def on_step_end(self, step, metrics):\n"
        "        self.control.should_stop = step >= self.after\n"
    )
    target = f"{tmp_path / 'mine.py'}:Stop"
    result = sft("run", callbacks=(CallbackConfig(target=target, options={"after": 2}),)).train()
    assert "Stop ended the run after step 2 of 5" in result.summary["notes"]
    with pytest.raises(UserError, match="cannot be made"):
        sft("other", callbacks=(CallbackConfig(target=target, options={"befor": 2}),))


def test_preference_training_takes_callbacks(causal_lm: Any, tokenizer: Any, pairs: Any, tmp_path: Path) -> None:
    values = {"threads": 1, "steps": 3, "log": QUIET, "output_dir": str(tmp_path / "run"), "pairs_per_step": 4}
    objects = {"model": causal_lm(), "tokenizer": tokenizer, "rows": pairs}
    notes = Notes("step", 1)
    PreferenceTrainer(PreferenceRecipe(**values), **objects, callbacks=[notes]).train()
    assert notes.calls == [("begin",), ("step", 1), ("log", 1), ("save", 1), ("end",)]


AHEAD = {
    "type": "asynchronous",
    "max_staleness": 1,
    "pools": {"rollout": {"roles": ["rollout"]}, "rest": {"roles": ["actor"]}},
}


@pytest.mark.parametrize("placement", [None, AHEAD], ids=["one after the other", "asynchronous"])
def test_rl_ends_early_and_goes_on(placement: Any, tiny_rl: Any, digits: Any, tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n')
    held_out = {"data": {"path": str(tmp_path / "held_out.jsonl")}, "every_steps": 5}
    values: dict[str, Any] = {
        "algorithm": {"name": "grpo"} if placement is None else {"name": "grpo", "off_policy": {}, "kl": {"coef": 0.0}},
        "evaluation": {**held_out, "sampling": {"max_new_tokens": 5}},
        **{"steps": 4, "prompts_per_step": 4, "responses_per_prompt": 2, "placement": placement},
    }
    notes = Notes("step", 2)
    result = tiny_rl(tmp_path / "run", digits, callbacks=[notes], **values).train()
    assert notes.calls[:2] == [("begin",), ("evaluate",)]
    assert notes.calls[-5:] == [("step", 2), ("evaluate", 2), ("log", 2), ("save", 2), ("end",)]
    assert "Notes ended the run after step 2 of 4" in result.summary["notes"]
    assert sorted(p.name for p in (tmp_path / "run" / "rollouts").iterdir())[-1] == "step_000002.jsonl.gz"
    resumed = tiny_rl(tmp_path / "run", digits, resume=True, **values).train()
    assert [row["step"] for row in read_metrics(resumed.path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    if placement is None:
        whole = tiny_rl(tmp_path / "whole", digits, **values).train()
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[name]), name
