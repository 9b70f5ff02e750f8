"""Reward for mathematical equality, compared by math-verify in processes of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from quartet.config.errors import UserError
from quartet.config.rewards import MathReward
from quartet.processes import ProcessDied, ProcessTimeout
from quartet.rewards.builtin import right_answers
from quartet.rewards.source import Columns, RewardError, RewardSource, Scores, Threads
from quartet.rewards.subprocesses import Subprocess, SubprocessPool
from quartet.text.examples import PromptText

_WORKER = "quartet.rewards.math_worker:serve"
_START_S = 120.0
_ATTEMPTS = 2
_PATIENCE = 3.0
"""The worker stops parsing twice and comparing once, after ``timeout_s`` each; later than that it is stuck."""


class MathSource(RewardSource):
    """See :class:`~quartet.config.rewards.MathReward`.

    Raises:
        UserError: math-verify is not installed.
    """

    compares = True

    def __init__(self, config: MathReward) -> None:
        self.name, self.column = config.name, config.column
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(
                f"the reward {self.name!r} needs the library math-verify",
                found="it is not installed",
                remedy="pip install 'quartet-rl[math]'",
            )
        self._config = config
        self._threads = Threads(config.concurrency, self.name)
        self._pool = SubprocessPool(self._start, config.concurrency)

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        pairs = zip(completions, columns[self._config.column], strict=True)
        return [await self._threads.run(self._score, completion, gold) for completion, gold in pairs]

    def _score(self, completion: str, answer: Any) -> float | None:
        """Of the right answers any counts; None where none can be read."""
        best: float | None = None
        for gold in right_answers(answer, self._config.column):
            score = self._compared(completion, gold)
            best = score if best is None else max(best, score or 0.0)
            if best == 1.0:
                break
        return best

    def _compared(self, completion: str, gold: str) -> float | None:
        config = self._config
        job = {
            "completion": completion,
            "gold": gold,
            "extract": config.extract,
            "digits": config.digits,
            "timeout_s": config.timeout_s,
        }
        for _ in range(_ATTEMPTS):
            with self._pool.taken() as process:
                try:
                    score = process.ask(job, max(1.0, config.timeout_s) * _PATIENCE)
                except ProcessTimeout:
                    process.kill()
                    break
                except ProcessDied:
                    continue  # perhaps ended from outside, for nothing in this completion
            return None if score is None else float(score)
        # A comparison that takes too long, or all memory, shows no equality.
        return 0.0

    def _start(self) -> Subprocess:
        try:
            return Subprocess(_WORKER, {}, quiet=True, patience_s=_START_S)
        except ProcessDied as error:
            raise RewardError(
                f"the process of the reward {self.name!r} does not start",
                found=str(error),
                remedy="see whether `python -c 'import math_verify'` works",
            ) from error

    def close(self) -> None:
        self._threads.close()
        self._pool.close()
