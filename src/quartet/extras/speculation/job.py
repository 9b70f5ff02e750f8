"""`quartet medusa`: Medusa heads for a model, trained on its own answers.

::

    prompts ──► the model's answers ──► hidden states of the model ──┬──► heads ──► update
                (finished/answers-*.jsonl)                           └──► tokens that followed

``medusa/`` in the run's directory is what ``rollout.speculation.path`` names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.dispatch import ONE_COPY, dispatch
from quartet.config import UserError
from quartet.config.common import DataConfig
from quartet.data.datasets import PromptData, SFTData, SFTItem
from quartet.extras.speculation.config import FOLDER, MedusaRecipe
from quartet.extras.speculation.head_trainer import HIDDEN, HeadTrainer, future_labels
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.lora import named_tensors_digest
from quartet.models.memory import drop_derived
from quartet.observe.files import RowAppender, read_rows
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request
from quartet.rollout.sampler import sample_seed
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.rollout_worker import sampling_params
from quartet.train.state import Shape
from quartet.trainers.evaluation import run_requests
from quartet.trainers.input_sources import Reader, check_budget, load_prompts, prompt_reader
from quartet.trainers.run_files import naming_write_errors
from quartet.trainers.supervised import PassedObjects, SupervisedTrainer, SupervisedWorker

_ANSWERS_PER_PASS = 256
"""Answered by the engine together. What they are does not depend on the others, so that a killed run's are the same."""
_DRAWS = {"data": 0, "evaluation_data": -1}


def reader(recipe: MedusaRecipe) -> Reader[Any]:
    return prompt_reader


