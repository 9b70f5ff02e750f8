"""`quartet iterated-reward-model`: fresh pairs from the policy, the reward model on old and new pairs, RL; in rounds.

::

    data/answers_round_1.jsonl   the policy's answers with their labels
    data/pairs_round_1.jsonl     the round's fresh pairs
    data/pairs_until_1.jsonl     what its reward model is trained on: the recipe's pairs and all fresh ones
    round_1_reward_model/        a run of its own
    round_1_rl/                  a run of its own, which starts from the policy before
    model, reward_model          links to those of the last round

Each stage is resumed where it stopped, and one that is complete is not run again.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from quartet.config import Interrupted, UserError
from quartet.config.algorithms import reads_reference
from quartet.config.common import DataConfig, ModelConfig
from quartet.config.recipe import RewardModelRecipe, RLRecipe
from quartet.config.rewards import ModelReward
from quartet.config.run import Recipe
from quartet.data.datasets import PromptData, draws
from quartet.data.fields import Reading
from quartet.data.formats import preferences
from quartet.data.readers import iter_rows
from quartet.extras.iterated.config import CollectConfig, IteratedRecipe
from quartet.models.loading import load_causal_lm
from quartet.observe.callbacks import Callback
from quartet.observe.files import replace_atomically, seal, unseal
from quartet.observe.progress import Progress
from quartet.text.examples import AnswerText, Preference, answer_turn
from quartet.trainers.checkpoints import TrainResult
from quartet.trainers.devices import FrozenModels, precision_on
from quartet.trainers.evaluation import EvaluationModel
from quartet.trainers.evaluation_metrics import Answer, by_prompt, write_answers, write_rows
from quartet.trainers.input_sources import check_recipe
from quartet.trainers.rl import RLTrainer
from quartet.trainers.run import Stopwatch, open_run
from quartet.trainers.run_files import Resume, completed, writing
from quartet.trainers.signals import StopSignals, number_of, stop_signals
from quartet.trainers.supervised import RewardModelTrainer

PREVIOUS = "previous_round"
"""Name under which the reward model of the round before scores fresh answers."""


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
            raise Interrupted(self.path, None, number_of(stop)) from stop

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
            with writing(link):
                if link.is_symlink() and Path(os.readlink(link)) != target:
                    link.unlink()
                if not link.is_symlink():
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
        saved: dict[str, Any] | None = None
        with contextlib.suppress(OSError, ValueError):  # not there, or damaged
            saved = unseal(marker.read_bytes())
        if saved is None:
            answers, label = self._answers(number)
            config, groups = self.recipe.collect, by_prompt(answers)
            made = [make_pair(group, label, config, f"{self.recipe.seed} {number}") for group in groups]
            fresh = [pair for pair in made if pair is not None]
            if not fresh:
                raise UserError(
                    f"round {number} has no pairs to learn from",
                    found=f"{len(answers)} answers to {len(groups)} prompts, none told apart by {label!r}",
                    remedy="use more prompts or samples, a higher temperature, or another labeller",
                )
            data = self.path / "data"
            with writing(data):
                rows = [_row(pair) for pair in fresh]
                write_answers(data / f"answers_round_{number}.jsonl", answers)
                write_rows(data / f"pairs_round_{number}.jsonl", rows)
                write_rows(self._pairs_until(number), chain(self._old_pairs(number), rows))
                saved = {"seconds": round(watch.seconds, 3), "metrics": _figures(fresh, answers, label)}
                replace_atomically(marker, seal(saved))
        metrics: dict[str, float] = saved["metrics"]
        self._stages.append({"name": f"round_{number}_collect", **saved})
        self.progress.print(f"round {number}: {metrics['iterated/pairs']:.0f} fresh pairs")
        return metrics

    def _answers(self, number: int) -> tuple[list[Answer], str]:
        """Returns the policy's answers to the round's prompts, and the labeller's name among their scores."""
        recipe, config = self.recipe, self.recipe.collect
        previous = (ModelReward(path=str(self._model("reward_model", number - 1)), name=PREVIOUS),)
        sources = (config.labeller, *(previous if number > 1 else ()))
        frozen = FrozenModels(self.device, precision_on(self.device, recipe.rl.actor.train.precision))
        data = config.data or recipe.rl.data
        evaluation_model = EvaluationModel(self._policy(number), data, sources, frozen=frozen, engine=config.engine)
        size = min(config.prompts_per_round, len(evaluation_model.prompts))
        chosen = dict.fromkeys(i for i, _ in draws(recipe.seed, number - 1, evaluation_model.prompts.order, size))
        items = tuple(evaluation_model.prompts.items[i] for i in chosen)
        evaluation_model.prompts = PromptData(items, evaluation_model.prompts.warnings)
        label = next(name for name in evaluation_model.rewards.weights if name != PREVIOUS)
        total = len(items) * config.samples_per_prompt
        with contextlib.closing(evaluation_model), self.progress.stage(f"round {number}: answers", total) as bar:
            drawn = (config.sampling, config.samples_per_prompt)
            return evaluation_model.answers(*drawn, self.run.recorder, bar, seed=recipe.seed + number), label

    def _pairs_until(self, number: int) -> Path:
        return self.path / "data" / f"pairs_until_{number}.jsonl"

    def _old_pairs(self, number: int) -> Iterator[dict[str, Any]]:
        """Returns what the round before was trained on; in the first round the recipe's own pairs."""
        if number > 1:
            return (dict(row.values) for row in iter_rows(DataConfig(path=str(self._pairs_until(number - 1)))))
        data = self.recipe.reward_model.data
        if data is None:
            return iter(())
        section = "reward_model.data"
        parsed = [preferences(iter_rows(s), Reading.of(s, section)) for s in data.parts]
        return (
            {"prompt": p.prompt, **_sides(p)} | ({} if p.margin is None else {"margin": p.margin})
            for part in parsed
            for p in part.items
        )

    def _stage(self, name: str, trainer: Callable[..., Any], recipe: Callable[[], Any]) -> None:
        """Runs a job of the round to its end, unless that has been done."""
        if (done := completed(self.path / name, self.run.warning)) is None:
            done = trainer(recipe(), resume="auto", progress=self.progress).train().summary["stages"][0]
        self._stages.append({**done, "name": name})
        self.run.remote.saved()
        self._signals.check()  # one that came when the stage had nothing more to save

    def _reward_model_recipe(self, number: int) -> RewardModelRecipe:
        recipe = self.recipe.reward_model
        assert recipe.model is not None, "checked by the recipe"
        data = DataConfig(path=str(self._pairs_until(number)), overlong="skip")
        if recipe.data is not None:
            data = data.model_copy(update={"overlong": recipe.data.overlong, "max_tokens": recipe.data.max_tokens})
        model = recipe.model
        if number > 1 and self.recipe.keep_training:
            path = str(self._model("reward_model", number - 1))
            model = model.model_copy(update={"path": path, "tokenizer": None})
        return recipe.model_copy(update=self._own("reward_model", number) | {"data": data, "model": model})

    def _rl_recipe(self, number: int) -> RLRecipe:
        recipe, first = self.recipe.rl, self._policy(1)
        trained = ModelReward(
            path=str(self._model("reward_model", number)),
            name=self.recipe.reward_name,
            weight=self.recipe.reward_weight,
        )
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
    """Gives the recipes within the loop's by their keys; that of ``collect`` as one of ``rl``."""
    rl, collect = recipe.rl, recipe.collect
    rollout = rl.rollout.model_copy(update={"sampling": collect.sampling})
    asked = rl.model_copy(update={"data": collect.data, "evaluation": None, "ptx": None, "rollout": rollout})
    return {"reward_model": recipe.reward_model, "rl": rl, "collect": asked}


