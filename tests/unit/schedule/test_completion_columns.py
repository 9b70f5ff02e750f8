"""Per-token numbers that an engine adds to its completions become token fields of the batch; checkpoints keep them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.groups import Group, answered, chunk_of, group_batch

PROMPT = SimpleNamespace(token_ids=(1, 2), prompt_id="p", prompt="?")


def completion(name: str, num: int, **columns: Any) -> Completion:
    return Completion(
        name, "g", tuple(range(3, 3 + num)), (-0.5,) * num, (0,) * num, FinishReason.LENGTH, columns=columns
    )


def group_of(*completions: Completion) -> Group:
    return Group.of(0, PROMPT, group_batch(0, [answered((1, 2), c, "text") for c in completions]))


def numbered() -> Group:
    return group_of(
        completion("a", 2, entropy=(0.25, 1.0), expert=(7, 2**40)), completion("b", 1, entropy=(2,), expert=(5,))
    )


def test_columns_are_token_fields_of_the_chunk() -> None:
    batch = chunk_of(0, 0, [numbered()]).data
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 3]
    assert batch.token["entropy"].tolist() == [0.0, 0.0, 0.25, 1.0, 2.0]
    assert batch.token["expert"].tolist() == [0, 0, 7, 2**40, 5]
    assert (batch.token["entropy"].dtype, batch.token["expert"].dtype) == (torch.float32, torch.int64)


def test_lengths_and_names_are_checked() -> None:
    with pytest.raises(UserError, match="one number per token"):
        completion("a", 2, entropy=(1.0,))
    with pytest.raises(UserError, match="same columns"):
        group_of(completion("a", 1, entropy=(1.0,)), completion("b", 1))
    with pytest.raises(UserError, match="names of their own"):
        group_of(completion("a", 1, action_mask=(1.0,)))


def test_columns_do_not_enter_where_there_are_none() -> None:
    assert not {"entropy", "expert"} & chunk_of(0, 0, [group_of(completion("a", 2))]).data.token.keys()
