"""Queries the metadata server of a Google Cloud VM for maintenance events and for its name.

Source: "Spot VMs" and "Get VM maintenance events" in Compute Engine's documentation.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_ROOT = "/computeMetadata/v1/"
# Values when the machine will be stopped or paused.
_NOTICES = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("TRUE",),
}
KEYS = tuple(_NOTICES)
_LONGEST_ANSWER = 4096


def notice(host: str, key: str, timeout: float = 3.0) -> str | None:
    """The current announcement under one of :data:`KEYS`, or ``None``; raises as :func:`ask`."""
    value = ask(host, f"instance/{key}", timeout)
    return value if value in _NOTICES[key] else None


def ask(host: str, key: str, timeout: float) -> str | None:
    """The beginning of the value of ``key``; ``None`` if the server does not have the key.

    ``timeout``: seconds to connect, and again for the complete answer. Raises OSError if no
    metadata server answers.
    """
    try:
        connection = http.client.HTTPConnection(host, timeout=timeout)
        with contextlib.closing(connection):
            connection.connect()
            sock = connection.sock
            try:
                return within(timeout, lambda: _request_key(connection, host, key))
            finally:  # ends a thread that still reads
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{host} does not answer in HTTP: {type(error).__name__}") from error


def _request_key(connection: http.client.HTTPConnection, host: str, key: str) -> str | None:
    connection.request("GET", _ROOT + key, headers={"Metadata-Flavor": "Google"})
    with connection.getresponse() as answer:
        if answer.status == 404:
            return None
        text = answer.read(_LONGEST_ANSWER)
        if answer.length:
            raise OSError(f"{host}: {answer.length} bytes of the answer for {key} are missing")
    if answer.status != 200 or answer.getheader("Metadata-Flavor") != "Google":
        raise OSError(f"{host} is not a metadata server: status {answer.status} for {key}")
    return text.decode("ascii", errors="replace").strip()


def within(seconds: float, call: Callable[[], T]) -> T:
    """Calls ``call()`` in a thread; raises TimeoutError after ``seconds``, but the call continues.

    A socket's timeout is for each read, so a server that sends single bytes could take hours.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result.done():
        raise TimeoutError(f"timed out: no complete answer in {seconds:g} s")
    return result.result()
