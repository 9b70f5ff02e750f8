"""`quartet iterated-reward-model`: fresh pairs from the policy, the reward model on old and new pairs, RL; in rounds.

::

    data/answers_round_1.jsonl   the policy's answers with their labels
    data/pairs_round_1.jsonl     the round's fresh pairs
    round_1_reward_model/        a run of its own, on the recipe's pairs and those of all rounds so far
    round_1_rl/                  a run of its own, which starts from the policy before
    model, reward_model          links to those of the last round

Each stage is resumed where it stopped, and one that is complete is not run again.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from quartet.config import Interrupted, UserError
from quartet.config.algorithms import reads_reference
from quartet.config.common import DataConfig, ModelConfig, SourceConfig
from quartet.config.recipe import RewardModelRecipe, RLRecipe
from quartet.config.rewards import ModelReward
from quartet.config.run import Recipe
from quartet.data.datasets import PromptData, draw_batch
from quartet.extras.iterated.config import REWARD, IteratedRecipe
from quartet.models.loading import load_causal_lm
from quartet.observe.callbacks import Callback
from quartet.observe.files import replace_atomically
from quartet.observe.progress import Progress
from quartet.trainers.checkpoints import TrainResult
from quartet.trainers.devices import FrozenModels, resolve_precision
from quartet.trainers.evaluation import EvaluationModel
from quartet.trainers.evaluation_metrics import ScoredAnswer, group_by_prompt, write_answers, write_json_lines
from quartet.trainers.input_sources import check_recipe
from quartet.trainers.rl import RLTrainer
from quartet.trainers.run import Stopwatch, open_run
from quartet.trainers.run_files import Resume, completed_stage, naming_write_errors
from quartet.trainers.signals import StopSignals, signal_number, stop_signals
from quartet.trainers.supervised import RewardModelTrainer


class IteratedTrainer:
    """The loop over the existing trainers.

    Args:
        recipe: the loop, and in its sections the two jobs.
        callbacks: are told of rounds, and may end the loop; those of a stage are in the recipe's section of it.
        resume: go on with the loop in ``recipe.output_dir``; ``auto``: or start it, without a word.

    Raises:
        UserError: the directory holds another run.
    """

    def __init__(
        self,
        recipe: IteratedRecipe,
        *,
        callbacks: Sequence[Callback] = (),
        resume: Resume = False,
        progress: Progress | None = None,
    ) -> None:
        check_recipe(recipe, IteratedRecipe)
        self.run, self.progress, self.device = open_run(recipe, resume, progress, callbacks=callbacks)
        self.recipe = self.run.pin(recipe)
        self.path = self.run.path
        self._stages: list[dict[str, Any]] = []
        self._signals = StopSignals()

    def train(self) -> TrainResult:
        """Runs all rounds.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1; every stage is saved, and resumable.
            UserError: a stage's, or the labeller tells no two answers apart.
        """
        try:
            with stop_signals() as self._signals, self.run:
                return self._train()
        except (Interrupted, KeyboardInterrupt) as stop:
            raise Interrupted(self.path, None, signal_number(stop)) from stop

    def _train(self) -> TrainResult:
        # Rows of complete rounds are made anew from what their stages have left.
        self.run.start(0)
        last = 0
        while last == 0 or not self.run.is_last(last, self.recipe.rounds):
            last += 1
            metrics = self._round(last)
            self.run.callbacks(Callback.on_step_end, last, metrics)
            self.run.log(last, metrics)
        for name, stage in (("model", "rl"), ("reward_model", "reward_model")):
            link, target = self.path / name, Path(f"round_{last}_{stage}") / "model"
            with naming_write_errors(link):
                link.unlink(missing_ok=True)
                link.symlink_to(target)
        policy = partial(load_causal_lm, str(self.path / "model"))
        return TrainResult(self.path, self.run.finish({"stages": self._stages}), policy)

    def _round(self, number: int) -> dict[str, float]:
        found = self._collect(number)
        self._stage(f"round_{number}_reward_model", RewardModelTrainer, partial(self._reward_model_recipe, number))
        self._stage(f"round_{number}_rl", RLTrainer, partial(self._rl_recipe, number))
        return found

    # Stages ------------------------------------------------------------------------------------------------

    def _policy(self, number: int) -> ModelConfig:
        """Returns the policy that the round starts with: the recipe's, then the one that the round before
        has trained.
        """
        first = self.recipe.rl.actor.model
        assert first is not None, "checked by the recipe"
        if number == 1:
            return first
        return first.model_copy(update={"path": str(self._model("rl", number - 1)), "tokenizer": None})

    def _model(self, stage: str, number: int) -> Path:
        return self.path / f"round_{number}_{stage}" / "model"

    def _collect(self, number: int) -> dict[str, float]:
        watch = Stopwatch()
        marker = self.path / "data" / f"collected_round_{number}.json"
        if marker.is_file():
            saved = json.loads(marker.read_text(encoding="utf-8"))
        else:
            answers, label = self._answers(number)
            groups = group_by_prompt(answers)
            fresh = [pair for group in groups if (pair := make_pair(group, label)) is not None]
            if not fresh:
                raise UserError(
                    f"round {number} has no pairs to learn from",
                    found=f"{len(answers)} answers to {len(groups)} prompts, none told apart by {label!r}",
                    remedy="use more prompts or samples, a higher temperature, or another labeller",
                )
            labels = [answer.rewards[label] for answer in answers if not math.isnan(answer.rewards[label])]
            figures = {"iterated/pairs": float(len(fresh)), "iterated/label_mean": fmean(labels)}
            data = self.path / "data"
            with naming_write_errors(data):
                write_answers(data / f"answers_round_{number}.jsonl", answers)
                write_json_lines(data / f"pairs_round_{number}.jsonl", fresh)
                saved = {"seconds": round(watch.seconds, 3), "metrics": figures}
                replace_atomically(marker, json.dumps(saved).encode())
        metrics: dict[str, float] = saved["metrics"]
        self._stages.append({"name": f"round_{number}_collect", **saved})
        self.progress.print(f"round {number}: {metrics['iterated/pairs']:.0f} fresh pairs")
        return metrics

    def _answers(self, number: int) -> tuple[list[ScoredAnswer], str]:
        """Returns the policy's answers to the round's prompts, and the labeller's name among their scores."""
        recipe, config = self.recipe, self.recipe.collect
        frozen = FrozenModels(self.device, resolve_precision(self.device, recipe.rl.actor.train.precision))
        rollout, labeller = recipe.rl.rollout, (config.labeller,)
        evaluation_model = EvaluationModel(
            self._policy(number), recipe.rl.data, labeller, frozen=frozen, engine=rollout.engine
        )
        size = min(config.prompts_per_round, len(evaluation_model.prompts))
        chosen = dict.fromkeys(i for i, _ in draw_batch(recipe.seed, number - 1, evaluation_model.prompts.order, size))
        items = tuple(evaluation_model.prompts.items[i] for i in chosen)
        evaluation_model.prompts = PromptData(items, evaluation_model.prompts.warnings)
        (label,) = evaluation_model.rewards.weights
        total = len(items) * config.samples_per_prompt
        with contextlib.closing(evaluation_model), self.progress.stage(f"round {number}: answers", total) as bar:
            drawn = (rollout.sampling, config.samples_per_prompt)
            return evaluation_model.answers(*drawn, self.run.recorder, bar, seed=recipe.seed + number), label

    def _stage(self, name: str, trainer: Callable[..., Any], recipe: Callable[[], Any]) -> None:
        """Runs a job of the round to its end, unless that has been done."""
        if (done := completed_stage(self.path / name, self.run.warning)) is None:
            done = trainer(recipe(), resume="auto", progress=self.progress).train().summary["stages"][0]
        self._stages.append({**done, "name": name})
        self.run.remote.saved()
        self._signals.check()  # one that came when the stage had nothing more to save

    def _reward_model_recipe(self, number: int) -> RewardModelRecipe:
        recipe = self.recipe.reward_model
        data = recipe.data or DataConfig(overlong="skip")
        files = [self.path / "data" / f"pairs_round_{n}.jsonl" for n in range(1, number + 1)]
        sources = (*data.parts, *(SourceConfig(path=str(file)) for file in files))
        own = {name: getattr(data, name) for name in ("max_tokens", "overlong", "check_rows")}
        return recipe.model_copy(
            update=self._own("reward_model", number) | {"data": DataConfig(sources=sources, **own)}
        )

    def _rl_recipe(self, number: int) -> RLRecipe:
        recipe, first = self.recipe.rl, self._policy(1)
        trained = ModelReward(path=str(self._model("reward_model", number)), name=REWARD)
        changes = self._own("rl", number) | {
            "actor": recipe.actor.model_copy(update={"model": self._policy(number)}),
            "rewards": (trained, *recipe.rewards),
        }
        if number > 1 and recipe.reference.path is None and reads_reference(recipe.algorithm):
            changes["reference"] = recipe.reference.model_copy(update={"path": first.path})
        return recipe.model_copy(update=changes)

    def _own(self, stage: str, number: int) -> dict[str, Any]:
        directory = str(self.path / f"round_{number}_{stage}")
        return {"seed": self.recipe.seed + number, "output_dir": directory, "device": self.recipe.device}


def sections(recipe: IteratedRecipe) -> dict[str, Recipe]:
    """Gives the recipes within the loop's by their keys."""
    return {"reward_model": recipe.reward_model, "rl": recipe.rl}


# Pairs -----------------------------------------------------------------------------------------------------


def make_pair(group: Sequence[ScoredAnswer], label: str) -> dict[str, Any] | None:
    """Makes a row of the best and the worst answer to one prompt, None where their labels do not differ.

    Args:
        label: name of the labeller's score; answers to which it does not apply take no part.
    """
    labelled = [answer for answer in group if not math.isnan(answer.rewards[label])]
    if len({answer.rewards[label] for answer in labelled}) < 2:
        return None
    best, worst = (pick(labelled, key=lambda answer: answer.rewards[label]) for pick in (max, min))
    return {"prompt": best.prompt, "chosen": best.completion, "rejected": worst.completion}
