"""HTTP for the TPU API: limited in bytes, without redirects; needs the ``pod`` extra."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import google_auth_httplib2
import httplib2

from .findings import UsageError

# The discovery document has some 100 KB.
MOST_BYTES = 16 << 20
_GOOGLE = ".googleapis.com"


class _LimitedResponse(http.client.HTTPResponse):
    def read(self, amt: int | None = None) -> bytes:
        if amt is not None:
            return super().read(amt)
        if self.length is not None and self.length <= MOST_BYTES:
            return super().read()  # returns the complete answer or raises
        data = super().read(MOST_BYTES + 1) if self.length is None else b""
        if self.length is not None or len(data) > MOST_BYTES:
            raise http.client.HTTPException(f"the answer has more than {MOST_BYTES >> 20} MiB")
        return data


class _HttpConnection(httplib2.HTTPConnectionWithTimeout):
    response_class = _LimitedResponse


class _HttpsConnection(httplib2.HTTPSConnectionWithTimeout):
    response_class = _LimitedResponse


class Http(httplib2.Http):
    """``timeout``: the most seconds between two parts of an answer."""

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout=timeout)
        self.follow_redirects = False  # the API never redirects, so a redirect may be an attack

    def request(self, uri: str, *args: Any, **kwargs: Any) -> Any:
        kind = _HttpsConnection if uri.lower().startswith("https:") else _HttpConnection
        return super().request(uri, *args, **{**kwargs, "connection_type": kind})


class AuthorizedHttp(google_auth_httplib2.AuthorizedHttp):
    """Sends the token only to Google's APIs with https, and to the origin of ``given``.

    Otherwise anyone who can change the discovery document, which has the addresses, could get it.
    """

    def __init__(self, credentials: Any, http: Http, given: str, described_at: str) -> None:
        super().__init__(credentials, http=http)
        self._given, self._described_at = given, described_at

    def request(self, uri: str, *args: Any, **kwargs: Any) -> Any:
        place = urlsplit(uri)
        google = place.scheme == "https" and (place.hostname or "").endswith(_GOOGLE)
        if not google and _origin(uri) != _origin(self._given):
            raise UsageError(
                f"the discovery document at {self._described_at} has the API at "
                f"{_origin(uri)}, which is not Google's; your token was not sent there. "
                f"If you trust this address, give --api_endpoint {_origin(uri)}"
            )
        return super().request(uri, *args, **kwargs)


def _origin(url: str) -> str:
    place = urlsplit(url)
    return f"{place.scheme}://{place.netloc.rpartition('@')[2]}".lower()
