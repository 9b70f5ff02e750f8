"""The kept rollouts: every token of every response with everything the step computed about it."""

from __future__ import annotations

import math

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.observe.rollouts import RolloutRecord
from quartet.text.tokenizer import TextCodec
from quartet.trainers.advantages import REWARD_PREFIX

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
)


def rollout_records(batch: RaggedBatch, codec: TextCodec) -> list[RolloutRecord]:
    """One record per response, in the batch's order."""
    columns = {name: batch.token[name].float() for name in _COLUMNS if name in batch.token}
    if "old_logprobs" in columns:
        columns["ratio"] = (columns["old_logprobs"] - columns["rollout_logprobs"]).clamp(-20, 20).exp()
    rewards = {name: batch.sequence[name].tolist() for name in batch.sequence if name.startswith(REWARD_PREFIX)}
    scores = batch.sequence["score"].tolist()
    records = []
    for s in range(len(batch)):
        start, stop = batch.leaf_span(s)
        ids = batch.token_ids(s)
        prompt_ids, response_ids = ids[: len(ids) - (stop - start)], ids[len(ids) - (stop - start) :]
        # In one piece: decoders of the SentencePiece kind strip the space of a text's first token.
        pieces = codec.token_texts(ids)
        item = batch.objects["prompt"][s]
        records.append(
            RolloutRecord(
                sequence_id=batch.ids[s],
                prompt_id=item.prompt_id,
                response_index=int(batch.sequence["response"][s]),
                policy_version=int(batch.sequence["version"][s]),
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                prompt_tokens=pieces[: len(prompt_ids)],
                response_tokens=pieces[len(prompt_ids) :],
                prompt_text=codec.decode(prompt_ids),
                response_text=batch.objects["completion"][s],
                finish_reason=batch.objects["finish_reason"][s],
                rewards={name.removeprefix(REWARD_PREFIX): _number(values[s]) for name, values in rewards.items()},
                score=_number(scores[s]),
                group=str(int(batch.sequence["group"][s])),
                columns={name: _rounded(values[start:stop]) for name, values in columns.items()},
                trajectory_id=str(int(batch.sequence["trajectory"][s])),
            )
        )
    return records


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _rounded(values: torch.Tensor) -> list[float]:
    """Six significant digits: enough to read, and a third of the file."""
    return [float(f"{value:.6g}") for value in values.tolist()]
