"""A process reward model inside RL: which tokens get which scores, and what estimators make of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import GRPO, PPO, RLOO, KLConfig, ReinforcePlusPlus, ReMax
from quartet.config.common import TrainConfig
from quartet.config.recipe import RLRecipe
from quartet.data.datasets import PromptItem
from quartet.extras.process_rewards.config import DiscountedSteps, MinSteps, ProcessModelReward, SumSteps
from quartet.extras.process_rewards.data import save_step_separator
from quartet.extras.process_rewards.roles import ProcessModelRole, step_ends
from quartet.observe.spans import SpanRecorder
from quartet.schedule.iteration import Chunk
from quartet.schedule.leases import LeaseContext, default_arbiter
from quartet.schedule.role_group import LocalGroup
from quartet.text.tokenizer import TextCodec
from quartet.trainers.devices import FrozenModels
from quartet.trainers.experience import Experience, ExperienceAssembler
from quartet.trainers.model_loader import reward_models
from split_workers import SplitWorkers, without_ids

NO_KL = KLConfig(coef=0.0)
ANSWERS = [["1;2;3", "12;"], ["4", "1;;2;"]]
ENDED = [True, True, False, True]


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    """The policy's: one token per character."""
    return TextCodec(tokenizer)


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Another kind, with ids of its own."""
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate(["<eos>", *"=+0123456789;"])}, []))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def role_of(
    scalar_model: Callable[..., Any], tokenizer: Any, codec: TextCodec, tmp_path: Path
) -> Callable[..., ProcessModelRole]:
    """A saved process reward model as a role; ``own`` is its tokenizer."""

    def make(own: Any = None, trained_with: str | None = ";", **changes: Any) -> ProcessModelRole:
        own = tokenizer if own is None else own
        model = scalar_model(vocab_size=len(own))
        # A head of unit size, so that the scores of steps differ.
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
        path = tmp_path / "model"
        model.save_pretrained(path)
        # Beside the model it would be loaded as the tokenizer of the model's kind.
        own.save_pretrained(tmp_path / "tokenizer")
        if trained_with is not None:
            save_step_separator(trained_with, path)
        config = ProcessModelReward(path=str(path), tokenizer=str(tmp_path / "tokenizer"), **changes)
        (role,) = reward_models([config], (), codec, TrainConfig(), FrozenModels())
        return role

    return make


def chunk_with(codec: TextCodec, answers: Sequence[Sequence[str]] = ANSWERS, step: int = 2) -> Chunk:
    """Groups of answers to ``1+1=``, ``2+2=``, …; those that did not end lack end-of-text."""
    prompts = [codec.encode_prompt(f"{n}+{n}=") for n in (1, 2)]
    items = [PromptItem(f"p{n}", f"{n}+{n}=", {}, "", len(ids)) for n, ids in enumerate(prompts, 1)]
    eos, ended = codec.eos_id, iter(ENDED)
    ids = [[codec.tokenizer(text)["input_ids"] + ([eos] if next(ended) else []) for text in group] for group in answers]
    members = [(g, r) for g, group in enumerate(answers) for r in range(len(group))]
    batch = RaggedBatch.from_groups(prompts, ids, [f"{g}.{r}" for g, r in members])
    mask = batch.sequence_index() >= 0
    batch = batch.with_token(action_mask=mask, loss_mask=mask, rollout_logprobs=torch.zeros(batch.num_tokens))
    batch = batch.with_sequence(
        group=torch.tensor([g for g, _ in members]),
        response=torch.tensor([r for _, r in members]),
        ended=torch.tensor(ENDED),
    ).with_objects(
        prompt=[items[g] for g, _ in members], completion=[text for group in answers for text in group]
    )  # fmt: skip
    return Chunk(step, 0, batch)


def score(role: ProcessModelRole, chunk: Chunk) -> Any:
    worker = LeaseContext(default_arbiter({role.name: role.worker().sizes()}, version=0), SpanRecorder())
    return asyncio.run(role.scorer(worker, LocalGroup(role.worker())).score(chunk))


def plain_logit(role: ProcessModelRole, ids: Sequence[int]) -> float:
    """The head on the last hidden state of exactly these ids, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(role.config.path).eval()
    with torch.no_grad():
        hidden = model.model(torch.tensor([list(ids)])).last_hidden_state[0, -1]
    return float(hidden @ model.score.weight[0].detach())


