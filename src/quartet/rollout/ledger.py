"""What an engine owes: each request is answered once, with the counts and versions that can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import pairwise

from quartet.config import UserError
from quartet.rollout.protocol import Completion, EngineFailed, FinishReason, GenerationError, Request


class RequestLedger:
    """
    Args:
        name: of the engine, for messages.

    Attributes:
        held: requests that are to be answered, by id, in the order in which they came; without cancelled ones.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[str, Request] = {}
        # Apart, because their ids may be used again at once.
        self._cancelled: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        """Answers that are still to come, cancelled ones included."""
        return len(self.held) + sum(map(len, self._cancelled.values()))

    def check(self, requests: Sequence[Request]) -> None:
        """
        Raises:
            UserError: an id is held already, or given twice.
        """
        twice = [i for i, n in Counter(request.request_id for request in requests).items() if n > 1 or i in self.held]
        if twice:
            raise UserError(
                "a request id is in use",
                found=f"{twice[0]!r} ({len(twice)} in all)",
                remedy="give every request an id of its own until it has ended",
            )

    def add(self, requests: Iterable[Request]) -> None:
        """Requests that the engine has taken."""
        self.held.update((request.request_id, request) for request in requests)

    def cancel(self, request_ids: Iterable[str]) -> list[str]:
        """The ids among these that were held; each is expected once more, as cancelled."""
        cancelled = [self.held.pop(i) for i in dict.fromkeys(request_ids) if i in self.held]
        for request in cancelled:
            self._cancelled.setdefault(request.request_id, []).append(request)
        return [request.request_id for request in cancelled]

    def settle(self, completion: Completion, versions: Container[int] | None = None) -> None:
        """Strikes off what ``completion`` answers.

        Args:
            versions: that the engine may have computed with; None: they were looked at before.

        Raises:
            EngineFailed: nobody asked, or it was answered already; numbers, versions or group are not what can be.
        """
        request = self._struck_off(completion)
        num_tokens, used = len(completion.token_ids), completion.versions
        found: str | None = None
        if not len(completion.logprobs) == len(used) == num_tokens:
            found = f"{num_tokens} tokens, {len(completion.logprobs)} log-probabilities, {len(used)} versions"
        elif num_tokens > request.sampling.max_new_tokens:
            found = f"{num_tokens} tokens where {request.sampling.max_new_tokens} were the most"
        elif completion.group != request.group:
            found = f"group {completion.group!r} instead of {request.group!r}"
        elif versions is not None and (foreign := [version for version in set(used) if version not in versions]):
            found = f"version {foreign[0]}, which it was not given"
        elif any(after < before for before, after in pairwise(used)):
            found = "versions that go back"
        if found is not None:
            raise self._failed(f"{found}, in the answer to {request.request_id!r}")

    def _struck_off(self, completion: Completion) -> Request:
        request_id, is_cancelled = completion.request_id, completion.finish_reason is FinishReason.CANCELLED
        if is_cancelled and request_id in self._cancelled:
            request = self._cancelled[request_id].pop(0)
            if not self._cancelled[request_id]:
                del self._cancelled[request_id]
            return request
        held = self.held.pop(request_id, None)
        if held is None:
            raise self._failed(f"an answer to {request_id!r}, which is not held: not asked for, or answered already")
        if is_cancelled:
            raise self._failed(f"{request_id!r} as cancelled, which nobody asked for")
        return held

    def drop(self, request_ids: Iterable[str]) -> None:
        """Requests that have ended without an answer, by an error that named them."""
        for request_id in request_ids:
            if self.held.pop(request_id, None) is None:
                self._cancelled.pop(request_id, None)  # it was cancelled just before

    def clear(self) -> tuple[list[Request], list[Request]]:
        """Nothing will be answered any more: what was held, in order, and what was cancelled."""
        held, cancelled = list(self.held.values()), [r for requests in self._cancelled.values() for r in requests]
        self.held, self._cancelled = {}, {}
        return held, cancelled

    def _failed(self, found: str) -> EngineFailed:
        return EngineFailed(
            f"the rollout engine {self.name!r} answers what cannot be",
            found=found,
            remedy="it is started anew where it can be; if that repeats itself, report it with the engine's version",
        )


class RequestsRefused(GenerationError):
    """An engine did not take requests that had waited for it; these have ended, the others go on."""

    def __init__(self, error: UserError, request_ids: Sequence[str]) -> None:
        self.error = error
        self.request_ids = tuple(request_ids)
        UserError.__init__(self, error.problem, found=error.found, remedy=error.remedy)
