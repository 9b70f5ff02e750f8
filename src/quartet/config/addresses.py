"""Addresses of servers and of objects in recipes."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator

_FORM = re.compile(r"https?://[^/\s?#@]+(/[^\s?#]*)?")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET = re.compile(r"(^|[^a-z])(sig|signature|credential|token|key|password|pwd|secret)$|api_?key|accesstoken", re.I)
"""Parameters of signed addresses and of services that want a key in them."""


def is_url(name: object) -> bool:
    """Whether a path is the URL of an object or of a directory of objects, as s3://bucket/name."""
    return isinstance(name, str) and _URL.match(name) is not None


def secret_in(name: object) -> str | None:
    """What a URL holds that must not be written down with it, in words; None of other URLs and of paths."""
    if not is_url(name):
        return None
    scheme, _, rest = str(name).partition("://")
    user, at, _ = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")
    if at and (":" in user or scheme.lower() in ("http", "https")):  # the user alone may be a token
        return "a password"
    query = rest.partition("#")[0].partition("?")[2]
    names = [pair.partition("=")[0] for pair in query.split("&")]
    words = [re.sub(r"([a-z])([A-Z])", r"\1_\2", unquote(name)) for name in names]  # authToken
    return next((f"a secret ({name})" for name, word in zip(names, words, strict=True) if _SECRET.search(word)), None)


def http_address(url: str) -> str:
    """Returns the address itself; ValueError where it has not the form, no host, or a port that no server can have."""
    if not _FORM.fullmatch(url):
        raise ValueError(f"url is written http://host:port/path or https://…, without a query; found {url!r}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:  # brackets that hold no address, a port that is no number up to 65535
        raise ValueError(f"url has no host and port such as localhost:8000; found {url!r} ({error})") from None
    if not host or port == 0:
        raise ValueError(f"url has no host and port such as localhost:8000; found {url!r}")
    return url


HTTPAddress = Annotated[str, AfterValidator(http_address)]
