"""Queries the TPU API about a node, through cloud_tpu_client, with time limits and retries."""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import os
import random
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..extras import require_extra
from ..wording import first_line, join_some, to_one_line
from .findings import ApiError, UsageError
from .metadata_server import ask, within
from .node import Node, NodeLocation, passes

# The client's default, v1, has no runtime version of TPU VMs.
DISCOVERY_URL = "https://tpu.googleapis.com/$discovery/rest?version=v2"

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 16.0
_LISTED = 10
_REQUESTS = 3  # discovery document, token, node
_LOGIN = (
    "Run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to the "
    "path of a service account's key"
)
_NETWORK = "check the network, the proxy and --discovery_url, then try again"
# Not a name, whose look-up may take half a minute without a name server.
_METADATA_ADDRESS = "169.254.169.254"
_METADATA_SECONDS = 2


class _UnknownNodeError(UsageError):
    """The API has no node with this name."""


def find_node(tpu: str, zone: str | None, project: str | None) -> NodeLocation:
    """Gets what is missing from gcloud's variables and this machine's metadata, or raises
    UsageError.
    """
    variables = os.environ.get
    project = project or variables("GOOGLE_CLOUD_PROJECT") or variables("CLOUDSDK_CORE_PROJECT")
    project = project or _read_metadata("project/project-id")
    zone = zone or variables("CLOUDSDK_COMPUTE_ZONE")
    # Without a project, the metadata server did not answer.
    zone = zone or (project and _read_metadata("instance/zone").rpartition("/")[2])
    missing = [flag for flag, value in (("--zone", zone), ("--project", project)) if not value]
    if missing:
        raise UsageError(
            f"give {' and '.join(missing)}: this machine is not on Google Cloud, and the variables "
            "CLOUDSDK_COMPUTE_ZONE, GOOGLE_CLOUD_PROJECT, CLOUDSDK_CORE_PROJECT are not set"
        )
    for flag, value, form in (
        ("--tpu", tpu, r"[A-Za-z0-9._-]+"),
        ("--zone", zone, r"[A-Za-z0-9-]+"),
        ("--project", project, r"[A-Za-z0-9.:_-]+"),
    ):
        if not re.fullmatch(form, value):
            raise UsageError(f"{flag} {value!r} is not a valid name")
    return NodeLocation(tpu, zone, project)


def _read_metadata(path: str) -> str:
    """Empty on machines that are not on Google Cloud."""
    host = os.environ.get("GCE_METADATA_HOST") or _METADATA_ADDRESS
    try:
        return ask(host, path, _METADATA_SECONDS) or ""
    except OSError:
        return ""


@dataclass
class TpuApi:
    """The TPU API, queried with the user's credentials; UsageError if there are none.

    ``endpoint``: the API's address; if empty, that in the document at ``discovery_url``.
    """

    where: NodeLocation
    discovery_url: str
    endpoint: str
    timeout: float
    retries: int
    _service: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        require_extra("pod", "preflight", ("cloud_tpu_client", "googleapiclient", "absl"))
        self._credentials = _credentials()

    def node(self) -> Node:
        """Raises UsageError for wrong names or credentials, ApiError for an unexpected answer."""
        try:
            return Node.read(self._call_with_retries(self._get))
        except _UnknownNodeError as error:
            raise UsageError(f"{error}; {self._neighbours()}") from error

    def wait_until_usable(self, seconds: float, say: Callable[[str], None]) -> Node:
        """Waits until the node is READY and HEALTHY, or cannot become so, at most ``seconds``."""
        end = time.monotonic() + seconds
        pause = 1.0
        while True:
            node = self.node()
            left = end - time.monotonic()
            if node.usable or not passes(node.state) or left <= 0:
                return node
            say(f"waiting: state {node.state}, health {node.health or 'not stated'}")
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _get(self) -> Any:
        from cloud_tpu_client import Client

        where = self.where
        client = Client(where.tpu, where.zone, where.project, service=self._connected())
        try:
            # Each public getter makes a separate request, and none returns runtimeVersion.
            return client._fetch_cloud_tpu_metadata()
        except ValueError as error:
            raise error.__context__ or error from None

    def _neighbours(self) -> str:
        try:
            nodes = self._connected().projects().locations().nodes()
            answer = self._call_with_retries(nodes.list(parent=self.where.location).execute)
            names = [str(node["name"]).rpartition("/")[2] for node in answer.get("nodes", [])]
        except Exception:
            return "the nodes there cannot be listed"
        return f"there are {join_some(sorted(names), _LISTED) or 'no nodes in that zone'}"

    def _connected(self) -> Any:
        if self._service is not None:
            return self._service
        from googleapiclient import discovery

        from .http_client import AuthorizedHttp, Http

        url, endpoint = self.discovery_url, self.endpoint
        http = Http(self.timeout)
        response, content = http.request(url)
        if response.status >= 300:
            found = (
                f"the server of the discovery document {redact_url(url)} answered {response.status}"
            )
            if _is_temporary(response.status):
                raise ApiError(found, "200", "try again later", passing=True)
            raise UsageError(f"{found}: check --discovery_url")
        try:
            service = discovery.build_from_document(
                json.loads(content.decode("utf-8")),
                http=AuthorizedHttp(self._credentials, http, endpoint or url, redact_url(url)),
                client_options={"api_endpoint": endpoint} if endpoint else None,
            )
            # Fails if this is not the TPU API.
            service.projects().locations().nodes().get(name=f"{self.where.location}/nodes/x")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--discovery_url {redact_url(url)}: not a discovery document "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error
        self._service = service
        return service

    def _call_with_retries(self, call: Callable[[], Any]) -> Any:
        for attempt in itertools.count():
            try:
                return within(_REQUESTS * self.timeout, call)
            except Exception as error:
                what = _explain(self._without_token(error), self.where)
                if isinstance(error, TimeoutError):
                    self._service = None  # a thread may still read
                if not isinstance(what, ApiError) or not what.passing:
                    raise what from error.__cause__ if what is error else error
                if attempt == self.retries:
                    what.found += f" (tried {attempt + 1} times)"
                    raise what from error
                pause = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)
                time.sleep(pause * random.uniform(0.75, 1.25))

    def _without_token(self, error: Exception) -> Exception:
        """A server may repeat the token in its answer."""
        token = getattr(self._credentials, "token", None)
        content = getattr(error, "content", None)
        if token and isinstance(content, bytes):
            vars(error)["content"] = content.replace(token.encode(), b"[token]")
        return error


