"""Translates errors of the TPU API, the network or the credentials into messages for the user."""

from __future__ import annotations

import http.client
import json
import re

from ..wording import first_line, to_one_line
from .errors import ApiError, UsageError
from .where import NodeLocation

LOGIN = (
    "Run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to the "
    "path of a service account's key"
)
_TEMPORARY_STATUS = frozenset({408, 429})
_NETWORK = "check the network, the proxy and --discovery_url, then try again"


class UnknownNodeError(UsageError):
    """The API has no node with this name."""


def explain(error: Exception, where: NodeLocation) -> Exception:
    """The UsageError or ApiError for an error of a request; ``error`` itself if it is neither."""
    import google.auth.exceptions
    import httplib2
    from googleapiclient.errors import Error, HttpError

    if isinstance(error, HttpError):
        return _refused(int(error.resp.status), to_one_line(error._get_reason()), where)
    if isinstance(error, google.auth.exceptions.TransportError):
        return _unreachable(error)
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        return UsageError(f"the credentials do not work: {first_line(error)}. {LOGIN}")
    if isinstance(error, (httplib2.HttpLib2Error, OSError, http.client.HTTPException)):
        return _unreachable(error)
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, Error)):
        found = f"the API's answer cannot be read ({type(error).__name__}: {first_line(error)})"
        return ApiError(found, "a node, as JSON", _NETWORK)
    return error


def discovery_refused(url: str, status: int) -> Exception:
    """The error if the server at ``url`` does not return the discovery document."""
    found = f"the server of the discovery document {shown(url)} answered {status}"
    if _is_temporary(status):
        return ApiError(found, "200", "try again later", passing=True)
    return UsageError(f"{found}: check --discovery_url")


def discovery_invalid(url: str, error: Exception) -> UsageError:
    """The error if the answer from ``url`` is not a discovery document."""
    return UsageError(
        f"--discovery_url {shown(url)}: not a discovery document ({type(error).__name__}: "
        f"{first_line(error)})"
    )


def _refused(status: int, reason: str, where: NodeLocation) -> Exception:
    problem = f"the API answered {status}: {reason}"
    if _is_temporary(status):
        return ApiError(problem, "the node", "try again later", passing=True)
    if status == 401:
        return UsageError(f"{problem}. {LOGIN}")
    if status == 403:
        return UsageError(
            f"{problem}. Use an account that may read the TPUs of project {where.project} "
            "(role roles/tpu.viewer): 'gcloud auth application-default login'. If the API is not "
            f"enabled: 'gcloud services enable tpu.googleapis.com --project {where.project}'"
        )
    if status == 404:
        return UnknownNodeError(
            f"no node {where.tpu} in zone {where.zone} of project {where.project} ({reason})"
        )
    return UsageError(f"{problem}. Check --tpu, --zone and --project")


def shown(url: str) -> str:
    """A URL without the parts that may be secret: user, password and query."""
    return re.sub("(?<=//)[^/?#]*@", "", url).partition("?")[0].partition("#")[0]


def _is_temporary(status: int) -> bool:
    return status >= 500 or status in _TEMPORARY_STATUS


def _unreachable(error: Exception) -> ApiError:
    return ApiError(
        f"the API cannot be reached: {first_line(error)}", "an answer", _NETWORK, passing=True
    )
