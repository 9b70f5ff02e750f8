"""The kept rollouts: every token of every response with everything the step computed about it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX, STEP_PREFIX, STEP_SCORE_PREFIX
from quartet.observe.rollouts import RolloutRecord
from quartet.schedule.group_batch import TEXT_END
from quartet.text.tokenizer import TextCodec

_COLUMNS = (
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "token_rewards",
    "kl",
    "advantages",
    "returns",
    "loss_mask",
    "observation_mask",
)


def record_columns(batch: RaggedBatch) -> dict[str, Tensor]:
    """``[T]`` of each column that is recorded: all that is to be computed of a record, apart from its texts."""
    own = [name for name in batch.token if name.startswith((STEP_PREFIX, STEP_SCORE_PREFIX))]
    columns = {name: batch.token[name].float() for name in (*_COLUMNS, *own) if name in batch.token}
    if "old_logprobs" in columns:
        columns["ratio"] = (columns["old_logprobs"] - columns["rollout_logprobs"]).clamp(-20, 20).exp()
    if _mixes_versions(batch):
        columns["policy_version"] = batch.token["policy_version"].float()
    return columns


def rollout_records(batch: RaggedBatch, columns: Mapping[str, Tensor], codec: TextCodec) -> list[RolloutRecord]:
    """One record per sequence, in the batch's order.

    Args:
        batch: with its token ids, ``score`` and the objects ``prompt_id`` and ``finish_reason``.
        columns: of ``record_columns``.
    """
    rewards = {name: batch.sequence[name].tolist() for name in batch.sequence if name.startswith(REWARD_PREFIX)}
    scores = batch.sequence["score"].tolist()
    parts = batch.sequence["part"].tolist() if "part" in batch.sequence else [0] * len(batch)
    records = []
    for s in range(len(batch)):
        start, stop = batch.leaf_span(s)
        ids = batch.token_ids(s)
        prompt_ids, response_ids = ids[: len(ids) - (stop - start)], ids[len(ids) - (stop - start) :]
        # In one piece: decoders of the SentencePiece kind strip the space of a text's first token.
        pieces = codec.token_texts(ids)
        records.append(
            RolloutRecord(
                sequence_id=batch.ids[s],
                prompt_id=batch.objects["prompt_id"][s],
                response_index=int(batch.sequence["response"][s]),
                policy_version=int(batch.sequence["version"][s]),
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                prompt_tokens=pieces[: len(prompt_ids)],
                response_tokens=pieces[len(prompt_ids) :],
                prompt_text=codec.decode(prompt_ids),
                response_text=_response_text(batch, s, codec.decode_completion(prompt_ids, response_ids)),
                finish_reason=batch.objects["finish_reason"][s],
                rewards={name.removeprefix(REWARD_PREFIX): _number(values[s]) for name, values in rewards.items()},
                score=_number(scores[s]),
                group=str(int(batch.sequence["group"][s])),
                columns={name: _rounded(values[start:stop]) for name, values in columns.items()},
                trajectory_id=f"{int(batch.sequence['group'][s])}.{int(batch.sequence['response'][s])}",
                part=parts[s],
            )
        )
    return records


def _response_text(batch: RaggedBatch, s: int, text: str) -> str:
    """Of one turn up to its stop string; several turns as they are."""
    end = -1 if "observation_mask" in batch.token else int(batch.sequence[TEXT_END][s])
    return text if end < 0 else text[:end]


def _mixes_versions(batch: RaggedBatch) -> bool:
    """Whether new weights came into a response as it was generated; else its first token's version is all of it."""
    actions = batch.token["action_mask"]
    first = batch.sequence["version"][batch.sequence_index()[actions]]
    return bool((batch.token["policy_version"][actions] != first).any())


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _rounded(values: Tensor) -> list[float]:
    """Six significant digits: enough to read, and a third of the file."""
    return [float(f"{value:.6g}") for value in values.tolist()]
