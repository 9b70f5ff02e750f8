"""Which roles a recipe loads, what warm-up leaves alone, and how a step begins clean.

Methods in whole runs: what a resumed run remembers, what is refused or said before one starts.

Numbers and messages of RL that are easy to get wrong without anything failing.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from breaking import break_at, same_weights, untimed_rows
from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import GRPO, PPO, RLOO, AlgorithmConfig, Distillation, KLConfig, OnlineDPO
from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import (
    ActorConfig,
    CriticConfig,
    LogConfig,
    ReferenceConfig,
    RLRecipe,
    RolloutConfig,
)
from quartet.config.rewards import ModelReward
from quartet.models.loading import packed_scalar_model, save_scalar_model
from quartet.observe.global_state import current_guarded_code
from quartet.observe.trackers import read_metrics
from quartet.schedule.iteration import Chunk
from quartet.trainers.experience import Experience, ExperienceAssembler, KLCoefficient
from quartet.trainers.input_sources import check_budget
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.rl import RLTrainer
from quartet.trainers.roles import RLRoles, needs_old_logprobs

TRAIN = TrainConfig(optim=OptimConfig(lr=1e-2))
NO_KL = KLConfig(coef=0.0)


def recipe(algorithm: AlgorithmConfig, **changes: Any) -> RLRecipe:
    values: dict[str, Any] = {
        "algorithm": algorithm,
        "actor": ActorConfig(train=TRAIN),
        "critic": CriticConfig(train=TRAIN),
        "rollout": RolloutConfig(sampling=SamplingConfig(max_new_tokens=4), engine=NativeEngineConfig(max_running=8)),
        "steps": 2,
        "prompts_per_step": 2,
        "responses_per_prompt": 2,
        "log": LogConfig(tensorboard=False),
        "threads": 1,
    }
    return RLRecipe(**{**values, **changes})


@pytest.fixture
def roles_of(causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any) -> Iterator[Callable[..., RLRoles]]:
    made: list[RLRoles] = []

    def make(used: RLRecipe, rewards: list[Any] | None = None, critic: Any = None) -> RLRoles:
        given = [digits] if rewards is None else rewards
        made.append(RLRoles(used, UserObjects(causal_lm(), tokenizer, critic, given, prompts=prompts)))
        return made[-1]

    yield make
    for run_roles in made:
        run_roles.close()


@pytest.mark.parametrize(
    ("algorithm", "changes", "roles", "columns"),
    [
        (PPO(), {}, {"actor", "rollout", "critic", "reference"}, ["ref_logprobs", "old_logprobs", "values"]),
        (PPO(kl=NO_KL), {}, {"actor", "rollout", "critic"}, ["values"]),
        (PPO(kl=NO_KL), {"epochs": 2}, {"actor", "rollout", "critic"}, ["old_logprobs", "values"]),
        (GRPO(), {}, {"actor", "rollout"}, []),
        (GRPO(), {"minibatches": 2}, {"actor", "rollout"}, ["old_logprobs"]),
        (GRPO(kl=KLConfig(coef=0.1, place="loss")), {}, {"actor", "rollout", "reference"}, ["ref_logprobs"]),
        (RLOO(), {}, {"actor", "rollout", "reference"}, ["ref_logprobs", "old_logprobs"]),
        (RLOO(kl=NO_KL), {}, {"actor", "rollout"}, []),
    ],
)
def test_only_what_the_method_reads_is_loaded(
    roles_of: Any, algorithm: AlgorithmConfig, changes: Any, roles: set[str], columns: list[str]
) -> None:
    used = recipe(algorithm, **changes)
    run_roles = roles_of(used)
    assert {*run_roles.workers, "rollout"} == roles
    assert (run_roles.critic is None) == ("critic" not in roles)
    assert (run_roles.reference is None) == ("reference" not in roles)
    assert len(run_roles.models()) == len(roles) - 1, "the rollout engine shares the actor"
    scorers: list[Any] = [*run_roles.reward_scorers(None), *run_roles.column_scorers(None)]
    assert [scorer.column for scorer in scorers if hasattr(scorer, "column")] == columns
    assert needs_old_logprobs(used) == ("old_logprobs" in columns)


def test_the_reference_is_the_actor_as_it_starts_and_never_changes(
    causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path
) -> None:
    model = causal_lm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    used = recipe(RLOO(), output_dir=str(tmp_path / "run"))
    trainer = RLTrainer(used, model=model, tokenizer=tokenizer, rewards=[digits], prompts=prompts)
    trainer.train()
    assert trainer.roles.reference is not None
    for name, value in trainer.roles.reference.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_critic_starts_as_the_reward_model_or_as_the_actors_body(roles_of: Any, scalar_model: Any) -> None:
    reward = scalar_model()
    from_reward = roles_of(recipe(PPO()), rewards=[reward])
    assert from_reward.critic is not None and from_reward.critic.packed.model is not reward
    assert torch.equal(from_reward.critic.packed.model.score.weight, reward.score.weight)
    from_actor = roles_of(recipe(PPO()))
    assert from_actor.critic is not None
    body = from_actor.critic.packed.model.model.state_dict()
    for name, value in from_actor.actor.packed.model.model.state_dict().items():
        assert torch.equal(value, body[name]), name
    own = scalar_model(7)
    assert roles_of(recipe(PPO()), critic=own).critic.packed.model is own


def test_reward_names_and_vocabularies_are_checked(roles_of: Any, scalar_model: Any, digits: Any) -> None:
    with pytest.raises(UserError, match="no reward"):
        roles_of(recipe(GRPO()), rewards=[])
    with pytest.raises(UserError, match="name of its own"):
        roles_of(recipe(GRPO()), rewards=[digits, digits])
    with pytest.raises(UserError, match="critic's vocabulary"):
        roles_of(recipe(PPO()), critic=scalar_model(vocab_size=15))


def test_warm_up_trains_the_critic_and_leaves_the_actor_alone(
    causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path
) -> None:
    actor, critic = causal_lm(), scalar_model()
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    head = critic.score.weight.clone()
    used = recipe(PPO(), output_dir=str(tmp_path / "run"), steps=2, critic=CriticConfig(train=TRAIN, warmup_steps=2))
    objects = {"model": actor, "tokenizer": tokenizer, "rewards": [digits], "prompts": prompts, "critic": critic}
    RLTrainer(used, **objects).train()
    assert all(torch.equal(value, before[name]) for name, value in actor.state_dict().items())
    assert not torch.equal(critic.score.weight, head)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert not any("loss/policy" in row for row in rows) and all("loss/value" in row for row in rows[1:])
    assert rows[-1]["policy_version"] == 2.0, "versions advance all the same"


def test_prompts_come_in_a_new_order_every_pass_and_randomness_follows_the_place(roles_of: Any, prompts: Any) -> None:
    run_roles = roles_of(recipe(GRPO()))
    num = len(prompts)
    passes = [[run_roles.item(i).prompt_id for i in range(k * num, (k + 1) * num)] for k in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1]
    seeds = [one.seed for index in range(2 * num) for one in run_roles.requests(index)[1].samples.values()]
    assert len(set(seeds)) == len(seeds)
    assert run_roles.requests(5) == run_roles.requests(5)


def test_an_update_that_breaks_off_half_way_is_not_saved(
    causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C twice inside an optimizer step: the weights are of no step, so the checkpoint before stays the newest."""
    used = recipe(GRPO(), output_dir=str(tmp_path / "run"), steps=3, checkpoint=CheckpointConfig(every_steps=2))
    objects = {"model": causal_lm(), "tokenizer": tokenizer, "rewards": [digits], "prompts": prompts}
    trainer = RLTrainer(used, **objects)
    steps = 0

    def half(*_: Any, **__: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            with torch.no_grad():
                next(trainer.roles.actor.packed.model.parameters()).add_(1.0)
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer.roles.actor.optimizer, "step", half)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.run.saved_steps() == []


