"""Reward of a server: batches of completions by POST, a list of scores back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quartet.config.rewards import HTTPReward
from quartet.config.scores import as_score
from quartet.rewards.remote import JSONClient, RemoteError
from quartet.rewards.source import RewardError, Threads
from quartet.text.examples import PromptText


class HTTPSource:
    """See :class:`~quartet.config.rewards.HTTPReward`."""

    def __init__(self, config: HTTPReward) -> None:
        self.name = config.name
        self._client = JSONClient(config)
        self._threads = Threads(config.concurrency, self.name)

    def check_columns(self, columns: Sequence[str]) -> None:
        """The server gets all of them."""

    async def score(
        self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | None]:
        return await self._threads.run(self._score, prompts, completions, columns)

    def _score(
        self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | None]:
        body = {
            "prompts": list(prompts),
            "completions": list(completions),
            "columns": {name: list(values) for name, values in columns.items()},
        }
        try:
            scores: list[float | None] = self._client.post(body, lambda answer: _scores(answer, len(completions)))
        except RemoteError as error:
            raise remote_failure(self.name, error) from error
        return scores

    def close(self) -> None:
        self._client.close()
        self._threads.close()


def remote_failure(name: str, error: RemoteError) -> RewardError:
    failure = RewardError(
        f"the server of the reward {name!r} gave no score ({error.kind})",
        found=str(error),
        remedy="see that it runs and answers as docs/rewards.md says; set on_error: leave_out to go on without",
    )
    failure.splits = error.about_content
    return failure


def _scores(answer: Any, num: int) -> list[float | None]:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        raise ValueError('not {"scores": [...]}')
    if len(scores) != num:
        raise ValueError(f"{len(scores)} scores for {num} completions")
    return [None if score is None else _score(score) for score in scores]


def _score(value: Any) -> float:
    score = as_score(value)
    if isinstance(score, str) or isinstance(value, bool):
        shown = value if isinstance(value, bool) else score
        raise ValueError(f"{shown} among the scores, where a finite number or null belongs")
    return score
