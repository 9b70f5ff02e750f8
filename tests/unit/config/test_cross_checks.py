"""What does not fit together is refused with its reason; every method and every recipe in the repository loads."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from quartet.config.algorithms import AlgorithmConfig, kl_term, reads_reference
from quartet.config.errors import UserError
from quartet.config.load import dump_recipe, load_recipe
from quartet.config.recipe import RLRecipe, unused_settings
from quartet.config.strict import discriminator_values, union_members

RL = ["actor.model.path=m", "data.path=d.jsonl", "responses_per_prompt=4"]
ROLES = "actor, critic, reference, reward, rollout"
NAMES = sorted(discriminator_values(union_members(AlgorithmConfig))[1])


def rl(*overrides: str) -> RLRecipe:
    recipe = load_recipe("rl", None, [*RL, *overrides])
    assert isinstance(recipe, RLRecipe)
    return recipe


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        rl(*overrides)
    return caught.value.found


def teacher(name: str) -> list[str]:
    return ["reference.path=t"] if name == "distillation" else []


@pytest.mark.parametrize("name", NAMES)
def test_every_method_is_one_line_and_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    recipe = rl(f"algorithm.name={name}", *teacher(name))
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe("rl", path) == recipe


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.name=grpo", "responses_per_prompt=1"], "grpo compares the responses of a group"),
        (
            ["algorithm.name=gspo", "algorithm.off_policy.level=token"],
            "algorithm.policy_loss gspo has a ratio of the sequence: set algorithm.off_policy.level: sequence",
        ),
        (["algorithm.name=pass_at_k", "algorithm.k=4"], "algorithm.k (4) must be less than responses_per_prompt (4)"),
        (["algorithm.name=gspo", "algorithm.top_entropy_quantile=0.2"], "leaves out tokens of it: use a loss of"),
        (
            [
                "algorithm.name=optimal_token_baseline",
                "rollout.sampling.top_k=5",
                "rollout.sampling.truncated_logprobs=true",
            ],
            "optimal_token_baseline reads probabilities of the whole vocabulary",
        ),
        (["algorithm.reward_clip_range=[2, 1]"], "reward_clip_range needs a lower limit and a higher one"),
        (["algorithm.policy_loss={name: clip_cov, clip_cov_lb: 9}"], "clip_cov_lb (9) must be less than clip_cov_ub"),
        (["algorithm={name: online_dpo, loss: {name: aot}}"], "aot"),
        (["algorithm.policy_loss.name=gspo"], "gspo has one ratio per response, ppo one advantage per token"),
        (
            ["algorithm.overlong.buffer=64", "rollout.sampling.max_new_tokens=64"],
            "algorithm.overlong.buffer (64) must be less than rollout.sampling.max_new_tokens (64)",
        ),
        (["algorithm.name=distillation"], "distillation needs reference.path, the teacher"),
        (["rollout.sampling.temperature=0"], "greedy rollouts cannot be trained on"),
        (["algorithm.kl.target=1", "algorithm.kl.horizon=5"], "the coefficient would jump"),
        (["numerics=exact", "threads=2"], "numerics: exact needs threads: 1"),
        (["numerics=exact", "actor.train.precision=bf16"], "numerics: exact needs precision: fp32"),
        (
            ["rewards.0={type: model, path: a}", "rewards.1={type: model, path: b}"],
            "two rewards have the same name: ['reward_model', 'reward_model']",
        ),
        (["rewards.0={type: model, path: a, name: actor}"], "a reward model is called 'actor', as a role"),
        (["algorithm.name=remax", "rewards.0={type: process_model, path: a}"], "pays steps one by one"),
        (["algorithm.name=best_of_n", "algorithm.keep=4"], "algorithm.keep (4) must be less than responses_per_prompt"),
        (["numerics=exact", "device=cuda"], "numerics: exact needs the CPU; found device: cuda"),
        (["numerics=exact", "cluster={type: ray, gpus_per_process: 1}"], "found cluster.gpus_per_process: 1"),
        (["numerics=exact", "actor.train.compile=true"], "the model's own layers"),
        (["environment={}", "algorithm.name=remax"], "no greedy episodes"),
        (["environment={}", "algorithm.name=online_dpo"], "episodes see different states"),
        (["environment={}", "algorithm.overlong.buffer=4"], "which holds for each turn of an episode"),
        ([f"placement={{type: asynchronous, pools: {{all: {{roles: [{ROLES}]}}}}}}"], "up to 1 versions old"),
        (["actor.sharding.shard=2"], "actor.sharding is shard 2, but the model has 1 process"),
        (
            [
                "placement={type: separated, actor: {processes: 4}, rollout: {}, reward: {processes: 2}}",
                "rewards=[{type: model, path: x, sharding: {shard: 4}}]",
            ],
            "rewards.0.sharding is shard 4, but the model has 2 processes",
        ),
        (
            ["placement={type: full_offload, pool: {processes: 6}}", "reference.sharding={tensor: 2, context: 2}"],
            "reference.sharding is context 2 × tensor 2, but the model has 6 processes, of which the product must be a "
            "divisor: 1, 2, 3, 6",
        ),
        (
            ["numerics=exact", "placement={type: full_offload, pool: {processes: 2}}", "actor.sharding.context=2"],
            "numerics: exact needs every sum in one process, in the order of the engine's: actor.sharding.context",
        ),
        (
            [
                "placement={type: full_offload, pool: {processes: 2}}",
                "reference.sharding.tensor=2",
                "rollout.sampling={top_k: 4, truncated_logprobs: true}",
            ],
            "each process has a part under reference.sharding.tensor: use reference.sharding.context",
        ),
        (
            [
                "placement={type: full_offload, pool: {processes: 2}}",
                "actor.sharding.tensor=2",
                "actor.train.compile=true",
            ],
            "actor.sharding.tensor is 2: processes exchange rows within a pass, which torch.compile cannot follow",
        ),
        (
            [
                "placement={type: full_offload, pool: {processes: 2}}",
                "critic.sharding.pipeline=2",
                "critic.train.compile=true",
            ],
            "critic.sharding.pipeline is 2: processes exchange rows within a pass, which torch.compile cannot follow; "
            "leave train.compile out, or use shard alone",
        ),
        (
            ["placement={type: full_offload, pool: {processes: 6}}", "actor.sharding={pipeline: 2, tensor: 2}"],
            "actor.sharding is pipeline 2 × tensor 2, but the model has 6 processes, of which the product must be a "
            "divisor: 1, 2, 3, 6",
        ),
        (
            ["placement={type: full_offload, pool: {processes: 2}}", "actor.sharding.cpu_offload=true"],
            "actor.sharding.cpu_offload is on, but actor.sharding.shard is 1: only models that are cut",
        ),
        (
            [
                "placement={type: full_offload, pool: {processes: 2, budget_bytes: 100}}",
                "actor.sharding={shard: 2, cpu_offload: true}",
            ],
            "actor.sharding.cpu_offload keeps the model in host memory, and the pool's budget_bytes",
        ),
        (["cluster.type=ray"], "cluster.type ray needs a placement"),
        (["cluster.type=ray", "device=cuda:1"], "Ray decides which GPU a process sees"),
        (["cluster.type=ray", "critic.train.compile=true"], "cluster.max_restarts: 0, or leave train.compile out"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(overrides: list[str], reason: str) -> None:
    assert reason in refused(*overrides)


def test_all_reasons_are_given_at_once() -> None:
    found = refused(
        "algorithm.name=distillation", "rollout.sampling.temperature=0", "prompts_per_step=5", "minibatches=2"
    )
    for reason in ("minibatches (2)", "greedy rollouts", "the teacher"):
        assert reason in found


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=rloo", "algorithm.aggregation=sequence_mean_token_mean", "algorithm.entropy_coef=0.1"],
        ["algorithm.name=rloo", "algorithm.policy_loss.name=gspo", "algorithm.off_policy.level=sequence"],
        ["algorithm.name=grpo", "algorithm.policy_loss.name=cispo", "algorithm.policy_loss.clip_eps_low=0.1"],
        ["algorithm.name=cispo", "algorithm.off_policy.level=token"],
        ["algorithm.name=reinforce_pp", "responses_per_prompt=1"],
        ["algorithm.overlong.buffer=63", "rollout.sampling.max_new_tokens=64"],
        ["algorithm.name=reinforce_pp_baseline", "algorithm.policy_loss.name=sequence_clipped"],
    ],
)
def test_what_fits_is_taken(overrides: list[str]) -> None:
    recipe = rl(*overrides)
    for override in overrides:
        path, _, value = override.partition("=")
        assert str(attrgetter(path)(recipe)) == value


def test_options_of_one_loss_or_method_belong_to_no_other() -> None:
    assert "'dual_clip' in algorithm.policy_loss" in refused("algorithm.name=gspo", "algorithm.policy_loss.dual_clip=3")
    assert "'kl' in algorithm" in refused("algorithm.name=distillation", "algorithm.kl.coef=0.1", "reference.path=t")
    assert "'dynamic_sampling' in algorithm" in refused("algorithm.name=reinforce_pp", "algorithm.dynamic_sampling={}")


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("grpo", "sequence_mean_token_mean"),
        ("dr_grpo", "sequence_mean_token_sum_norm"),
        ("dapo", "token_mean"),
        ("gspo", "sequence_mean_token_mean"),
        ("cispo", "token_mean"),
        ("gpg", "token_mean"),
    ],
)
def test_losses_are_averaged_as_the_papers_do(name: str, aggregation: str) -> None:
    assert rl(f"algorithm.name={name}").algorithm.aggregation == aggregation


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["algorithm.name=grpo", "critic.warmup_steps=2"], "critic: not read, grpo has none"),
        (["algorithm.name=rloo", "critic.path=c"], "critic: not read, rloo has none"),
        (["steps=3", "critic.warmup_steps=3"], "leave no step in which the actor learns"),
        (["algorithm.name=grpo", "reference.path=r"], "reference: not loaded, grpo reads none"),
        (["algorithm.name=best_of_n", "reference.path=r"], "reference: not loaded, best_of_n reads none"),
        (["algorithm.kl.place=loss"], "the gradient of k1 is 0 on average"),
    ],
)
def test_what_does_nothing_is_remarked_on(overrides: list[str], warning: str) -> None:
    (found,) = unused_settings(rl(*overrides))
    assert warning in found


@pytest.mark.parametrize(
    "overrides",
    [
        ["critic.warmup_steps=2", "critic.path=c", "reference.path=r"],
        ["algorithm.name=grpo"],
        ["algorithm.name=grpo", "algorithm.kl.coef=0.1", "reference.path=r"],
        ["algorithm.name=distillation", "reference.path=r"],
        ["algorithm.name=online_dpo", "reference.path=r"],
    ],
)
def test_what_is_read_is_not_remarked_on(overrides: list[str]) -> None:
    assert unused_settings(rl(*overrides)) == []


def test_who_reads_a_reference() -> None:
    assert reads_reference(rl().algorithm)
    assert not reads_reference(rl("algorithm.kl.coef=0").algorithm)
    assert not reads_reference(rl("algorithm.name=grpo").algorithm)
    distillation = rl("algorithm.name=distillation", "reference.path=t").algorithm
    assert reads_reference(distillation) and kl_term(distillation).coef == 0
