"""Servers that are asked over HTTP: where they are, how patiently and how often."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from quartet.config.common import Strict

DAY_S = 86_400.0
"""Systems refuse to wait for very long times; no wait of a recipe is longer than this."""
_FORM = re.compile(r"https?://[^/\s?#@]+(/[^\s?#]*)?")
_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")


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

    failures: int = Field(20, ge=1, description="Attempts in a row without an answer, after which the server rests.")
    rest_s: float = Field(30.0, gt=0, description="How long nothing is asked of it then.")


def _is_host(host: str) -> bool:
    if ":" in host:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True
    try:
        # What connections do with it: labels of 1 to 63 characters, other alphabets as ASCII.
        return _HOST.fullmatch(host.encode("idna").decode("ascii")) is not None
    except UnicodeError:
        return False


class RemoteServer(Strict):
    """What every server has."""

    url: str = Field(description="http://host:port/path or https://…, without a query.")
    api_key_env: str | None = Field(
        None, description="Environment variable whose value is sent as `Authorization: Bearer …`; never logged."
    )
    timeout_s: float = Field(
        30.0, gt=0, le=DAY_S, description="Most seconds of one attempt, the whole answer included."
    )
    retry: RetryConfig = RetryConfig()
    concurrency: int = Field(8, ge=1, description="Requests under way at a time.")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        """Refuses what is not of the form, or has a host, a port or a path that no server can have."""
        if not _FORM.fullmatch(url):
            raise ValueError(f"url is written http://host:port/path or https://…, without a query; found {url!r}")
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
        except ValueError as error:  # Brackets that hold no address, characters that stand for others.
            raise ValueError(f"url has no host such as localhost or [::1]; found {url!r} ({error})") from None
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise ValueError(f"the port of a url is a number from 1 to 65535; found {url!r}")
        if not _is_host(host):
            raise ValueError(f"url has no host such as localhost or 10.0.0.1; found {host!r} in {url!r}")
        if not re.fullmatch(r"[!-~]*", parts.path):
            raise ValueError(f"the path of a url is ASCII, anything else written as %…; found {parts.path!r}")
        return url
