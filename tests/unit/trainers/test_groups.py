"""One type of group for one turn and for several: its layout, its versions, and its way through a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.batch.columns import ColumnSet
from quartet.batch.trajectory import Trajectory, TrajectoryEnd, TrajectorySequence
from quartet.config import UserError
from quartet.data.datasets import PromptItem
from quartet.observe.rollouts import RolloutRecord
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.groups import Group, ahead_from_state, ahead_state, answered, chunk_of, staleness_metrics
from quartet.schedule.stream import Ahead
from quartet.text.tokenizer import TextCodec
from quartet.train.checkpoint import begin_checkpoint, complete_checkpoint, newest_checkpoint
from quartet.trainers.records import rollout_records
from quartet.trainers.trajectories import Trajectories, num_emitted


def item(index: int) -> PromptItem:
    return PromptItem(f"p{index}", (index, 4), [{"role": "user", "content": f"{index}"}], {"answer": 3}, "here")


def completion(index: int, r: int, versions: tuple[int, ...], text_end: int | None = None) -> Completion:
    num = len(versions)
    logprobs = tuple(-math.pi / (k + 1) for k in range(num))
    return Completion(f"{index}.{r}", f"{index}", tuple(range(num)), logprobs, versions, FinishReason.STOP, text_end)


def response(index: int, r: int, versions: tuple[int, ...], text_end: int | None = None) -> Trajectory:
    return answered(item(index).token_ids, completion(index, r, versions, text_end))


def scored(index: int, *names: str) -> tuple[ColumnSet, ...]:
    values = torch.tensor([0.1, math.inf, 2.0])[: len(names)]
    return (ColumnSet(tuple(f"{index}.{name}" for name in names), sequence={"reward/x": values}),)


def one_turn(index: int) -> Group:
    made = (response(index, 0, (2, 2, 3), 5), response(index, 1, (3,)))
    return Group(index, item(index), made, rewards=scored(index, "0", "1"))


def with_baseline(index: int) -> Group:
    group = one_turn(index)
    return replace(group, greedy=response(index, 2, (3, 3)), rewards=scored(index, "0", "1", "greedy"))


def with_columns(index: int) -> Group:
    """As an engine gives them that says more about each token."""
    (sequence,) = response(index, 0, (2, 2, 3)).sequences
    return Group(index, item(index), (Trajectory((replace(sequence, columns={"entropy": (0.5, 0.25, 0.125)}),)),))


def several_turns(index: int) -> Group:
    first = TrajectorySequence(
        prompt_ids=(1, 2),
        token_ids=(5, 6, 7, 8),
        action_mask=(True, False, False, True),
        logprobs=(-0.1, 0.0, 0.0, -0.2),
        versions=(4, -1, -1, 5),
        finish_reason="stop",
        num_turns=2,
        columns={"step_reward/environment": (0.5, 0.0, 0.0, 1.0)},
        state=[{"role": "user", "content": "hello"}],
        completion="x",
    )
    second = replace(first, versions=(5, -1, -1, 6), state="text")
    return Group(index, item(index), (Trajectory((first, second), TrajectoryEnd.MAX_TURNS, {"environment": 1.5}),))


MAKERS = [one_turn, with_baseline, with_columns, several_turns]


@pytest.mark.parametrize("make", MAKERS)
def test_groups_come_back_from_a_checkpoint_as_they_were(make: Callable[[int], Group], tmp_path: Path) -> None:
    ahead: Ahead[Group] = Ahead({7: make(7), 9: make(9)}, rejected=(8,))
    complete_checkpoint(begin_checkpoint(tmp_path, 3), {"ahead": ahead_state(ahead)}, {}, {}, keep=1)
    saved = newest_checkpoint(tmp_path)
    assert saved is not None
    found = ahead_from_state(saved.parts["ahead"], item)
    assert found.rejected == (8,) and list(found.groups) == [7, 9]
    for index, group in ahead.groups.items():
        other = found.groups[index]
        assert replace(other, rewards=()) == replace(group, rewards=())
        for mine, theirs in zip(group.rewards, other.rewards, strict=True):
            assert mine.ids == theirs.ids and torch.equal(mine.sequence["reward/x"], theirs.sequence["reward/x"])
    assert ahead_state(Ahead()) is None


def test_answers_to_other_prompts_are_not_taken_back() -> None:
    state = ahead_state(Ahead({7: one_turn(7)}))
    assert state is not None
    with pytest.raises(UserError, match="data or the tokenizer changed") as caught:
        ahead_from_state(state, lambda index: item(index + 1))
    assert "prompt 7 of the run, 'p8'" in caught.value.found


def test_groups_of_an_earlier_version_are_refused_with_the_reason() -> None:
    former = {"groups": [{"index": 7, "prompt_ids": [7, 4], "completions": []}], "rejected": []}
    with pytest.raises(UserError, match="earlier version") as caught:
        ahead_from_state(former, item)
    assert "group 7" in caught.value.found and "resume from a checkpoint without" in caught.value.remedy


@pytest.mark.parametrize("make", MAKERS)
def test_a_chunk_holds_each_sequence_once_with_what_is_known_of_its_tokens(make: Callable[[int], Group]) -> None:
    groups = [make(7), make(9)]
    batch = chunk_of(4, 1, groups, lambda sequence: f"{len(sequence.token_ids)} tokens").data
    members = [t for g in groups for t in (*g.trajectories, *([g.greedy] if g.greedy is not None else []))]
    sequences = [sequence for trajectory in members for sequence in trajectory.sequences]
    assert len(batch) == len(sequences) and len(Trajectories.of(batch)) == len(members)
    assert num_emitted(batch, Trajectories.of(batch)).tolist() == [t.num_emitted for t in members]
    for s, sequence in enumerate(sequences):
        leaf = slice(*batch.leaf_span(s))
        assert batch.token_ids(s) == [*sequence.prompt_ids, *sequence.token_ids]
        assert batch.token["action_mask"][leaf].tolist() == list(sequence.action_mask)
        assert batch.token["rollout_logprobs"][leaf].tolist() == pytest.approx(sequence.logprobs)
        assert batch.token["policy_version"][leaf].tolist() == list(sequence.versions)
        for name, values in sequence.columns.items():
            assert batch.token[name][leaf].tolist() == list(values)
    shared = batch.sequence_index() < 0
    assert not batch.token["action_mask"][shared].any() and (batch.token["policy_version"][shared] == -1).all()
    assert ("observation_mask" in batch.token) == ("part" in batch.sequence) == (make is several_turns)
    assert ("greedy" in batch.sequence) == (make is with_baseline)


def test_one_turn_is_laid_out_as_a_prompt_and_its_responses() -> None:
    batch = chunk_of(4, 0, [one_turn(7), one_turn(9)], lambda sequence: "text").data
    assert batch.ids == ("7.0", "7.1", "9.0", "9.1") and batch.parents == (-1, 0, 0, -1, 3, 3)
    assert batch.input_ids.tolist() == [7, 4, 0, 1, 2, 0, 9, 4, 0, 1, 2, 0]
    assert sorted(batch.token) == ["action_mask", "loss_mask", "policy_version", "rollout_logprobs"]
    assert sorted(batch.sequence) == ["ended", "group", "response", "reward/x", "version"]
    with pytest.raises(ValueError, match="without its text"):
        chunk_of(4, 0, [one_turn(7)])


def test_every_token_knows_the_weights_that_sampled_it() -> None:
    chunk = chunk_of(4, 0, [one_turn(7)], lambda sequence: "text").data
    assert chunk.token["policy_version"].tolist() == [-1, -1, 2, 2, 3, 3]
    assert chunk.sequence["version"].tolist() == [2, 3], "the oldest of each"
    assert one_turn(7).first_version == 2 and one_turn(7).consumed() == (7, ((2, 2), (3, 2)))
    assert staleness_metrics(chunk, 4) == {"staleness/mean": 1.5, "staleness/max": 2.0}


def test_so_do_the_tokens_of_episodes() -> None:
    batch = chunk_of(6, 0, [several_turns(7)]).data
    assert batch.token["policy_version"].tolist() == [-1, -1, 4, -1, -1, 5, 5, -1, -1, 6]
    assert batch.sequence["version"].tolist() == [4, 5] and several_turns(7).first_version == 4
    assert several_turns(7).consumed() == (7, ((4, 1), (5, 2), (6, 1))), "what was read has no version"
    assert staleness_metrics(batch, 6) == {"staleness/mean": 1.0, "staleness/max": 2.0}


def test_records_show_versions_token_by_token_only_where_they_differ(tokenizer: Any) -> None:
    def records(*groups: Group) -> list[RolloutRecord]:
        batch = chunk_of(4, 0, groups, lambda sequence: "text").data
        batch = batch.with_sequence(score=torch.zeros(len(batch)))
        return rollout_records(batch, TextCodec(tokenizer))

    mixed = Group(7, item(7), (response(7, 0, (2, 2, 3)), response(7, 1, (3,))))
    first, second = records(mixed)
    assert (first.policy_version, first.columns["policy_version"]) == (2, [2.0, 2.0, 3.0])
    assert (second.policy_version, second.columns["policy_version"]) == (3, [3.0])
    whole = replace(mixed, trajectories=(response(7, 0, (2, 2, 2)), response(7, 1, (3,))))
    assert [(r.policy_version, "policy_version" in r.columns) for r in records(whole)] == [(2, False), (3, False)]
