"""A language model as a judge, behind an OpenAI-compatible endpoint: pointwise scores, pairwise verdicts.

A pair is always asked in both orders, because judges favour a place; where the two verdicts contradict each other their
mean is 0.

Rewards of servers: prompts and completions there, scores back, as JSON over HTTP.
"""

from __future__ import annotations

import abc
import asyncio
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quartet.config.errors import UserError, excerpt, parse_score
from quartet.config.nearest import suggest_name
from quartet.config.rewards import BaseRemoteReward, HTTPReward, JudgeReward, PairwiseJudge, PointwiseJudge
from quartet.remote.json_client import JSONClient, RemoteError
from quartet.rewards.builtin import plain_text
from quartet.rewards.source import Columns, GuardedReward, RewardError, RewardSource, Scores
from quartet.text.examples import PromptText, shown_content
from quartet.text.pictures import with_data_urls


class MissingScore(RemoteError, RewardError):
    """A server gave no score."""

    problem_of = "the server of the reward {name!r} gave no score ({kind})"
    remedy_of = "see that it runs and answers as docs/rewards.md says; set on_error: leave_out to go on without"


def reward_client(config: BaseRemoteReward) -> JSONClient:
    """Makes the connection to a source's server."""
    return JSONClient(config, name=config.name or "", error=MissingScore)


class HTTPSource(RewardSource):
    """See :class:`~quartet.config.rewards.HTTPReward`. The server gets all columns."""

    def __init__(self, config: HTTPReward) -> None:
        self.name = config.name
        self._client = reward_client(config)

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        body = {
            "prompts": [with_data_urls(prompt) for prompt in prompts],
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
    score = parse_score(value)
    if isinstance(score, str) or isinstance(value, bool):
        shown = value if isinstance(value, bool) else score
        raise ValueError(f"{shown} among the scores, where a finite number or null belongs")
    return score


T = TypeVar("T")

PROMPTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("judge_prompts.toml").read_text(encoding="utf-8"))
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
"""What Python's float reads, without its words (nan, inf), underscores and other alphabets' digits."""
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


