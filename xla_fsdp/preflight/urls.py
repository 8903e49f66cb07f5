"""URLs that the user gave, looked at before anything is asked."""

from __future__ import annotations

from urllib.parse import urlsplit

from .errors import UsageError


def require_url(name: str, url: str) -> str:
    """``url``, which ``name``, a flag or variable, has.

    Raises:
        UsageError: no request could be made to it, now or later.
    """
    try:
        parts = urlsplit(url)
        # What a lookup of the host and a connection do first.
        (parts.hostname or "").encode("idna")
        reason = _wrong(url, parts.scheme, parts.netloc, parts.hostname, parts.port)
    except ValueError as error:  # a UnicodeError too
        reason = str(error)
    if reason:
        raise UsageError(
            f"{name} {url!r}: {reason}; give http://HOST[:PORT]/PATH or https://HOST[:PORT]/PATH"
        )
    return url


def _wrong(url: str, scheme: str, netloc: str, host: str | None, port: int | None) -> str:
    if scheme not in ("http", "https"):
        return "neither http:// nor https://"
    if not host or "@" in netloc:
        return "a user is named" if host else "no host"
    if port == 0:
        return "nothing listens on port 0"
    if any(char.isspace() or not char.isprintable() for char in url):
        return "it has spaces or characters that can not be printed"
    return ""
