"""Queries the TPU API about a node, through cloud_tpu_client, with time limits and retries.

``cloud_tpu_client.Client`` has neither, and reports every error as "could not lookup". So this
module creates the service object that the client uses, and inspects the errors that it raises.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from ..extras import require_extra
from ..wording import first_line, join_some
from . import trouble
from .errors import ApiError, UsageError
from .node import Node, passes
from .where import NodeLocation

# v1, the client's default, does not have the runtime version of TPU VMs.
DISCOVERY_URL = "https://tpu.googleapis.com/$discovery/rest?version=v2"

Found = TypeVar("Found")

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 16.0  # seconds between two tries
_LISTED = 10  # nodes
_REQUESTS = 3  # the most for one answer: the discovery document, a token, the node


class TpuApi:
    """The TPU API, queried with the user's credentials.

    Args:
        discovery_url: URL of the discovery document, which needs no credentials.
        endpoint: the address of the API; if empty, the address in that document.
        timeout: time limit of one request in seconds.
        retries: number of retries after errors of the server or the network.

    Raises:
        MissingExtraError: the ``pod`` extra is not installed.
        UsageError: there are no credentials.
    """

    def __init__(
        self,
        where: NodeLocation,
        *,
        discovery_url: str,
        endpoint: str,
        timeout: float,
        retries: int,
    ) -> None:
        require_extra("pod", "preflight", ("cloud_tpu_client", "googleapiclient", "absl"))
        self._where = where
        self._discovery_url = discovery_url
        self._endpoint = endpoint
        self._timeout = timeout
        self._retries = retries
        self._credentials = _credentials()
        self._service: Any = None

    def node(self) -> Node:
        """Returns the current state of the node.

        Raises:
            UsageError: there is no such node, no permission, or the credentials are wrong.
            ApiError: the API does not answer, or its answer is not a node.
        """
        try:
            return Node.read(self._call_with_retries(self._get))
        except trouble.UnknownNodeError as error:
            raise UsageError(f"{error}; {self._neighbours()}") from error

    def _get(self) -> Any:
        from cloud_tpu_client import Client

        where = self._where
        client = Client(where.tpu, where.zone, where.project, service=self._connected())
        try:
            # One request for all properties. Each public getter makes a separate request, so state
            # and health could be from different times, and no getter returns v2's runtimeVersion.
            return client._fetch_cloud_tpu_metadata()
        except ValueError as error:
            raise error.__context__ or error from None

    def _neighbours(self) -> str:
        """Text with the names of the zone's nodes, if the API lists them."""
        try:
            nodes = self._connected().projects().locations().nodes()
            answer = self._call_with_retries(nodes.list(parent=self._where.location).execute)
            names = [str(node["name"]).rpartition("/")[2] for node in answer.get("nodes", [])]
        except Exception:  # this only adds information to an error that is reported anyway
            return "the nodes there cannot be listed"
        if not names:
            return "there are no nodes in that zone"
        return f"there are {join_some(sorted(names), _LISTED)}"

    def _connected(self) -> Any:
        if self._service is None:
            self._service = self._connect()
        return self._service

    def _connect(self) -> Any:
        from googleapiclient import discovery

        from .asking import AuthorizedHttp, Http

        http = Http(self._timeout)
        response, content = http.request(self._discovery_url)
        if response.status >= 300:
            raise trouble.discovery_refused(self._discovery_url, response.status)
        options = {"api_endpoint": self._endpoint} if self._endpoint else None
        try:
            service = discovery.build_from_document(
                json.loads(content.decode("utf-8")),
                http=AuthorizedHttp(
                    self._credentials,
                    http,
                    self._endpoint or self._discovery_url,
                    self._discovery_url,
                ),
                client_options=options,
            )
            # The document defines these methods: this fails if it does not describe the TPU API.
            service.projects().locations().nodes().get(name=f"{self._where.location}/nodes/x")
            return service
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise trouble.discovery_invalid(self._discovery_url, error) from error

    def _call_with_retries(self, call: Callable[[], Any]) -> Any:
        """Calls ``call()``, and again after errors that may be temporary."""
        for attempt in range(self._retries + 1):
            try:
                return _within(_REQUESTS * self._timeout, call)
            except Exception as error:
                what = trouble.explain(self._without_token(error), self._where)
                if isinstance(error, TimeoutError):
                    self._service = None  # a thread may still be reading from its connection
                if what is error:
                    raise
                if not isinstance(what, ApiError) or not what.passing:
                    raise what from error
                if attempt == self._retries:
                    what.found += f" (tried {attempt + 1} times)"
                    raise what from error
                pause = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)
                # Random pauses, so that clients do not retry at the same moments.
                time.sleep(pause * random.uniform(0.75, 1.25))
        raise AssertionError("unreachable")

    def _without_token(self, error: Exception) -> Exception:
        """Removes the token from an error, because a server may repeat it in its answer."""
        token = getattr(self._credentials, "token", None)
        content = getattr(error, "content", None)
        if token and isinstance(content, bytes):
            vars(error)["content"] = content.replace(token.encode(), b"[token]")
        return error


def _credentials() -> Any:
    """The application default credentials of google-auth.

    google-auth supports more kinds of credentials than the oauth2client of cloud_tpu_client.
    """
    import google.auth
    import google.auth.exceptions

    # They would log every place without credentials, and advice on quotas.
    for name in ("google.auth", "googleapiclient"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return google.auth.default(scopes=[_SCOPE])[0]
    except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
        reason = first_line(error).partition(". ")[0].rstrip(".")  # without the advice after it
        raise UsageError(f"no credentials: {reason}. {trouble.LOGIN}") from error


def wait_until_usable(api: TpuApi, seconds: float, say: Callable[[str], None]) -> Node:
    """Waits until the node is READY and HEALTHY, or cannot become so, for at most ``seconds``."""
    end = time.monotonic() + seconds
    pause = 1.0
    while True:
        node = api.node()
        left = end - time.monotonic()
        if node.usable or not passes(node.state) or left <= 0:
            return node
        say(f"waiting: state {node.state}, health {node.health or 'not stated'}")
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _within(seconds: float, call: Callable[[], Found]) -> Found:
    """Calls ``call()``; raises TimeoutError after ``seconds``, also if some bytes arrive.

    After a timeout the call continues in a thread that ends with the process.
    """
    ended: list[Callable[[], Found]] = []

    def run() -> None:
        try:
            value = call()
            ended.append(lambda: value)
        except BaseException as error:
            ended.append(_raises(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended:
        raise TimeoutError(f"timed out: no complete answer in {seconds:g} s")
    return ended[0]()


def _raises(error: BaseException) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run
