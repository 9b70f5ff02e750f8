"""A model that answers prompts with the process to itself, and the rewards that score its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quartet.batch.trajectory import Trajectory
from quartet.config.common import DataConfig, ModelConfig, SamplingConfig, TrainConfig
from quartet.config.rewards import RewardConfig
from quartet.data.datasets import PromptData, PromptItem
from quartet.models.directories import load_remarks
from quartet.models.loading import load_causal_lm
from quartet.models.packed import PackedCausalLM
from quartet.observe.spans import SpanRecorder
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request, RolloutEngine
from quartet.schedule.groups import Group, answered, group_batch
from quartet.schedule.placement import local_arbiter
from quartet.schedule.role_group import LocalGroup
from quartet.schedule.worker import Worker
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.trainers.answers import StoredAnswer, matched
from quartet.trainers.devices import FrozenModels
from quartet.trainers.evaluation import Answer, RewardScorer, answer_prompts, as_completion, score_groups
from quartet.trainers.finished import Finished
from quartet.trainers.generate import run_to_end
from quartet.trainers.process_roles import process_models
from quartet.trainers.reward_roles import (
    RewardFunctionRole,
    RewardModelRole,
    reward_functions,
    reward_models,
    reward_scorers,
    reward_weights,
)
from quartet.trainers.sources import context_length, cut_short, prompt_data, resolve_model, resolve_tokenizer

_ON_CPU = FrozenModels()


@dataclass(frozen=True)
class _Direct:
    """An engine nobody shares, run to the end."""

    engine: RolloutEngine
    on_done: Callable[[int], None] | None = None
    keep: Callable[[Sequence[Completion]], None] | None = None

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        return run_to_end(self.engine, requests, self.on_done, self.keep)


@dataclass(frozen=True)
class Contestant:
    """Loaded and checked by :meth:`build`; everything is given back by :meth:`released_at_end`."""

    packed: PackedCausalLM
    codec: TextCodec
    prompts: PromptData
    models: Sequence[RewardModelRole]
    functions: Sequence[RewardFunctionRole]
    weights: dict[str, float]

    @classmethod
    def build(
        cls,
        config: ModelConfig | None,
        data: DataConfig | None,
        reward_configs: Sequence[RewardConfig],
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rewards: Sequence[Callable[..., Any] | PreTrainedModel] = (),
        prompts: Sequence[Any] | None = None,
        frozen: FrozenModels = _ON_CPU,
    ) -> Contestant:
        """What the recipe's parts name, or the objects passed in their place.

        Args:
            frozen: where the models go, and in which precision.

        Raises:
            UserError: model, tokenizer, data and rewards do not fit together.
        """
        tokenizer = resolve_tokenizer(config, tokenizer)
        causal = resolve_model(config, model, load_causal_lm, "model")
        check_vocabulary(tokenizer, int(causal.get_input_embeddings().weight.shape[0]))
        codec = TextCodec.of(tokenizer, causal.generation_config)
        items = prompt_data(data, prompts, codec, context_length(causal), "data")
        functions = reward_functions(reward_configs, rewards)
        for function in functions:
            function.reward.check_columns(sorted({name for item in items for name in item.columns}))
        models = [*reward_models(reward_configs, rewards, codec, TrainConfig(), frozen)]
        models += process_models(reward_configs, codec, frozen)
        weights = reward_weights(models, functions)
        packed = frozen.causal(causal, is_passed=model is not None)
        return cls(packed, codec, items, models, functions, weights)

    @contextlib.contextmanager
    def released_at_end(self) -> Iterator[Contestant]:
        """Gives the models back their own attention and closes the rewards, however the block ends."""
        try:
            yield self
        finally:
            self.release()

    def release(self) -> None:
        for model in (self.packed, *(role.model for role in self.models)):
            model.release()
        for function in self.functions:
            function.reward.close()

    def remarks(self) -> list[str]:
        """Rows left out or converted, what is changed about the model, and samples that rewards left out, in words."""
        found = [*self.prompts.remarks, *self.packed.remarks]
        found += [remark for role in self.models for remark in load_remarks(role.model.model)]
        return found + [remark for role in self.functions for remark in role.reward.remarks()]

    def cut_short(self, sampling: SamplingConfig, key: str) -> list[str]:
        """What is to be said where ``key``'s answers end at the model's context."""
        lengths = (item.num_tokens for item in self.prompts)
        return cut_short(lengths, sampling.max_new_tokens, context_length(self.packed.model), key)

    @property
    def model_names(self) -> list[str]:
        """Names of the sources that are reward models."""
        return [role.name for role in self.models]

    async def answers(
        self,
        recorder: SpanRecorder,
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        max_running: int,
        on_done: Callable[[int], None] | None = None,
        finished: Finished | None = None,
    ) -> list[Answer]:
        """``samples`` answers to every prompt, scored. ``on_done`` is told how many each engine step finishes.

        Args:
            finished: what an evaluation before this one has; this one's work is kept there.
        """
        engine = NativeEngine(self.packed, max_running=max_running, decode=self.codec.decode)
        if finished is not None and on_done is not None:
            on_done(len(finished.completions))
        return await answer_prompts(
            _Direct(engine, on_done, finished.keep_completions if finished is not None else None),
            self.prompts,
            self.codec,
            sampling,
            self._scorers(recorder),
            seed=seed,
            step=0,
            samples=samples,
            finished=finished,
        )

    async def score_stored(
        self, stored: Sequence[StoredAnswer], recorder: SpanRecorder, finished: Finished | None = None
    ) -> list[Answer]:
        """Answers of an earlier evaluation to the same prompts, scored by these rewards."""
        samples = matched(stored, self.prompts.items)
        items = [item for item in self.prompts if item.prompt_id in samples]
        # As long as what was sampled; the text is the stored one.
        answers = [
            Group.of(i, item, group_batch(i, self._stored(item, samples[item.prompt_id])))
            for i, item in enumerate(items)
        ]
        return await score_groups(answers, self._scorers(recorder), step=0, finished=finished)

    def _stored(self, item: PromptItem, answers: Sequence[StoredAnswer]) -> list[Trajectory]:
        in_order = sorted(answers, key=lambda answer: answer.sample)
        made = [(as_completion(self.codec, item, a.text, a.finish_reason), a.text) for a in in_order]
        ids = tuple(self.codec.encode_prompt(item.prompt))
        return [answered(ids, completion, text) for completion, text in made]

    def _scorers(self, recorder: SpanRecorder) -> Sequence[RewardScorer]:
        workers = {role.name: role.worker() for role in self.models}
        arbiter = local_arbiter({name: worker.sizes() for name, worker in workers.items()}, version=0)
        groups = {name: LocalGroup(worker) for name, worker in workers.items()}
        return reward_scorers(Worker(arbiter, recorder), self.models, self.functions, groups)