def ends_of(batch: RaggedBatch, s: int, codec: TextCodec) -> list[str]:
    """The text up to each step's last token."""
    start, _ = batch.leaf_span(s)
    ends = step_ends(batch, s, codec, ";")
    return [codec.decode(batch.input_ids[start : t + 1].tolist(), skip_special=False) for t in ends]


# Where steps end -----------------------------------------------------------------------------------------


def test_steps_of_the_policys_own_tokens(codec: TextCodec) -> None:
    batch = chunk_with(codec).data
    assert ends_of(batch, 0, codec) == ["1;", "1;2;", "1;2;3<eos>"]
    assert ends_of(batch, 1, codec) == ["12;"], "what stands behind the last separator is end-of-text alone"
    assert ends_of(batch, 2, codec) == ["4"], (
        "without a separator the whole is one step; cut off, it ends where it ends"
    )
    assert ends_of(batch, 3, codec) == ["1;", "1;;2;"], "an empty stretch is no step"


def test_a_turn_ends_its_last_step(codec: TextCodec) -> None:
    """Tokens that the policy did not emit stand between two turns and belong to no step."""
    batch = chunk_with(codec).data
    start, stop = batch.leaf_span(0)
    mask = batch.token["action_mask"].clone()
    mask[start + 3] = False  # of 1;2;3<eos> the second separator
    batch = batch.with_token(action_mask=mask)
    assert [t - start for t in step_ends(batch, 0, codec, ";")] == [1, 2, 5]
    assert stop - start == 6


# Scores --------------------------------------------------------------------------------------------------


def test_scores_of_own_tokens_are_the_models_at_each_steps_end(role_of: Any, codec: TextCodec) -> None:
    role = role_of(combine=SumSteps())
    chunk = chunk_with(codec)
    found = score(role, chunk)
    batch = chunk.data
    scores = found.token["step_score/process_reward"]
    total = 0
    for s in range(len(batch)):
        ids = batch.token_ids(s)
        ends = step_ends(batch, s, codec, ";")
        prefixes = [ids[: len(ids) - (batch.leaf_span(s)[1] - t - 1)] for t in ends]
        expected = [1 / (1 + math.exp(-plain_logit(role, prefix))) for prefix in prefixes]
        assert scores[ends].tolist() == pytest.approx(expected, abs=1e-5)
        assert float(found.sequence["reward/process_reward"][s]) == pytest.approx(sum(expected), abs=1e-5)
        total += len(ends)
    assert int((~scores.isnan()).sum()) == total == 7
    credits = found.token["step_reward/process_reward"]
    assert torch.equal(credits, scores.nan_to_num(0.0)), "the rule is a sum"


@pytest.mark.parametrize("combine", [SumSteps(), MinSteps(), DiscountedSteps(gamma=0.5)])
def test_rules_over_the_scores(role_of: Any, codec: TextCodec, combine: Any) -> None:
    chunk = chunk_with(codec)
    found = score(role_of(combine=combine), chunk)
    owner = chunk.data.sequence_index()
    for s in range(len(chunk.data)):
        values = found.token["step_score/process_reward"][owner == s]
        steps = values[~values.isnan()].tolist()
        assert all(0 < value < 1 for value in steps)
        expected = {
            "sum": sum(steps),
            "min": min(steps),
            "discounted": sum(0.5**k * value for k, value in enumerate(steps)),
        }[combine.name]
        assert float(found.sequence["reward/process_reward"][s]) == pytest.approx(expected, abs=1e-6)
        credits = found.token["step_reward/process_reward"][owner == s]
        assert float(credits.sum()) == pytest.approx(expected, abs=1e-6)
        assert not bool(credits[values.isnan()].any())