def test_a_reward_model_that_gives_nan_stops_the_run(
    causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    """NaN stands for "does not apply" in a column of rewards; a broken model must not pass for that."""
    broken = scalar_model()
    with torch.no_grad():
        broken.score.weight[0, 0] = float("nan")
    objects = {"model": causal_lm(), "tokenizer": tokenizer, "rewards": [broken], "prompts": prompts}
    trainer = RLTrainer(recipe(GRPO(), output_dir=str(tmp_path / "run")), **objects)
    with pytest.raises(UserError, match="not finite"):
        trainer.train()
    assert trainer.roles.actor.num_updates == 0


def test_a_saved_reward_model_reads_the_policys_own_tokens(
    causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    """Also where saving gave it a pad token, so that its vocabulary is larger than the policy's."""
    policy_tokenizer = copy.deepcopy(tokenizer)
    policy_tokenizer.pad_token = policy_tokenizer.eos_token
    packed = packed_scalar_model(scalar_model())
    seen = torch.ones(packed.model.config.vocab_size, dtype=torch.bool)
    assert save_scalar_model(packed, policy_tokenizer, tmp_path / "reward", seen=seen) is not None
    used = recipe(GRPO(), rewards=(ModelReward(path=str(tmp_path / "reward"), name="saved"),))
    run_roles = RLRoles(used, UserObjects(causal_lm(), policy_tokenizer, prompts=prompts))
    with closing(run_roles):
        (role,) = run_roles.reward_models
        assert role.codec is None, "no text is tokenised again"
        assert role.model.model.config.pad_token_id == packed.model.config.vocab_size


@pytest.fixture
def trainer(tiny_rl: Callable[..., RLTrainer], digits: Any, tmp_path: Path) -> Callable[..., RLTrainer]:
    def make(path: str, algorithm: Any, **changes: Any) -> RLTrainer:
        values = {"steps": 4, "prompts_per_step": 4, "responses_per_prompt": 2, **changes}
        saved = CheckpointConfig(every_steps=1)
        return tiny_rl(tmp_path / path, digits, algorithm=algorithm, checkpoint=saved, **values)

    return make


# The adaptive coefficient --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        RLOO(kl=KLConfig(coef=0.1, target=0.02, horizon=16)),
        GRPO(kl=KLConfig(coef=0.1, target=0.02, horizon=16, place="loss", estimator="k3")),
    ],
    ids=["reward", "loss"],
)
def test_the_adaptive_coefficient_goes_on_where_a_run_stopped(algorithm: Any, trainer: Any) -> None:
    whole = trainer("whole", algorithm)
    whole.train()
    coefficients = [row["kl/coef"] for row in untimed_rows(whole.path)[1:]]
    assert coefficients[0] == 0.1 and len(set(coefficients)) >= 3, "it moves"
    broken = trainer("broken", algorithm)
    break_at(3, broken.roles.actor)
    with pytest.raises(RuntimeError, match="on purpose"):
        broken.train()
    resumed = trainer("broken", algorithm, resume=True)
    resumed.train()
    assert untimed_rows(resumed.path)[1:] == untimed_rows(whole.path)[1:]
    assert same_weights(resumed.roles.actor.packed.model, whole.roles.actor.packed.model)


