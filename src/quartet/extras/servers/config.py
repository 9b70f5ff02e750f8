"""The recipe's sections of servers that somebody else runs.

========== ====================================== ===================================
``type``   answers by                             takes weights
========== ====================================== ===================================
``sglang`` SGLang servers                         by files
``server`` an OpenAI-compatible server            never: it cannot be a policy's engine
========== ====================================== ===================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from quartet.config.engines import RoutedEngineConfig
from quartet.config.rewards import RemoteServer, RetryConfig
from quartet.config.strict import HTTPAddress


class _Server(RoutedEngineConfig):
    """Servers that the run does not start itself."""

    urls: tuple[HTTPAddress, ...] = Field(min_length=1, description="Addresses, http://host:port, one per engine.")
    api_key_env: str | None = Field(
        None, description="Environment variable whose value is sent as `Authorization: Bearer …`; never logged."
    )
    timeout_s: float = Field(600.0, gt=0, description="Longest wait for one answer.")
    retry: RetryConfig = RetryConfig()

    has_own_weights = True

    @property
    def servers(self) -> tuple[RemoteServer, ...]:
        rest = {name: getattr(self, name) for name in ("api_key_env", "timeout_s", "retry")}
        return tuple(RemoteServer(url=url, concurrency=self.max_outstanding, **rest) for url in self.urls)

    @property
    def capacity(self) -> int:
        return len(self.urls) * self.max_outstanding


class SGLangEngineConfig(_Server):
    """SGLang servers with the policy's architecture; new weights come to them as files."""

    type: Literal["sglang"] = "sglang"
    weights_directory: str | None = Field(
        None, description="Folder that the trainer writes new weights to and the servers read under the same path."
    )

    def training_misfits(self) -> Iterator[str]:
        if self.weights_directory is None:
            yield "rollout.engine sglang needs weights_directory, a folder that trainer and servers see under one path"


class ServerEngineConfig(_Server):
    """An OpenAI-compatible completion server that takes and returns token ids; for policies that stay as they are."""

    type: Literal["server"] = "server"
    model: str = Field(description="Name of the model at the server.")

    def training_misfits(self) -> Iterator[str]:
        yield (
            "rollout.engine server takes no weights, so it cannot be the engine of a policy that is trained: use "
            "native, vllm or sglang; a server serves evaluation, judges and frozen policies"
        )