def test_a_trajectory_of_two_sequences_has_one_process_reward(role_of: Any, codec: TextCodec) -> None:
    """Steps go on from one sequence to the next; the number stands on the last."""
    chunk = chunk_with(codec)
    batch = chunk.data.pop("response")[0].with_sequence(response=torch.tensor([0, 0, 0, 1]))
    found = score(role_of(combine=MinSteps()), Chunk(0, 0, batch))
    owner = batch.sequence_index()
    values = found.token["step_score/process_reward"][(owner == 0) | (owner == 1)]
    rewards = found.sequence["reward/process_reward"]
    assert math.isnan(float(rewards[0])) and not bool(rewards[1:].isnan().any())
    assert float(rewards[1]) == float(values[~values.isnan()].min())
    credits = found.token["step_reward/process_reward"][(owner == 0) | (owner == 1)]
    assert float(credits.sum()) == pytest.approx(float(rewards[1]), abs=1e-6)


def test_only_workers_read_token_ids_however_many_there_are(role_of: Any, codec: TextCodec) -> None:
    """The two sequences of a trajectory come to different workers, and with five of them one has nothing to read."""
    role = role_of(combine=MinSteps())
    chunk = chunk_with(codec)
    batch = chunk.data.pop("response")[0].with_sequence(response=torch.tensor([0, 0, 0, 1]))
    expected = score(role, replace(chunk, data=batch))
    worker = LeaseContext(default_arbiter({role.name: role.worker().sizes()}, version=0), SpanRecorder())
    group = SplitWorkers([role.worker() for _ in range(5)], batch)
    found = asyncio.run(role.scorer(worker, group).score(replace(chunk, data=without_ids(batch))))
    for ours, theirs in ((found.token, expected.token), (found.sequence, expected.sequence)):
        assert ours.keys() == theirs.keys()
        for name, values in ours.items():
            assert torch.equal(values.isnan(), theirs[name].isnan()), name
            assert values.nan_to_num().tolist() == pytest.approx(theirs[name].nan_to_num().tolist(), abs=1e-6), name
    assert int((~found.token["step_score/process_reward"].isnan()).sum()) == 7


# Loading -------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_say_how_steps_end_needs_the_recipe_to(role_of: Any, codec: TextCodec) -> None:
    with pytest.raises(UserError, match="not known how the steps"):
        role_of(trained_with=None)


def test_a_model_that_does_not_read_what_the_policy_writes_is_refused(role_of: Any) -> None:
    with pytest.raises(UserError, match="does not read what the policy writes"):
        role_of(separator="=")
    with pytest.raises(UserError, match="does not read what the policy writes"):
        role_of(other_tokenizer())
    with pytest.raises(UserError, match="does not keep the separator"):
        role_of(trained_with="#")


def test_the_recipes_separator_stands_in_for_a_missing_one(
    scalar_model: Any, tokenizer: Any, codec: TextCodec, tmp_path: Path
) -> None:
    scalar_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    configs = [ProcessModelReward(path=str(tmp_path), separator="=")]
    (role,) = reward_models(configs, (), codec, TrainConfig(), FrozenModels())
    assert role.separator == "="


# What estimators make of it ------------------------------------------------------------------------------


def experience(algorithm: Any, role: ProcessModelRole, codec: TextCodec, outcome: Sequence[float]) -> Experience:
    chunk = chunk_with(codec)
    columns = score(role, chunk)
    data = chunk.data.with_sequence(**{"reward/exact": torch.tensor(list(outcome))})
    data = data.with_token(values=torch.zeros(data.num_tokens))
    weights = {"exact": 1.0, role.name: 0.5}
    return ExperienceAssembler(algorithm, weights, lambda: 0.0)([(Chunk(2, 0, data), [columns])])