# Pairs -----------------------------------------------------------------------------------------------------


class LabelledPair(NamedTuple):
    """Two answers to one prompt, the first labelled higher."""

    chosen: Answer
    rejected: Answer


def make_pair(group: Sequence[Answer], label: str, config: CollectConfig, seed: str) -> LabelledPair | None:
    """Makes the pair of one prompt, None where its labels do not differ by enough.

    Args:
        label: name of the labeller's score; answers to which it does not apply take no part.
        seed: which two are drawn depends on it and on the prompt's id.
    """
    labelled = [answer for answer in group if not math.isnan(answer.rewards[label])]
    if config.pairs == "random" and len(labelled) > 2:
        labelled = random.Random(f"pair {seed} {group[0].prompt_id}").sample(labelled, 2)
    if len(labelled) < 2:
        return None
    chosen = max(labelled, key=lambda answer: answer.rewards[label])
    rejected = min(labelled, key=lambda answer: answer.rewards[label])
    difference = chosen.rewards[label] - rejected.rewards[label]
    return LabelledPair(chosen, rejected) if difference > config.least_difference else None


def _sides(pair: Preference) -> dict[str, AnswerText]:
    """Returns the answers of a pair as a row has them: both as messages where one is more than text."""
    sides = {"chosen": pair.chosen, "rejected": pair.rejected}
    is_text = all(isinstance(answer, str) for answer in sides.values())
    return sides if is_text else {name: answer_turn(answer) for name, answer in sides.items()}


def _row(pair: LabelledPair) -> dict[str, Any]:
    return {"prompt": pair.chosen.prompt, "chosen": pair.chosen.completion, "rejected": pair.rejected.completion}


def _figures(pairs: Sequence[LabelledPair], answers: Sequence[Answer], label: str) -> Mapping[str, float]:
    labels = [answer.rewards[label] for answer in answers if not math.isnan(answer.rewards[label])]
    found = {"iterated/pairs": float(len(pairs)), "iterated/label_mean": fmean(labels)}
    if all(PREVIOUS in pair.chosen.rewards for pair in pairs):
        gaps = [pair.chosen.rewards[PREVIOUS] - pair.rejected.rewards[PREVIOUS] for pair in pairs]
        found["iterated/stale_accuracy"] = fmean(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps)
    return found