class _Judge(RewardSource):
    """Asks the model about one completion after the other, and reads a score or a verdict out of what it says.

    Args:
        own: what the template of the question has places for, beside rubric, prompt and columns.
    """

    def __init__(self, config: JudgeReward, method: PointwiseJudge | PairwiseJudge, *own: str) -> None:
        self.name = config.name
        self._config, self._own = config, ("rubric", "prompt", *own)
        self._template = method.template or PROMPTS[method.name]
        self._pattern = re.compile(method.pattern)
        self._client = reward_client(config)

    def check_columns(self, columns: Sequence[str]) -> None:
        super().check_columns(columns)
        self.check_template(columns)

    def check_template(self, columns: Sequence[str]) -> None:
        known = [*self._own, *columns]
        unknown = sorted({place for place in _PLACE.findall(self._template) if place not in known})
        if unknown:
            raise UserError(
                f"the template of the judge {self.name!r} asks for what is not there",
                found=f"{{{unknown[0]}}}; there are {', '.join(known)}",
                remedy=suggest_name(unknown[0], known) or "use these, or give the data that column",
            )

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        rows = [{name: values[n] for name, values in columns.items()} for n in range(len(completions))]
        asked = zip(prompts, completions, rows, strict=True)
        return [await self.judged(format_messages(prompt), completion, row) for prompt, completion, row in asked]

    @abc.abstractmethod
    async def judged(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float | None:
        """Returns the score of one completion."""

    async def ask(self, fields: Mapping[str, Any], read: Callable[[str], T]) -> T:
        """Returns what ``read`` makes of the last match in the judge's answer; it raises ValueError where that will not
        do, and the judge is asked again.

        Raises:
            RewardError: no answer that will do after all attempts.
        """
        # In one pass: a completion that holds "{prompt}" stays as it is.
        question = _PLACE.sub(lambda place: str(fields[place[1]]) if place[1] in fields else place[0], self._template)
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        return await self._client.post(
            body, lambda answer: read(_last_match(self._pattern, _content(answer))), "/chat/completions"
        )

    def close(self) -> None:
        self._client.close()


def _content(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("not a chat completion") from None
    if not isinstance(content, str):
        raise ValueError("a chat completion without text")
    return content


def _last_match(pattern: re.Pattern[str], text: str) -> str:
    matches = pattern.findall(text)
    if not matches:
        raise ValueError(f"nothing in the judge's answer matches {pattern.pattern!r}")
    return str(matches[-1])


class PointwiseSource(_Judge):
    """A score for each completion by itself, from ``lowest`` to ``highest`` mapped to 0 to 1."""

    def __init__(self, config: JudgeReward, method: PointwiseJudge) -> None:
        super().__init__(config, method, "completion", "lowest", "highest")
        self._method = method

    async def judged(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        method = self._method
        own = {"rubric": method.rubric, "lowest": f"{method.lowest:g}", "highest": f"{method.highest:g}"}
        fields = {**row, **own, "prompt": prompt, "completion": completion}
        return await self.ask(fields, lambda text: _on_scale(text, method))


def _on_scale(text: str, method: PointwiseJudge) -> float:
    if not _NUMBER.fullmatch(text.strip(" ")):
        raise ValueError(f"the score {excerpt(text)} is not a number")
    share = (float(text) - method.lowest) / (method.highest - method.lowest)
    if not 0 <= share <= 1:
        raise ValueError(f"the score {excerpt(text)} is not on the scale from {method.lowest:g} to {method.highest:g}")
    return share


class PairwiseSource(_Judge):
    """Compares answers; as a source of reward, each completion with its row's text in a column."""

    column: str

    def __init__(self, config: JudgeReward, method: PairwiseJudge) -> None:
        super().__init__(config, method, "a", "b")
        self.column, self._rubric = method.column, method.rubric

    async def judged(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float | None:
        """Returns 1 where the completion wins in both places, -1 where the other text does, 0 or ±0.5 in between."""
        if row[self.column] is None:
            return None
        fields, other = {**row, "rubric": self._rubric, "prompt": prompt}, plain_text(row[self.column])
        as_a, as_b = await asyncio.gather(
            self.ask({**fields, "a": completion, "b": other}, _points),
            self.ask({**fields, "a": other, "b": completion}, _points),
        )
        return (as_a - as_b) / 2


def _points(verdict: str) -> int:
    return {"A": 1, "B": -1}.get(verdict, 0)


def judge_source(config: JudgeReward) -> RewardSource:
    if isinstance(config.method, PairwiseJudge):
        return PairwiseSource(config, config.method)
    return PointwiseSource(config, config.method)


class JudgeComparer:
    """A pairwise judge between any two answers, for win rates.

    Args:
        config: a judge whose method is pairwise; its column is not read.

    Raises:
        UserError: the method is pointwise, or the key is missing.
    """

    def __init__(self, config: JudgeReward) -> None:
        if not isinstance(config.method, PairwiseJudge):
            raise UserError(
                f"the judge {config.name!r} scores single answers and cannot compare two",
                found=f"method.name: {config.method.name}",
                remedy="set method.name: pairwise",
            )
        source = PairwiseSource(config, config.method.model_copy(update={"column": _OTHER}))
        source.check_template([])
        self._guarded = GuardedReward.of(source, config)

    async def compare(
        self, prompts: Sequence[PromptText], answers_a: Sequence[str], answers_b: Sequence[str]
    ) -> list[float | None]:
        """Returns 1 where answer A is better in both orders, -1 where B is, 0 for a draw or two verdicts that
        contradict each other, ±0.5 for one verdict and one draw; None where the judge gave none.

        Raises:
            RewardError: the judge failed, and its rule is to stop.
        """
        return (await self._guarded.score(prompts, answers_a, {_OTHER: answers_b})).scores

    def close(self) -> None:
        self._guarded.close()


_OTHER = "the other answer"


def format_messages(prompt: PromptText) -> str:
    """Returns the prompt as text: messages one below the other, with who said them."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {shown_content(message['content'])}" for message in prompt)