OUTCOME = (1.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize("combine", [MinSteps(), DiscountedSteps(gamma=0.5)])
@pytest.mark.parametrize(
    "algorithm", [PPO(kl=NO_KL, whiten_advantages=False, gae_lambda=1.0), ReinforcePlusPlus(kl=NO_KL)]
)
def test_token_rewards_hold_each_step_on_its_last_token(
    role_of: Any, codec: TextCodec, algorithm: Any, combine: Any
) -> None:
    role = role_of(combine=combine)
    found = experience(algorithm, role, codec, OUTCOME).batch
    credits = found.token["step_reward/process_reward"]
    expected = 0.5 * credits.clone()
    for s, outcome in enumerate(OUTCOME):
        expected[found.leaf_span(s)[1] - 1] += outcome
    torch.testing.assert_close(found.token["token_rewards"], expected.float(), atol=1e-6, rtol=0)
    totals = torch.tensor(OUTCOME) + 0.5 * found.sequence["reward/process_reward"]
    torch.testing.assert_close(found.sequence["total_reward"].float(), totals.float(), atol=1e-6, rtol=0)
    if isinstance(algorithm, PPO):
        # Values are 0 and lambda is 1: an advantage is what is still earned from there on.
        for s in range(len(found)):
            start, stop = found.leaf_span(s)
            to_go = [float(expected[t:stop].sum()) for t in range(start, stop)]
            assert found.token["advantages"][start:stop].tolist() == pytest.approx(to_go, abs=1e-5)


@pytest.mark.parametrize("algorithm", [GRPO(kl=NO_KL, normalise_std=False), RLOO(kl=NO_KL)])
def test_group_methods_read_one_number_per_answer(role_of: Any, codec: TextCodec, algorithm: Any) -> None:
    found = experience(algorithm, role_of(combine=MinSteps()), codec, OUTCOME).batch
    totals = (torch.tensor(OUTCOME) + 0.5 * found.sequence["reward/process_reward"]).tolist()
    factor = 1.0 if isinstance(algorithm, GRPO) else 2.0
    for s, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        advantage = factor * (totals[s] - (totals[s] + totals[other]) / 2)
        start, stop = found.leaf_span(s)
        assert found.token["advantages"][start:stop].tolist() == pytest.approx([advantage] * (stop - start), abs=1e-5)


def test_the_gap_between_right_and_wrong_is_reported(role_of: Any, codec: TextCodec) -> None:
    found = experience(GRPO(kl=NO_KL), role_of(combine=MinSteps()), codec, OUTCOME)
    process = found.batch.sequence["reward/process_reward"]
    assert found.metrics["process/gap_outcome"] == 1.0
    gap = 0.5 * float((process[0] + process[2] - process[1] - process[3]) / 2)
    assert found.metrics["process/gap_process"] == pytest.approx(gap, abs=1e-6)
    assert found.metrics["process/steps_mean"] == 7 / 4
    assert found.metrics["reward/process_reward"] == pytest.approx(float(process.mean()))
    same = experience(GRPO(kl=NO_KL), role_of(combine=MinSteps()), codec, (1.0, 1.0, 1.0, 1.0))
    assert "process/gap_outcome" not in same.metrics, "nobody is wrong"


def test_shuffled_scores_are_not_earned_on_the_way(role_of: Any, codec: TextCodec) -> None:
    """The control experiment: rewards of other answers, so none of them belongs to a step."""
    role = role_of(combine=SumSteps())
    chunk = chunk_with(codec)
    columns = score(role, chunk)
    data = chunk.data.with_token(values=torch.zeros(chunk.data.num_tokens))
    backwards = ExperienceAssembler(
        PPO(kl=NO_KL), {role.name: 1.0}, lambda: 0.0, lambda _, n: torch.arange(n - 1, -1, -1)
    )
    found = backwards([(Chunk(2, 0, data), [columns])]).batch
    rewards = found.sequence["reward/process_reward"].flip(0).tolist()
    for s in range(len(found)):
        start, stop = found.leaf_span(s)
        expected = [0.0] * (stop - start - 1) + [rewards[s]]
        assert found.token["token_rewards"][start:stop].tolist() == pytest.approx(expected, abs=1e-6)


def test_remax_with_a_process_reward_is_refused() -> None:
    source = ProcessModelReward(path="somewhere")
    with pytest.raises(UserError, match="takes the greedy response's whole score off every token"):
        RLRecipe(algorithm=ReMax(), rewards=(source,))
    RLRecipe(algorithm=ReinforcePlusPlus(), rewards=(source,))
