"""One type of group for one turn and for several: its layout, its versions, and its way through a checkpoint.

Per-token numbers that an engine adds to its completions become token fields of the batch; checkpoints keep them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet.batch.ragged import ColumnSet, RaggedBatch, join_columns
from quartet.batch.trajectory import Trajectories, Trajectory, TrajectoryEnd, TrajectorySequence, num_policy_tokens
from quartet.config import UserError
from quartet.data.datasets import PromptItem
from quartet.observe.rollouts import RolloutRecord
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.groups import (
    BufferedGroups,
    PromptGroup,
    drop_texts,
    group_batch,
    make_chunk,
    single_turn_trajectory,
    staleness_metrics,
)
from quartet.schedule.model_worker import RolloutWriter, record_columns, rollout_records
from quartet.schedule.role_group import LocalGroup
from quartet.text.tokenizer import TextCodec
from quartet.train.checkpoint import Checkpoint, begin_checkpoint, complete_checkpoint, newest_checkpoint
from quartet.trainers.checkpoints import poll, restore_buffered_groups, save_buffered_groups


def item(index: int) -> PromptItem:
    return PromptItem(f"p{index}", f"{index}", {"answer": 3}, "here", 2)


def completion(index: int, r: int, versions: tuple[int, ...], text_end: int | None = None) -> Completion:
    num = len(versions)
    logprobs = tuple(-math.pi / (k + 1) for k in range(num))
    return Completion(f"{index}.{r}", f"{index}", tuple(range(num)), logprobs, versions, FinishReason.STOP, text_end)


def response(index: int, r: int, versions: tuple[int, ...], text_end: int | None = None) -> Trajectory:
    return single_turn_trajectory((index, 4), completion(index, r, versions, text_end), f"{len(versions)} tokens")


def scored(index: int, *names: str) -> tuple[ColumnSet, ...]:
    values = torch.tensor([0.1, math.inf, 2.0])[: len(names)]
    return (ColumnSet(tuple(f"{index}.{name}" for name in names), sequence={"reward/x": values}),)


@dataclass(frozen=True)
class Made:
    """What a group's batch is made of."""

    index: int
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None
    rewards: tuple[ColumnSet, ...] = ()

    def group(self) -> PromptGroup:
        batch = group_batch(self.index, self.trajectories, self.greedy)
        group = PromptGroup.of(self.index, item(self.index), batch)
        return replace(group, batch=join_columns(group.batch, *self.rewards))


def one_turn(index: int) -> Made:
    made = (response(index, 0, (2, 2, 3), 5), response(index, 1, (3,)))
    return Made(index, made, rewards=scored(index, "0", "1"))


def with_baseline(index: int) -> Made:
    made = one_turn(index)
    return replace(made, greedy=response(index, 2, (3, 3)), rewards=scored(index, "0", "1", "greedy"))


def with_columns(index: int) -> Made:
    """As an engine gives them that says more about each token."""
    (sequence,) = response(index, 0, (2, 2, 3)).sequences
    columns = {"entropy": (0.5, 0.25, 0.125), "expert": (3, 1, 2)}
    return Made(index, (Trajectory((replace(sequence, columns=columns),)),))


def several_turns(index: int) -> Made:
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
    return Made(index, (Trajectory((first, second), TrajectoryEnd.MAX_TURNS, {"environment": 1.5}),))


MAKERS = [one_turn, with_baseline, with_columns, several_turns]


def assert_equal(one: RaggedBatch, other: RaggedBatch) -> None:
    assert one.input_ids.tolist() == other.input_ids.tolist() and dict(one.objects) == dict(other.objects)
    for name in ("segment_lengths", "parents", "leaves", "ids"):
        assert getattr(one, name) == getattr(other, name)
    for mine, theirs in ((one.token, other.token), (one.sequence, other.sequence)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=0, equal_nan=True)


def saved(ahead: BufferedGroups, root: Path, codec: TextCodec, *, background: bool = False) -> Checkpoint:
    """A checkpoint with the groups as the writer's share."""

    async def write() -> None:
        group = LocalGroup(RolloutWriter(codec))
        assert await save_buffered_groups(group, ahead)
        draft = begin_checkpoint(root, 3)
        await group.call(RolloutWriter.save_checkpoint, draft / "ahead", background=background)
        files = await poll(lambda: group.call(RolloutWriter.finish_checkpoint, draft / "ahead"))
        complete_checkpoint(draft, {}, {"ahead": files}, keep=1)

    asyncio.run(write())
    return newest(root)


def newest(root: Path) -> Checkpoint:
    found = newest_checkpoint(root)
    assert found is not None
    return found


