"""Groups that were ready before their step, as a part of a checkpoint: a resumed run neither loses nor repeats them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from quartet.data.datasets import PromptItem
from quartet.envs.episode import Episode, EpisodeEnd
from quartet.envs.transcript import EpisodeSequence
from quartet.schedule.groups import (
    PromptGroup,
    check_prompt,
    columns_from_state,
    columns_state,
    group_from_state,
    group_state,
)
from quartet.schedule.stream import Ahead
from quartet.trainers.episodes import AnyGroup, EpisodeGroup


def ahead_state(ahead: Ahead[AnyGroup]) -> dict[str, Any] | None:
    """Tensors and plain values, None where there is nothing; prompts are left out, since their indices give them."""
    if not ahead.groups and not ahead.rejected:
        return None
    groups = [group_state(g) if isinstance(g, PromptGroup) else _episodes_state(g) for g in ahead.groups.values()]
    return {"groups": groups, "rejected": list(ahead.rejected)}


def ahead_from_state(state: Mapping[str, Any], item: Callable[[int], PromptItem]) -> Ahead[AnyGroup]:
    """The groups as they were.

    Args:
        item: the prompt of a stream index.

    Raises:
        UserError: the data changed.
    """
    groups: dict[int, AnyGroup] = {}
    for found in state["groups"]:
        index = found["index"]
        restored = _episodes_from_state if "episodes" in found else group_from_state
        groups[index] = restored(found, item(index))
    return Ahead(groups, tuple(state["rejected"]))


def _episodes_state(group: EpisodeGroup) -> dict[str, Any]:
    return {
        "index": group.index,
        "prompt_ids": list(group.prompt.token_ids),
        "episodes": [
            {
                "sequences": [_plain(sequence) for sequence in episode.sequences],
                "num_turns": episode.num_turns,
                "reward": episode.reward,
                "end": episode.end.value,
            }
            for episode in group.episodes
        ],
        "rewards": [columns_state(columns) for columns in group.rewards],
    }


def _episodes_from_state(state: Mapping[str, Any], item: PromptItem) -> EpisodeGroup:
    check_prompt(state["index"], state["prompt_ids"], item)
    episodes = tuple(
        Episode(
            tuple(EpisodeSequence(**sequence) for sequence in episode["sequences"]),
            episode["num_turns"],
            episode["reward"],
            EpisodeEnd(episode["end"]),
        )
        for episode in state["episodes"]
    )
    return EpisodeGroup(state["index"], item, episodes, tuple(map(columns_from_state, state["rewards"])))


def _plain(sequence: EpisodeSequence) -> dict[str, Any]:
    return {field.name: getattr(sequence, field.name) for field in fields(sequence)}
