"""URLs in messages, without what opens doors."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/\s?#@]*@")
_QUERY = re.compile(r"(\w+://[^\s?#'\"]*)\?[^\s'\")]*")


def shown(text: str) -> str:
    """``text`` in which no URL has a user, a password or a query: signatures stand in these."""
    return _QUERY.sub(r"\1?...", _USER.sub("...@", text))