class MedusaWorker(SupervisedWorker[MedusaRecipe, Any]):
    """Has a causal LM answer prompts, and trains heads on its hidden states."""

    objective: Any = None  # the heads have a trainer of their own
    _rows_key = "answers_per_step"

    def _read(self, key: str, config: DataConfig | None, rows: Sequence[Any] | None, context: int) -> Any:
        """Reads prompts, each as often as it is to be answered, until ``sample_answers`` was called."""
        found = load_prompts(config, rows, self.codec, context, key)
        return replace(found, items=tuple(i for i in found.items for _ in range(self.recipe.samples_per_prompt)))

    def _longest(self) -> int:
        longest = max(item.num_tokens for item in self.data.items) + self.recipe.sampling.max_new_tokens
        budget = self.recipe.train.forward_token_budget
        check_budget(longest, budget, "train.forward_token_budget")
        return 0  # nothing has gradients but the heads, which take positions one by one

    def _begin(self, given: PassedObjects) -> None:
        recipe = self.recipe
        config = recipe.heads
        heads = MedusaHeads(self.packed, config.depth, layers=config.layers, shared_head=config.shared_head)
        self.trainer = HeadTrainer(heads, recipe.train.optim, total_steps=self.steps)

    # Answers ---------------------------------------------------------------------------------------------

    def begin_answers(self, path: Path) -> int:
        """Looks for answers of this model to these prompts that are there; returns how many are missing.

        Args:
            path: of the run.
        """
        found = {"data": self.data, "evaluation_data": self.evaluation}
        self._asked = {key: self._requests(key, data) for key, data in found.items() if data is not None}
        about = [[one.request_id, *one.prompt_ids] for asked in self._asked.values() for one in asked]
        model = named_tensors_digest(self.packed.model.state_dict().items())
        digest = hashlib.sha256(json.dumps([model, about]).encode()).hexdigest()
        file = path / "finished" / f"answers-{digest[:16]}.jsonl"
        self._answers = {row["sample"]: row["token_ids"] for row in read_rows(file)} if file.is_file() else {}
        self._rows = RowAppender(file)
        asked = [request for requests in self._asked.values() for request in requests]
        parts = [asked[start : start + _ANSWERS_PER_PASS] for start in range(0, len(asked), _ANSWERS_PER_PASS)]
        self._missing = [part for part in parts if any(one.request_id not in self._answers for one in part)]
        return sum(map(len, self._missing))

    def _requests(self, key: str, data: PromptData) -> list[Request]:
        params = sampling_params(self.recipe.sampling, self.codec)
        seed, samples = self.recipe.seed, self.recipe.samples_per_prompt
        return [
            Request(
                f"{key}.{i}",
                f"{key}.{item.prompt_id}",
                tuple(self.codec.encode_prompt(item.prompt)),
                replace(params, seed=sample_seed(seed, _DRAWS[key], item.prompt_id, i % samples)),
            )
            for i, item in enumerate(data.items)
        ]

    def sample_answers(self) -> int:
        """Answers the next prompts; returns how many it were. Once there are none left the answers are the data.

        Raises:
            UserError: none of them is long enough to learn from.
        """
        if self._missing:
            part = self._missing.pop(0)
            engine = NativeEngine(self.packed, decode=self.codec.decode_completion)
            for one in run_requests(engine, part):
                self._answers[one.request_id] = one.token_ids
                self._rows.append({"sample": one.request_id, "token_ids": one.token_ids})
            drop_derived(self.packed.model)
            return len(part)
        self._rows.close()
        self.data = self._answered("data", self.data)
        if self.evaluation is not None:
            self.evaluation = self._answered("evaluation_data", self.evaluation)
        return 0

    def _answered(self, key: str, data: PromptData) -> SFTData:
        items = []
        for item, request in zip(data.items, self._asked[key], strict=True):
            ids = self._answers[request.request_id]
            mask = (False,) * len(request.prompt_ids) + (True,) * len(ids)
            items.append(SFTItem((*request.prompt_ids, *ids), mask, item.place))
        found = SFTData(tuple(items), data.warnings, data.mixture)
        if not any((future_labels(part, 1) >= 0).any() for part in found.in_parts(_ANSWERS_PER_PASS)):
            raise UserError(
                f"the model's answers to the prompts of {key} are too short: nothing follows their first token",
                found=f"{len(items)} answers, the longest of {max(sum(i.loss_mask) for i in items)} tokens",
                remedy="use prompts that get longer answers, or a larger sampling.max_new_tokens",
            )
        return found

    # Training --------------------------------------------------------------------------------------------

    def _hidden(self, batch: RaggedBatch) -> Tensor:
        return self.engine.forward(batch, HIDDEN).token["hidden"]

    def _update(self, batch: RaggedBatch) -> dict[str, float]:
        return self.trainer.step(self._hidden(batch), batch)

    def step(self, step: int) -> dict[str, float]:
        return {**super().step(step), "optim/skipped_steps": float(self.trainer.num_skipped)}

    def _measure(self, data: Any) -> dict[str, float]:
        if isinstance(data, PromptData):
            raise UserError("the prompts have no answers yet", found="answers: sample", remedy="call train() first")
        return self.trainer.measure((self._hidden(batch), batch) for batch in data.in_parts(_ANSWERS_PER_PASS))

    # State -----------------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict[str, Any]:
        return self.trainer.state()

    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> AbstractContextManager[dict[str, Tensor]]:
        return self.trainer.loading(saved, rest)

    @dispatch(ONE_COPY)
    def write_model(self, path: Path) -> str | None:
        """Writes the heads, as ``medusa`` beside where the model would be."""
        target = path.with_name(FOLDER)
        with naming_write_errors(target):
            self.trainer.heads.save(target)
        return None


class MedusaTrainer(SupervisedTrainer[MedusaRecipe, MedusaWorker]):
    """Trains Medusa heads for a causal LM, which stays as it is, on answers that it samples itself.

    Arguments as for ``SupervisedTrainer``; rows have ``prompt``. Held-out figures: how often the heads guess right, by
    depth. The heads are in ``medusa/``; the result's ``model`` is the one passed.
    """

    recipe_class = MedusaRecipe
    worker_class = MedusaWorker
    _evaluation_metric = "medusa/tokens_per_forward"

    async def _prepare(self, group: RoleGroup[MedusaWorker]) -> None:
        """Has the model answer the prompts, as far as it has not yet."""
        missing = await group.call(MedusaWorker.begin_answers, self._path_of_workers)
        with self.progress.stage("answers", missing) as bar:
            while num_answers := await group.call(MedusaWorker.sample_answers):
                bar.advance(num_answers)
                self.run.check_stop(max(self.run.saved_steps(), default=0))
