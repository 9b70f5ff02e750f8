"""Addresses of servers and of objects in recipes."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator

_FORM = re.compile(r"https?://[^/\s?#@]+(/[^\s?#]*)?")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET = re.compile(r"(^|[^a-z])(sig|signature|credential|token|key|password|pwd|secret)$|api_?key|accesstoken", re.I)
"""Parameters of signed addresses and of services that want a key in them."""
_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")


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
    """The address itself; ValueError where it has not the form, or a host, a port or a path that no server can have."""
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


HTTPAddress = Annotated[str, AfterValidator(http_address)]