def _credentials() -> Any:
    """google-auth supports more kinds of credentials than oauth2client."""
    import google.auth
    import google.auth.exceptions

    # They would log every place without credentials.
    for name in ("google.auth", "googleapiclient"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return google.auth.default(scopes=[_SCOPE])[0]
    except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
        reason = first_line(error).partition(". ")[0].rstrip(".")
        raise UsageError(f"no credentials: {reason}. {_LOGIN}") from error


def _explain(error: Exception, where: NodeLocation) -> Exception:
    """The UsageError or ApiError for an error of a request, or ``error`` itself."""
    import google.auth.exceptions
    import httplib2
    from googleapiclient.errors import Error, HttpError

    if isinstance(error, HttpError):
        return _refused(int(error.resp.status), to_one_line(error._get_reason()), where)
    if isinstance(error, google.auth.exceptions.GoogleAuthError) and not isinstance(
        error, google.auth.exceptions.TransportError
    ):
        return UsageError(f"the credentials do not work: {first_line(error)}. {_LOGIN}")
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, Error)):
        found = f"the API's answer cannot be read ({type(error).__name__}: {first_line(error)})"
        return ApiError(found, "a node, as JSON", _NETWORK)
    network = (httplib2.HttpLib2Error, OSError, http.client.HTTPException)
    if isinstance(error, (*network, google.auth.exceptions.TransportError)):
        found = f"the API cannot be reached: {first_line(error)}"
        return ApiError(found, "an answer", _NETWORK, passing=True)
    return error


def _refused(status: int, reason: str, where: NodeLocation) -> Exception:
    problem = f"the API answered {status}: {reason}"
    if _is_temporary(status):
        return ApiError(problem, "the node", "try again later", passing=True)
    if status == 401:
        return UsageError(f"{problem}. {_LOGIN}")
    if status == 403:
        return UsageError(
            f"{problem}. Use an account that may read the TPUs of project {where.project} "
            "(role roles/tpu.viewer): 'gcloud auth application-default login'. If the API is not "
            f"enabled: 'gcloud services enable tpu.googleapis.com --project {where.project}'"
        )
    if status == 404:
        return _UnknownNodeError(
            f"no node {where.tpu} in zone {where.zone} of project {where.project} ({reason})"
        )
    return UsageError(f"{problem}. Check --tpu, --zone and --project")


def _is_temporary(status: int) -> bool:
    return status >= 500 or status in (408, 429)


def redact_url(url: str) -> str:
    """A URL without user, password and query, which may be secret."""
    return re.sub("(?<=//)[^/?#]*@", "", url).partition("?")[0].partition("#")[0]
