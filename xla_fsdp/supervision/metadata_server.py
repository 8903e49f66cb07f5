"""Queries the metadata server of a Google Cloud VM for maintenance events and for its name.

Keys and values: "Spot VMs" and "Get VM maintenance events" in Compute Engine's documentation, which
also applies to TPU VMs. The server is on the machine, so queries use no proxies and redirects.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Iterator

_ROOT = "/computeMetadata/v1/"
# For each key, its values when the machine will be stopped or paused.
_NOTICES = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("TRUE",),
}
KEYS = tuple(_NOTICES)
_LONGEST_ANSWER = 4096


def metadata_host() -> str | None:
    """``HOST`` or ``HOST:PORT`` of the metadata server, ``None`` if there is none.

    ``GCE_METADATA_HOST`` selects another server, as in Google's client libraries. If it is not set,
    there is a server only for a process on a TPU.
    """
    named = os.environ.get("GCE_METADATA_HOST", "").strip()
    if named:
        return named
    on_tpu = os.environ.get("PJRT_DEVICE", "").split("_")[0] == "TPU"
    return "metadata.google.internal" if on_tpu else None


def notice(host: str, key: str, timeout: float = 3.0) -> str | None:
    """The current announcement under one of :data:`KEYS`; ``None`` if there is none.

    Args:
        host: see :func:`metadata_host`.
        timeout: seconds to connect, and again for the complete answer.

    Raises:
        OSError: there is no answer, or it is not from a metadata server.
    """
    value = ask(host, f"instance/{key}", timeout)
    return value if value in _NOTICES[key] else None


def ask(host: str, key: str, timeout: float) -> str | None:
    """The beginning of the value of ``key``; ``None`` if the server does not have the key.

    Raises:
        OSError: there is no answer, or it is not from a metadata server.
    """
    try:
        connection = http.client.HTTPConnection(host, timeout=timeout)
        with contextlib.closing(connection):
            connection.connect()
            with _cut_off(connection.sock, timeout):
                connection.request("GET", _ROOT + key, headers={"Metadata-Flavor": "Google"})
                answer = connection.getresponse()
                if answer.status == 404:
                    return None  # this machine does not have such events
                text = answer.read(_LONGEST_ANSWER)
        if answer.length:
            raise OSError(f"{host}: {answer.length} bytes of the answer for {key} are missing")
        if answer.status != 200 or answer.getheader("Metadata-Flavor") != "Google":
            raise OSError(f"{host} is not a metadata server: status {answer.status} for {key}")
        return text.decode("ascii", errors="replace").strip()
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{host} does not answer in HTTP: {type(error).__name__}") from error


@contextlib.contextmanager
def _cut_off(connection: socket.socket, timeout: float) -> Iterator[None]:
    """A context that closes the connection after ``timeout`` seconds.

    The timeout of a socket is for each read: a server that sends a byte at a time could keep the
    connection open for hours.

    Raises:
        TimeoutError: the connection was closed, even if some of the answer was read.
    """
    over = threading.Event()

    def end() -> None:
        over.set()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if not over.is_set():
            raise
        raise TimeoutError(f"no complete answer in {timeout:g} s") from error
    finally:
        timer.cancel()
    if over.is_set():  # a body without a length ends when its connection is closed
        raise TimeoutError(f"no complete answer in {timeout:g} s")
