"""The states of a node: whether it gets usable by itself, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .where import Where

_COMING = "wait for it: --wait 900"
_GONE = "'{delete}', then create it again; what was on its disks is lost"

# State: whether waiting helps, remedy. The states are those of v2 of the API; v1 has no others.
_STATES: Mapping[str, tuple[bool, str]] = MappingProxyType(
    {
        "READY": (True, ""),  # and unhealthy, or nobody would wait
        "CREATING": (True, _COMING),
        "STARTING": (True, _COMING),
        "RESTARTING": (True, _COMING),
        "REIMAGING": (True, _COMING),
        "REPAIRING": (True, f"{_COMING}; if it lasts, {_GONE}"),
        "UNHIDING": (True, _COMING),
        "STOPPED": (False, "'{start}'"),
        "STOPPING": (False, "wait until it is STOPPED, then '{start}'"),
        "PREEMPTED": (False, _GONE),
        "TERMINATED": (False, _GONE),
        "DELETING": (False, "create another one"),
        "HIDING": (False, "it was taken out of use by Google Cloud: ask its support"),
        "HIDDEN": (False, "it was taken out of use by Google Cloud: ask its support"),
    }
)
_OTHER = (False, "look at it with '{describe}'")


def passes(state: str) -> bool:
    """Whether a node in this state may become READY and HEALTHY if one waits."""
    return _STATES.get(state, _OTHER)[0]


def remedy(state: str, where: Where) -> str:
    commands = {verb: where.gcloud(verb) for verb in ("start", "delete", "describe")}
    return _STATES.get(state, _OTHER)[1].format(**commands)
