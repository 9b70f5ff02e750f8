"""Groups that were ready before their step: saved with a checkpoint and taken back, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.batch.columns import ColumnSet
from quartet.config import UserError
from quartet.data.datasets import PromptItem
from quartet.envs.episode import Episode, EpisodeEnd
from quartet.envs.transcript import EpisodeSequence
from quartet.observe.rollouts import RolloutRecord
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.groups import PromptGroup, chunk_of, staleness_metrics
from quartet.schedule.stream import Ahead
from quartet.text.tokenizer import TextCodec
from quartet.train.checkpoint import load_checkpoint, save_checkpoint
from quartet.trainers.episodes import AnyGroup, EpisodeGroup, episode_chunk
from quartet.trainers.in_flight import ahead_from_state, ahead_state
from quartet.trainers.records import rollout_records


def item(index: int) -> PromptItem:
    return PromptItem(f"p{index}", (index, 4), [{"role": "user", "content": f"{index}"}], {"answer": 3}, "here")


def completion(index: int, r: int, versions: tuple[int, ...], text_end: int | None = None) -> Completion:
    num = len(versions)
    logprobs = tuple(-math.pi / (k + 1) for k in range(num))
    return Completion(f"{index}.{r}", f"{index}", tuple(range(num)), logprobs, versions, FinishReason.STOP, text_end)


def prompt_group(index: int) -> PromptGroup:
    rewards = ColumnSet((f"{index}.0", f"{index}.1"), sequence={"reward/x": torch.tensor([0.1, math.inf])})
    made = (completion(index, 0, (2, 2, 3), 5), completion(index, 1, (3,)))
    return PromptGroup(index, item(index), item(index).token_ids, made, completion(index, 2, (3, 3)), (rewards,))


def episode_group(index: int) -> EpisodeGroup:
    first = EpisodeSequence(
        prompt_ids=(1, 2),
        token_ids=(5, 6, 7, 8),
        action_mask=(True, False, False, True),
        logprobs=(-0.1, 0.0, 0.0, -0.2),
        rewards=(0.5, 0.0, 0.0, 1.0),
        versions=(4, -1, -1, 5),
        state=[{"role": "user", "content": "hello"}],
        completion="x",
        finish_reason="stop",
        num_turns=2,
    )
    second = replace(first, versions=(5, -1, -1, 6), state="text")
    return EpisodeGroup(index, item(index), (Episode((first, second), 4, 1.5, EpisodeEnd.MAX_TURNS),))


@pytest.mark.parametrize("make", [prompt_group, episode_group])
def test_groups_come_back_from_a_checkpoint_as_they_were(make: Callable[[int], AnyGroup], tmp_path: Path) -> None:
    ahead: Ahead[AnyGroup] = Ahead({7: make(7), 9: make(9)}, rejected=(8,))
    save_checkpoint(tmp_path, 3, {"ahead": ahead_state(ahead)}, {}, keep=1)
    found = ahead_from_state(load_checkpoint(tmp_path, 3)[0]["ahead"], item)
    assert found.rejected == (8,) and list(found.groups) == [7, 9]
    for index, group in ahead.groups.items():
        other = found.groups[index]
        assert replace(other, rewards=()) == replace(group, rewards=())
        for mine, theirs in zip(group.rewards, other.rewards, strict=True):
            assert mine.ids == theirs.ids and torch.equal(mine.sequence["reward/x"], theirs.sequence["reward/x"])
    assert ahead_state(Ahead()) is None


def test_answers_to_other_prompts_are_not_taken_back() -> None:
    state = ahead_state(Ahead({7: prompt_group(7)}))
    assert state is not None
    with pytest.raises(UserError, match="data or the tokenizer changed") as caught:
        ahead_from_state(state, lambda index: item(index + 1))
    assert "prompt 7 of the run, 'p8'" in caught.value.found


def test_every_token_knows_the_weights_that_sampled_it() -> None:
    chunk = chunk_of(4, 0, [prompt_group(7)], lambda ids, made: "text").data
    assert chunk.token["policy_version"].tolist() == [-1, -1, 2, 2, 3, 3]
    assert chunk.sequence["version"].tolist() == [2, 3], "the oldest of each"
    assert prompt_group(7).first_version == 2 and prompt_group(7).consumed() == (7, ((2, 2), (3, 2)))
    assert staleness_metrics(chunk, 4) == {"staleness/mean": 1.5, "staleness/max": 2.0}


def test_so_do_the_tokens_of_episodes() -> None:
    batch = episode_chunk(6, 0, [episode_group(7)]).data
    assert batch.token["policy_version"].tolist() == [-1, -1, 4, -1, -1, 5, 5, -1, -1, 6]
    assert batch.sequence["version"].tolist() == [4, 5] and episode_group(7).first_version == 4
    assert staleness_metrics(batch, 6) == {"staleness/mean": 1.0, "staleness/max": 2.0}


def test_records_show_versions_token_by_token_only_where_they_differ(tokenizer: Any) -> None:
    def records(*groups: PromptGroup) -> list[RolloutRecord]:
        batch = chunk_of(4, 0, groups, lambda ids, made: "text").data
        batch = batch.with_sequence(score=torch.zeros(len(batch)))
        return rollout_records(batch, TextCodec(tokenizer))

    mixed = PromptGroup(7, item(7), item(7).token_ids, (completion(7, 0, (2, 2, 3)), completion(7, 1, (3,))))
    first, second = records(mixed)
    assert (first.policy_version, first.columns["policy_version"]) == (2, [2.0, 2.0, 3.0])
    assert (second.policy_version, second.columns["policy_version"]) == (3, [3.0])
    whole = replace(mixed, completions=(completion(7, 0, (2, 2, 2)), completion(7, 1, (3,))))
    assert [(r.policy_version, "policy_version" in r.columns) for r in records(whole)] == [(2, False), (3, False)]
