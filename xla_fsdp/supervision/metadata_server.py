"""What the metadata server of a Google Cloud VM says: of the machine's near future, and its name.

Keys and values: "Spot VMs" and "Get VM maintenance events" in Compute Engine's documentation, which
TPU VMs follow. The server is on the machine itself, and asked without proxies and redirects.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Iterator

_ROOT = "/computeMetadata/v1/"
# Key to what it says when the machine is about to go, or to stand still.
_NOTICES = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("TRUE",),
}
KEYS = tuple(_NOTICES)
_LONGEST_ANSWER = 4096


def metadata_host() -> str | None:
    """``HOST`` or ``HOST:PORT`` of the metadata server, ``None`` where no machine has one.

    ``GCE_METADATA_HOST`` names another one, as for Google's client libraries; where that is not
    set, only a process on a TPU asks.
    """
    named = os.environ.get("GCE_METADATA_HOST", "").strip()
    if named:
        return named
    on_tpu = os.environ.get("PJRT_DEVICE", "").split("_")[0] == "TPU"
    return "metadata.google.internal" if on_tpu else None


def notice(host: str, key: str, timeout: float = 3.0) -> str | None:
    """What is announced now under one of :data:`KEYS`; ``None`` if the machine stays.

    Args:
        host: see :func:`metadata_host`.
        timeout: seconds to connect, and again for the whole answer.

    Raises:
        OSError: the server does not answer, or not as such a server does.
    """
    value = ask(host, f"instance/{key}", timeout)
    return value if value in _NOTICES[key] else None


def ask(host: str, key: str, timeout: float) -> str | None:
    """The beginning of the value of ``key``; ``None`` where the server knows none of that name.

    Raises:
        OSError: the server does not answer, or not as such a server does.
    """
    try:
        connection = http.client.HTTPConnection(host, timeout=timeout)
        with contextlib.closing(connection):
            connection.connect()
            with _cut_off(connection.sock, timeout):
                connection.request("GET", _ROOT + key, headers={"Metadata-Flavor": "Google"})
                answer = connection.getresponse()
                if answer.status == 404:
                    return None  # a machine without such events
                text = answer.read(_LONGEST_ANSWER)
        if answer.length:
            raise OSError(f"{host}: {answer.length} bytes of the answer for {key} are missing")
        if answer.status != 200 or answer.getheader("Metadata-Flavor") != "Google":
            raise OSError(f"{host} is no metadata server: status {answer.status} for {key}")
        return text.decode("ascii", errors="replace").strip()
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{host} does not answer in HTTP: {type(error).__name__}") from error


@contextlib.contextmanager
def _cut_off(connection: socket.socket, timeout: float) -> Iterator[None]:
    """Ends the connection after ``timeout`` seconds: a socket's own timeout is of each read, and a
    server that sends a byte now and then would have us listen to it for hours.

    Raises:
        TimeoutError: it was ended, whatever was read by then.
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
        raise TimeoutError(f"no whole answer in {timeout:g} s") from error
    finally:
        timer.cancel()
    if over.is_set():  # a body without a length ends where its connection does
        raise TimeoutError(f"no whole answer in {timeout:g} s")
