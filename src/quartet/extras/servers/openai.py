"""Engine ``server``: OpenAI's completions, as vLLM and ``quartet serve`` extend them by token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quartet.config.rewards import RemoteServer
from quartet.extras.servers.checks import Part
from quartet.extras.servers.client import LARGEST_SEED, HTTPEngine
from quartet.extras.servers.config import ServerEngineConfig
from quartet.rollout.protocol import Request
from quartet.rollout.stop_strings import Decode
from quartet.trainers.engines import Policy


class OpenAIEngine(HTTPEngine):
    """A frozen model behind an OpenAI base url (``…/v1``). In a pause, requests that the server has are completed.

    Args:
        model: the name under which it is served.
        version: what its completions name as the policy version.
    """

    path = "/completions"
    models_path = "/models"

    def __init__(
        self, server: RemoteServer, *, model: str, vocab_size: int, decode: Decode | None = None, version: int = 0
    ) -> None:
        self._model = model
        super().__init__(server, vocab_size=vocab_size, decode=decode, version=version)

    def check_models(self, models: dict[str, int | None]) -> int | None:
        if self._model not in models:
            raise ValueError(f"it serves {', '.join(map(repr, models))}, not {self._model!r}")
        return models[self._model]

    def body(self, request: Request, token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        sampling = request.sampling
        asked: dict[str, Any] = {
            "model": self._model,
            "prompt": [*request.prompt_ids, *token_ids],
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed & LARGEST_SEED,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": list(sampling.stop_token_ids),
            # Only what the request names ends it, not the model's own end-of-text.
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,  # stop strings are looked for in the text that we have
        }
        return asked if request.session is None else {**asked, "session_id": request.session}

    def part(self, answer: Any, request: Request) -> Part:
        choices = answer["choices"]
        if len(choices) != 1:
            raise ValueError(f"{len(choices)} answers to one request")
        choice = choices[0]
        if choice.get("token_ids") is None:
            raise ValueError("no token ids: the server does not know return_token_ids (vLLM has it from 0.10.2 on)")
        read = choice.get("prompt_token_ids")
        if read is not None and tuple(read) != request.prompt_ids:
            raise ValueError(f"the answer to another prompt, of {len(read)} tokens")
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"it ended by {choice['finish_reason']!r}")
        return Part(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])


def server_engines(config: ServerEngineConfig, policy: Policy) -> list[OpenAIEngine]:
    """Makes an engine for each address."""
    return [
        OpenAIEngine(server, model=config.model, vocab_size=policy.vocab_size, decode=policy.decode)
        for server in config.servers
    ]