def restored(found: Checkpoint, codec: TextCodec, item: Callable[[int], PromptItem] = item) -> BufferedGroups | None:
    return asyncio.run(restore_buffered_groups(LocalGroup(RolloutWriter(codec)), found, item))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_groups_come_back_from_a_checkpoint_as_they_were(
    make: Callable[[int], Made], background: bool, tokenizer: Any, tmp_path: Path
) -> None:
    ahead: BufferedGroups = BufferedGroups({9: make(9).group(), 7: make(7).group()}, rejected=(8,))
    codec = TextCodec(tokenizer)
    found = restored(saved(ahead, tmp_path, codec, background=background), codec)
    assert found is not None and found.rejected == (8,) and list(found.groups) == [9, 7]
    for index, group in ahead.groups.items():
        other = found.groups[index]
        assert (other.index, other.prompt) == (group.index, group.prompt)
        assert_equal(other.batch, group.batch)
        chunks = [make_chunk(4, 0, [mine, make(11).group()]).data for mine in (other, group)]
        assert_equal(*chunks)


def test_rejected_groups_come_back_alone_and_nothing_ahead_is_no_share(tokenizer: Any, tmp_path: Path) -> None:
    codec = TextCodec(tokenizer)
    assert restored(saved(BufferedGroups({}, (8, 5)), tmp_path, codec), codec) == BufferedGroups({}, (8, 5))
    assert not asyncio.run(save_buffered_groups(LocalGroup(RolloutWriter(codec)), BufferedGroups()))
    complete_checkpoint(begin_checkpoint(tmp_path, 4), {}, {}, keep=1)
    assert restored(newest(tmp_path), codec) is None


def test_answers_to_other_prompts_are_not_taken_back(tokenizer: Any, tmp_path: Path) -> None:
    codec = TextCodec(tokenizer)
    found = saved(BufferedGroups({7: one_turn(7).group()}), tmp_path, codec)
    with pytest.raises(UserError, match="data or the tokenizer changed") as caught:
        restored(found, codec, lambda index: item(index + 1))
    assert "prompt 7 of the run, 'p8'" in caught.value.found


@pytest.mark.parametrize("make", MAKERS)
def test_a_chunk_holds_each_sequence_once_with_what_is_known_of_its_tokens(make: Callable[[int], Made]) -> None:
    made = [make(7), make(9)]
    batch = make_chunk(4, 1, [one.group() for one in made]).data
    members = [t for one in made for t in (*one.trajectories, *([one.greedy] if one.greedy is not None else []))]
    sequences = [sequence for trajectory in members for sequence in trajectory.sequences]
    assert len(batch) == len(sequences) and len(Trajectories.of(batch)) == len(members)
    assert num_policy_tokens(batch, Trajectories.of(batch)).tolist() == [
        sum(sum(s.action_mask) for s in t.sequences) for t in members
    ]
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


def test_every_token_knows_the_weights_that_sampled_it() -> None:
    chunk = make_chunk(4, 0, [one_turn(7).group()]).data
    assert chunk.token["policy_version"].tolist() == [-1, -1, 2, 2, 3, 3]
    assert chunk.sequence["version"].tolist() == [2, 3], "the oldest of each"
    assert staleness_metrics(chunk, 4) == {"staleness/mean": 1.5, "staleness/max": 2.0}


def test_records_show_versions_token_by_token_only_where_they_differ(tokenizer: Any) -> None:
    def records(*versions: tuple[int, ...]) -> list[RolloutRecord]:
        made = Made(7, tuple(response(7, r, of_response) for r, of_response in enumerate(versions)))
        batch = make_chunk(4, 0, [made.group()]).data
        batch = drop_texts(batch.with_sequence(score=torch.zeros(len(batch))))
        return rollout_records(batch, record_columns(batch), TextCodec(tokenizer))

    first, second = records((2, 2, 3), (3,))
    assert (first.policy_version, first.columns["policy_version"]) == (2, [2.0, 2.0, 3.0])
    assert (second.policy_version, second.columns["policy_version"]) == (3, [3.0])
    whole = records((2, 2, 2), (3,))
    assert [(r.policy_version, "policy_version" in r.columns) for r in whole] == [(2, False), (3, False)]


PROMPT = SimpleNamespace(token_ids=(1, 2), prompt_id="p", prompt="?")


def completion_of_columns(name: str, num: int, **columns: Any) -> Completion:
    return Completion(
        name, "g", tuple(range(3, 3 + num)), (-0.5,) * num, (0,) * num, FinishReason.LENGTH, columns=columns
    )


def group_of(*completions: Completion) -> PromptGroup:
    return PromptGroup.of(0, PROMPT, group_batch(0, [single_turn_trajectory((1, 2), c, "text") for c in completions]))


def numbered() -> PromptGroup:
    return group_of(
        completion_of_columns("a", 2, entropy=(0.25, 1.0), expert=(7, 2**40)),
        completion_of_columns("b", 1, entropy=(2,), expert=(5,)),
    )


def test_columns_are_token_fields_of_the_chunk() -> None:
    batch = make_chunk(0, 0, [numbered()]).data
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 3]
    assert batch.token["entropy"].tolist() == [0.0, 0.0, 0.25, 1.0, 2.0]
    assert batch.token["expert"].tolist() == [0, 0, 7, 2**40, 5]
    assert (batch.token["entropy"].dtype, batch.token["expert"].dtype) == (torch.float32, torch.int64)


def test_columns_do_not_enter_where_there_are_none() -> None:
    assert not {"entropy", "expert"} & make_chunk(0, 0, [group_of(completion_of_columns("a", 2))]).data.token.keys()