# Iterative DPO -------------------------------------------------------------------------------------------


def test_with_adapters_the_reference_takes_over_the_merged_weights(
    trainer: Any, causal_lm: Any, tmp_path: Path
) -> None:
    causal_lm().save_pretrained(tmp_path / "start")
    adapted = ActorConfig(train=TrainConfig(optim=OptimConfig(lr=3e-2), lora=LoRAConfig(rank=4)))
    run = trainer(
        "run", OnlineDPO(refresh_steps=2), actor=adapted, reference=ReferenceConfig(path=str(tmp_path / "start"))
    )
    run.train()
    rows = untimed_rows(run.path)[1:]
    assert [row["reference/age"] for row in rows] == [1, 0, 1, 0]
    assert abs(rows[0]["kl/ref"]) < 1e-5 and abs(rows[2]["kl/ref"]) < 1e-5, "it is what the actor is"
    assert abs(rows[1]["kl/ref"]) > 1e-4 and abs(rows[3]["kl/ref"]) > 1e-4, "and stays when the actor goes on"


# Before a run starts -------------------------------------------------------------------------------------


# Figures -------------------------------------------------------------------------------------------------


NAN = float("nan")


def assembled(config: AlgorithmConfig, scores: Sequence[float], ended: Sequence[bool], **columns: float) -> Experience:
    """One group of two-token responses; ``columns`` holds one value for every response token."""
    names = [f"0.{r}" for r in range(len(scores))]
    batch = RaggedBatch.from_groups([[5, 6]], [[[7, 8]] * len(scores)], names)
    mask = batch.sequence_index() >= 0
    batch = batch.with_token(action_mask=mask, loss_mask=mask, rollout_logprobs=torch.zeros(batch.num_tokens))
    batch = batch.with_token(**{name: mask.float() * value for name, value in columns.items()}).with_sequence(
        group=torch.zeros(len(names), dtype=torch.int64),
        response=torch.arange(len(names)),
        ended=torch.tensor(list(ended)),
    )
    found = ColumnSet(batch.ids, sequence={"reward/score": torch.tensor(list(scores))})
    return ExperienceAssembler(config, {"score": 1.0}, lambda: config.kl.coef)([(Chunk(0, 0, batch), [found])])


