"""What the TPU API says about a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ApiError

_SYMPTOMS = 3  # the last few tell what is wrong now


@dataclass(frozen=True)
class Endpoint:
    """A worker. ``external``: its address for machines outside of its network, or ""."""

    address: str
    external: str


@dataclass(frozen=True)
class Node:
    """``runtime`` is the software version, which v2 of the API calls runtimeVersion and v1
    tensorflowVersion. Texts are "" where the API says nothing."""

    state: str
    health: str
    health_description: str
    accelerator: str
    runtime: str
    endpoints: tuple[Endpoint, ...]
    symptoms: tuple[str, ...]
    maintenance: str
    spot: bool

    @property
    def usable(self) -> bool:
        return self.state == "READY" and self.health in ("HEALTHY", "")

    @classmethod
    def read(cls, answer: Any) -> Node:
        """The node of an answer of the API.

        Raises:
            ApiError: the answer is none.
        """
        if not isinstance(answer, Mapping) or not _text(answer, "state"):
            keys = ", ".join(sorted(answer)[:8]) if isinstance(answer, Mapping) else repr(answer)
            raise ApiError(
                f"the API answered without a state: {keys or 'nothing'}",
                "a node, as v1 and v2 of the TPU API describe it",
                "look at --discovery_url, and at a proxy in between",
            )
        scheduling = answer.get("schedulingConfig")
        spot = isinstance(scheduling, Mapping) and any(
            scheduling.get(kind) for kind in ("preemptible", "spot")
        )
        return cls(
            state=_text(answer, "state"),
            health=_text(answer, "health").replace("HEALTH_UNSPECIFIED", ""),
            health_description=_text(answer, "healthDescription"),
            accelerator=_text(answer, "acceleratorType").rpartition("/")[2],
            runtime=_text(answer, "runtimeVersion") or _text(answer, "tensorflowVersion"),
            endpoints=_endpoints(answer),
            symptoms=tuple(map(_symptom, _items(answer, "symptoms")[-_SYMPTOMS:])),
            maintenance=_maintenance(answer.get("upcomingMaintenance")),
            spot=spot,
        )


def _endpoints(answer: Mapping) -> tuple[Endpoint, ...]:
    # Nodes of v1 may have a single worker that is stated on the node itself.
    stated = _items(answer, "networkEndpoints") or [answer]
    found = []
    for endpoint in stated:
        access = endpoint.get("accessConfig")
        external = _text(access, "externalIp") if isinstance(access, Mapping) else ""
        found.append(Endpoint(_text(endpoint, "ipAddress"), external))
    return tuple(endpoint for endpoint in found if endpoint.address or endpoint.external)


def _symptom(symptom: Mapping) -> str:
    worker = _text(symptom, "workerId")
    parts = (
        _text(symptom, "symptomType") or "unnamed",
        f"on worker {worker}" if worker else "",
        f"at {_text(symptom, 'createTime')}" if symptom.get("createTime") else "",
        f"({_text(symptom, 'details')})" if symptom.get("details") else "",
    )
    return " ".join(part for part in parts if part)


def _maintenance(stated: Any) -> str:
    if not isinstance(stated, Mapping) or not stated:
        return ""
    kind, start = _text(stated, "type") or "planned", _text(stated, "windowStartTime")
    return f"{kind} from {start or 'a time not stated'}"


def _items(answer: Mapping, key: str) -> list[Mapping]:
    value = answer.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(answer: Mapping, key: str) -> str:
    value = answer.get(key)
    return value if isinstance(value, str) else ""
