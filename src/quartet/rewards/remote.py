"""Rewards of servers: prompts and completions there, scores back, as JSON over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quartet.config.foreign import as_score
from quartet.config.rewards import HTTPReward, RemoteSource
from quartet.remote.json_client import JSONClient, RemoteError
from quartet.rewards.source import Columns, RewardError, RewardSource, Scores
from quartet.text.examples import PromptText

_CONTENT = {400, 413, 422, 500}


class NoScore(RemoteError, RewardError):
    """A server gave no score."""

    problem_of = "the server of the reward {name!r} gave no score ({kind})"
    remedy_of = "see that it runs and answers as docs/rewards.md says; set on_error: leave_out to go on without"

    @property
    def splits(self) -> bool:  # type: ignore[override]
        """What was sent may be at fault, not the server."""
        return self.kind == "malformed" or self.status in _CONTENT


def reward_client(config: RemoteSource) -> JSONClient:
    """The connection to a source's server."""
    return JSONClient(config, name=config.name or "", breaker=config.breaker, error=NoScore)


class HTTPSource(RewardSource):
    """See :class:`~quartet.config.rewards.HTTPReward`. The server gets all columns."""

    def __init__(self, config: HTTPReward) -> None:
        self.name = config.name
        self._client = reward_client(config)

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        body = {
            "prompts": list(prompts),
            "completions": list(completions),
            "columns": {name: list(values) for name, values in columns.items()},
        }
        return await self._client.post(body, lambda answer: _scores(answer, len(completions)))

    def close(self) -> None:
        self._client.close()


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