def trainer_of_rl(
    tmp_path: Path,
    causal_lm: Any,
    tokenizer: Any,
    functions: Sequence[Any] = (lambda completions: [float(len(text)) for text in completions],),
    prompts: Sequence[Any] = ({"prompt": "1+2="}, {"prompt": "3+4="}),
    **changes: Any,
) -> RLTrainer:
    values: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "algorithm": PPO(kl=KLConfig(coef=0.1, target=1.0, horizon=100)),
        "critic": {"warmup_steps": 1},
        "rollout": {"sampling": {"max_new_tokens": 2}},
        "steps": 1,
        "prompts_per_step": 2,
        "log": LogConfig(tensorboard=False),
        "threads": 1,
        **changes,
    }
    given: dict[str, Any] = {"rewards": list(functions), "prompts": list(prompts)}
    return RLTrainer(RLRecipe(**values), model=causal_lm(), tokenizer=tokenizer, **given)


def test_the_adaptive_coefficient_sees_the_responses_that_take_part() -> None:
    config = PPO(kl=KLConfig(coef=0.1, target=1.0, horizon=100))
    kl = KLCoefficient(config, warmup_steps=1)
    # 2 nats in each of the two responses that have a score; the others have none.
    scores, ended = [1.0, NAN, 1.0, NAN], [True] * 4
    experience = assembled(config, scores, ended, old_logprobs=-1.0, ref_logprobs=-2.0, values=0.0)
    kl.adapt(experience.batch, step=0)
    assert kl.value == 0.1, "the actor rests"
    kl.adapt(experience.batch, step=1)
    assert kl.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 100))


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_run_within_a_reward_is_refused_and_does_not_wait_for_ever(
    kind: str, tmp_path: Path, causal_lm: Any, tokenizer: Any
) -> None:
    def inner() -> None:
        trainer_of_rl(tmp_path / "inner", causal_lm, tokenizer).train()

    def plain(completions: list[str]) -> list[float]:
        inner()
        return [0.0] * len(completions)

    async def waiting(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return plain(completions)

    reward = plain if kind == "plain" else waiting
    with pytest.raises(UserError, match=f"the reward '{reward.__name__}' starts a run inside of another one"):
        trainer_of_rl(tmp_path, causal_lm, tokenizer, functions=[reward]).train()
    assert current_guarded_code() is None


def test_a_budget_below_the_longest_response_is_refused_before_anything_starts(
    tmp_path: Path, causal_lm: Any, tokenizer: Any
) -> None:
    check_budget(6, 6, "key")
    with pytest.raises(UserError, match=r"actor\.train\.token_budget"):
        trainer_of_rl(tmp_path, causal_lm, tokenizer, actor={"train": {"token_budget": 5}})
    trainer_of_rl(tmp_path, causal_lm, tokenizer, actor={"train": {"token_budget": 6}})


@pytest.mark.parametrize("share", [True, False])
def test_a_pair_of_responses_has_to_fit_the_budget(share: bool, trainer: Any) -> None:
    def with_budget(name: str, tokens: int) -> RLTrainer:
        train = TrainConfig(token_budget=tokens, share_prefixes=share)
        return trainer(name, OnlineDPO(), actor=ActorConfig(train=train))

    prompt = max(item.num_tokens for item in with_budget("large", 1000).roles.prompts.items)
    needed = (1 if share else 2) * prompt + 2 * 5
    with pytest.raises(UserError, match="token_budget is too small") as caught:
        with_budget("small", needed - 1)
    assert f"{needed} tokens" in caught.value.found
    with_budget("enough", needed)


def test_a_critic_that_is_not_read_is_refused_and_its_section_remarked_on(
    trainer: Any, scalar_model: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the method does not have"):
        trainer("refused", GRPO(), critic_model=scalar_model())
    assert not (tmp_path / "refused").exists()
    run = trainer("said", GRPO(), critic=CriticConfig(warmup_steps=1), steps=1)
    assert run.train().summary["notes"][0] == "critic: not read, grpo has none"
    assert not any("not read" in warning for warning in trainer("ppo", PPO()).roles.warnings())


def test_a_reference_with_a_short_context_is_refused(roles_of: Any, causal_lm: Any, tmp_path: Path) -> None:
    causal_lm(1, max_position_embeddings=6).save_pretrained(tmp_path / "short")
    with pytest.raises(UserError, match="reference's context is too short"):
        roles_of(recipe(Distillation(), reference=ReferenceConfig(path=str(tmp_path / "short"))))


def test_a_reference_of_another_size_takes_over_no_weights(trainer: Any, causal_lm: Any, tmp_path: Path) -> None:
    causal_lm(num_hidden_layers=1).save_pretrained(tmp_path / "small")
    other = ReferenceConfig(path=str(tmp_path / "small"))
    trainer("fixed", OnlineDPO(), reference=other)
    with pytest.raises(UserError, match="cannot take over") as caught:
        trainer("run", OnlineDPO(refresh_steps=2), reference=other)
    assert "layers.1." in caught.value.found
    assert not (tmp_path / "run").exists()
