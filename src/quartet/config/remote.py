"""Servers that are asked over HTTP: where they are, how patiently and how often."""

from __future__ import annotations

from pydantic import Field

from quartet.config.addresses import HTTPAddress
from quartet.config.common import Strict

DAY_S = 86_400.0
"""Systems refuse to wait for very long times; no wait of a recipe is longer than this."""


class RetryConfig(Strict):
    """Waits of ``first_wait_s · 2^n``, at most ``longest_wait_s``, times a jitter in [0.5, 1) that ``seed``, the
    request and n decide. A server that answers with Retry-After sets the wait itself, up to ``longest_wait_s``.
    """

    attempts: int = Field(4, ge=1, description="Most attempts at one request, the first included.")
    first_wait_s: float = Field(
        0.5, ge=0, le=DAY_S, description="Wait before the second attempt; it doubles each time."
    )
    longest_wait_s: float = Field(
        20.0, gt=0, le=DAY_S, description="Longest wait, also where the server asks for more."
    )
    seed: int = Field(0, description="Decides the jitter of the waits.")


class BreakerConfig(Strict):
    """After so many attempts in a row without an answer requests fail at once for ``rest_s``; then one is tried."""

    failures: int = Field(
        20, ge=1, description="Attempts in a row without an answer, after which calls pause for rest_s."
    )
    rest_s: float = Field(30.0, gt=0, description="Pause after so many failures, before the server is called again.")


class RemoteServer(Strict):
    """What every server has."""

    url: HTTPAddress = Field(description="http://host:port/path or https://…, without a query.")
    api_key_env: str | None = Field(
        None, description="Environment variable whose value is sent as `Authorization: Bearer …`; never logged."
    )
    timeout_s: float = Field(
        30.0, gt=0, le=DAY_S, description="Most seconds of one attempt, the whole answer included."
    )
    retry: RetryConfig = RetryConfig()
    concurrency: int = Field(8, ge=1, description="Requests under way at a time.")
