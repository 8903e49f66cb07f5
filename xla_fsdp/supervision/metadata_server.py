"""What the metadata server of a Google Cloud VM says of the machine's near future.

Keys and values: "Spot VMs" and "Get VM maintenance events" in Compute Engine's documentation, which
TPU VMs follow. The server is on the machine itself, and asked without proxies and redirects.
"""

from __future__ import annotations

import http.client
import os

_ROOT = "/computeMetadata/v1/instance/"
# Key to what it says when the machine is about to go, or to stand still.
_NOTICES = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("TRUE",),
}
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


def notices(host: str, timeout: float = 3.0) -> dict[str, str]:
    """What is announced now, by key; empty if the machine stays.

    Args:
        host: see :func:`metadata_host`.
        timeout: seconds for each read.

    Raises:
        OSError: the server does not answer, or not as such a server does.
    """
    found = {}
    for key, said in _NOTICES.items():
        value = _ask(host, key, timeout)
        if value in said:
            found[key] = value
    return found


def _ask(host: str, key: str, timeout: float) -> str | None:
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        connection.request("GET", _ROOT + key, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        if answer.status == 404:
            return None  # a machine without such events
        text = answer.read(_LONGEST_ANSWER)
        if answer.status != 200 or answer.getheader("Metadata-Flavor") != "Google":
            raise OSError(f"{host} is no metadata server: status {answer.status} for {key}")
        return text.decode("ascii", errors="replace").strip()
    except http.client.HTTPException as error:
        raise OSError(f"{host} does not answer in HTTP: {type(error).__name__}") from error
    finally:
        connection.close()
