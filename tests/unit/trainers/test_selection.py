"""Online preference: which responses are learned from, as what, and whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from breaking import break_at, same_weights, untimed_rows
from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import BestOfN, OnlineDPO, SelectionAlgorithm
from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.load import load_recipe
from quartet.config.preference import IPOLoss
from quartet.config.recipe import ActorConfig, RLRecipe, RolloutConfig
from quartet.schedule.iteration import Chunk
from quartet.trainers.experience import Experience, ExperienceAssembler, select_learned
from quartet.trainers.rl import RLTrainer

NAN = float("nan")


def assembled(
    config: SelectionAlgorithm, scores: Sequence[Sequence[float]], ended: Sequence[bool] | None = None
) -> Experience:
    """Groups of responses of two tokens with these scores; ``ref_logprobs`` count the tokens from 0 down."""
    num = [len(group) for group in scores]
    names = [f"{g}.{r}" for g, n in enumerate(num) for r in range(n)]
    batch = RaggedBatch.from_groups([[5, 6]] * len(num), [[[7, 8]] * n for n in num], names)
    mask = batch.sequence_index() >= 0
    zeros = torch.zeros(batch.num_tokens)
    batch = batch.with_token(action_mask=mask, loss_mask=mask, rollout_logprobs=zeros).with_sequence(
        group=torch.tensor([g for g, n in enumerate(num) for _ in range(n)]),
        response=torch.tensor([r for n in num for r in range(n)]),
        ended=torch.tensor(list(ended) if ended is not None else [True] * len(names)),
    )
    flat = torch.tensor([score for group in scores for score in group])
    reference = -torch.arange(batch.num_tokens, dtype=torch.float32)
    columns = [ColumnSet(batch.ids, sequence={"reward/score": flat}), ColumnSet(batch.ids, {"ref_logprobs": reference})]
    assembler = ExperienceAssembler(config, {"score": 1.0}, lambda: 0.0)
    return assembler([(Chunk(0, 0, batch), columns)])


def signs(experience: Experience) -> list[float]:
    """One advantage per response."""
    batch = experience.batch
    return [float(batch.token["advantages"][batch.leaf_span(s)[0]]) for s in range(len(batch))]


# Selection -----------------------------------------------------------------------------------------------


def test_the_best_of_each_group_are_demonstrations() -> None:
    experience = assembled(BestOfN(keep=2), [[1.0, 3.0, 2.0], [4.0, 4.0, 4.0], [NAN, 0.0, 1.0], [NAN, NAN, 9.0]])
    # Equal scores teach nothing; a response without a score takes no part, and one alone has nothing to be better than.
    assert signs(experience) == [0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0]
    batch = select_learned(BestOfN(keep=2), experience.batch)
    assert batch.ids == ("0.1", "0.2", "2.1", "2.2")
    assert int(batch.token["loss_mask"].sum()) == 8
    assert batch.num_tokens == 2 * 2 + 4 * 2, "nothing else goes through the update"


def test_a_least_score_and_penalties_count() -> None:
    config = BestOfN(keep=1, min_score=1.0, missing_eos_penalty=0.5)
    experience = assembled(config, [[1.2, 0.0], [1.0, 0.0]], ended=[False, True, True, True])
    assert signs(experience) == [0, 0, 1, 0]


def test_best_and_worst_are_a_pair() -> None:
    config = OnlineDPO()
    experience = assembled(config, [[1.0, 3.0, 2.0], [4.0, 4.0, 4.0], [2.0, 0.5, 1.0]])
    assert signs(experience) == [-1, 1, 0, 0, 0, 0, 1, -1, 0]
    batch = select_learned(config, experience.batch)
    assert batch.ids == ("0.0", "0.1", "2.0", "2.1")
    assert batch.sequence["chosen"].tolist() == [False, True, True, False]
    assert batch.sequence["pair"].tolist() == [0, 0, 1, 1]
    assert batch.sequence["margin"].tolist() == [2.0, 2.0, 1.5, 1.5]
    # Tokens 2 and 3, 4 and 5; the third group begins at token 16.
    assert batch.sequence["ref_logprobs"].tolist() == [-5.0, -9.0, -37.0, -41.0]


def test_nothing_to_choose_leaves_nothing_to_train() -> None:
    for config in (BestOfN(), OnlineDPO()):
        experience = assembled(config, [[1.0, 1.0], [NAN, 2.0]])
        batch = select_learned(config, experience.batch)
        assert len(batch) == 4 and not bool(batch.token["loss_mask"].any())
    assert experience.metrics["groups/zero_variance"] == 1.0


# Runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def train(tiny_rl: Callable[..., RLTrainer], causal_lm: Any, digits: Any, tmp_path: Path) -> Callable[..., RLTrainer]:
    def make(path: str, algorithm: Any, *, seed: int = 0, **changes: Any) -> RLTrainer:
        values: dict[str, Any] = {
            "actor": ActorConfig(train=TrainConfig(optim=OptimConfig(lr=3e-3))),
            "rollout": RolloutConfig(
                sampling=SamplingConfig(max_new_tokens=6), engine=NativeEngineConfig(max_running=16)
            ),
            "steps": 4,
            "prompts_per_step": 4,
            "responses_per_prompt": 4,
            "minibatches": 2,
            "checkpoint": CheckpointConfig(every_steps=2),
            **changes,
        }
        return tiny_rl(tmp_path / path, digits, model=causal_lm(seed), algorithm=algorithm, **values)

    return make


def test_the_first_update_of_online_dpo_starts_at_log_two(train: Any) -> None:
    trainer = train("run", OnlineDPO(), steps=1, minibatches=1)
    trainer.train()
    assert untimed_rows(trainer.path)[-1]["loss/preference"] == pytest.approx(math.log(2), abs=1e-4)


def test_iterative_dpo_refreshes_its_reference_and_resumes(train: Any) -> None:
    config = OnlineDPO(loss=IPOLoss(), refresh_steps=3)
    whole = train("whole", config, steps=7)
    result = whole.train()
    rows = untimed_rows(whole.path)[1:]
    assert [row["reference/age"] for row in rows] == [1, 2, 0, 1, 2, 0, 1]
    # One update after a refresh the policy has moved by one step only.
    assert abs(rows[3]["kl/ref"]) < 1e-4 < abs(rows[2]["kl/ref"])
    broken = train("broken", config, steps=7)
    break_at(10, broken.roles.actor)
    with pytest.raises(RuntimeError, match="on purpose"):
        broken.train()
    resumed = train("broken", config, steps=7, seed=0, resume=True)
    assert same_weights(resumed.train().model, result.model)
    assert untimed_rows(resumed.path) == untimed_rows(whole.path)


# What does not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (("algorithm.name=best_of_n", "responses_per_prompt=1"), "compares the responses of a group"),
        (("algorithm.name=online_dpo", "responses_per_prompt=1"), "compares the responses of a group"),
        (("algorithm.name=best_of_n", "algorithm.keep=4", "responses_per_prompt=4"), "nothing would be selected"),
        (("algorithm.name=online_dpo", "algorithm.gamma=1.0"), "gamma"),
        (("algorithm.name=online_dpo", "algorithm.loss.name=kto"), "algorithm.loss.name: kto"),
    ],
)  # fmt: skip
def test_what_does_not_fit(overrides: tuple[str, ...], found: str) -> None:
    with pytest.raises(UserError, match="not valid") as caught:
        load_recipe("rl", None, overrides)
    assert found in caught.value.found


def test_adapters_have_no_reference_to_refresh() -> None:
    adapters = ActorConfig(train=TrainConfig(lora=LoRAConfig()))
    with pytest.raises(UserError, match=r"set reference\.path"):
        RLRecipe(algorithm=OnlineDPO(refresh_steps=2), responses_per_prompt=2, actor=adapters)
