"""A node as the TPU API describes it, and the checks of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..tpu.topology import Slice, UnknownTopologyError, resolve
from .findings import ApiError, Finding, failed, ok, skipped, warning

_SYMPTOMS = 3  # the last ones describe the current problem
# Whether waiting helps, and the remedy. States of v2 of the API, which include v1's.
_COMING = (True, "wait for it: --wait 900")
_GONE = (False, "'{delete}', then create it again; the data on its disks is lost")
_SUPPORT = (False, "it was taken out of use by Google Cloud: ask its support")
_STATES = {
    "READY": (True, ""),  # READY but unhealthy
    **dict.fromkeys(("CREATING", "STARTING", "RESTARTING", "REIMAGING", "UNHIDING"), _COMING),
    "REPAIRING": (True, f"{_COMING[1]}; if it stays so, {_GONE[1]}"),
    "STOPPED": (False, "'{start}'"),
    "STOPPING": (False, "wait until it is STOPPED, then '{start}'"),
    "PREEMPTED": _GONE,
    "TERMINATED": _GONE,
    "DELETING": (False, "create another one"),
    "HIDING": _SUPPORT,
    "HIDDEN": _SUPPORT,
}
_OTHER = (False, "inspect it with '{describe}'")
# Any other value except HEALTHY is unhealthy too.
_HEALTH_REMEDIES = {
    "UNHEALTHY_MAINTENANCE": "its host is under maintenance: wait (--wait 900), or '{delete}' and "
    "create it again",
    "TIMEOUT": "it does not answer the health monitor: wait (--wait 300), then '{stop}' and "
    "'{start}'",
}
_OTHER_HEALTH = "read the symptoms, then '{stop}' and '{start}', or create it again"


@dataclass(frozen=True)
class NodeLocation:
    tpu: str
    zone: str
    project: str

    @property
    def location(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    def fill(self, remedy: str) -> str:
        """Replaces ``{start}``, ``{stop}``, ``{delete}`` and ``{describe}`` by commands."""
        flags = f"{self.tpu} --zone {self.zone} --project {self.project}"
        verbs = ("start", "stop", "delete", "describe")
        return remedy.format_map({v: f"gcloud compute tpus tpu-vm {v} {flags}" for v in verbs})


class Endpoint(NamedTuple):
    """``external``: for machines outside of its network, or ""."""

    address: str
    external: str


@dataclass(frozen=True)
class Node:
    """The properties of a node; texts are "" if the API does not state them."""

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
        """Raises ApiError if ``answer`` is not a node."""
        if not isinstance(answer, Mapping) or not _text_of(answer, "state"):
            keys = ", ".join(sorted(answer)[:8]) if isinstance(answer, Mapping) else repr(answer)
            raise ApiError(
                f"the API's answer has no state, only: {keys or 'nothing'}",
                "a node as in v1 or v2 of the TPU API",
                "check --discovery_url, and proxies on the way to the API",
            )
        scheduling = answer.get("schedulingConfig")
        spot = isinstance(scheduling, Mapping) and any(
            scheduling.get(kind) for kind in ("preemptible", "spot")
        )
        return cls(
            state=_text_of(answer, "state"),
            health=_text_of(answer, "health").replace("HEALTH_UNSPECIFIED", ""),
            health_description=_text_of(answer, "healthDescription"),
            accelerator=_text_of(answer, "acceleratorType").rpartition("/")[2],
            runtime=_text_of(answer, "runtimeVersion") or _text_of(answer, "tensorflowVersion"),
            endpoints=_endpoints(answer),
            symptoms=tuple(map(_symptom, _mappings_of(answer, "symptoms")[-_SYMPTOMS:])),
            maintenance=_maintenance(answer.get("upcomingMaintenance")),
            spot=spot,
        )


def _endpoints(answer: Mapping) -> tuple[Endpoint, ...]:
    # In v1, a node with a single worker may have the worker's address in the node itself.
    stated = _mappings_of(answer, "networkEndpoints") or [answer]
    found = []
    for endpoint in stated:
        access = endpoint.get("accessConfig")
        external = _text_of(access, "externalIp") if isinstance(access, Mapping) else ""
        found.append(Endpoint(_text_of(endpoint, "ipAddress"), external))
    return tuple(endpoint for endpoint in found if endpoint.address or endpoint.external)


def _symptom(symptom: Mapping) -> str:
    worker = _text_of(symptom, "workerId")
    parts = (
        _text_of(symptom, "symptomType") or "unnamed",
        f"on worker {worker}" if worker else "",
        f"at {_text_of(symptom, 'createTime')}" if symptom.get("createTime") else "",
        f"({_text_of(symptom, 'details')})" if symptom.get("details") else "",
    )
    return " ".join(part for part in parts if part)


def _maintenance(stated: Any) -> str:
    if not isinstance(stated, Mapping) or not stated:
        return ""
    kind, start = _text_of(stated, "type") or "planned", _text_of(stated, "windowStartTime")
    return f"{kind} from {start or 'an unknown time'}"


def _mappings_of(answer: Mapping, key: str) -> list[Mapping]:
    value = answer.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text_of(answer: Mapping, key: str) -> str:
    value = answer.get(key)
    return value if isinstance(value, str) else ""


def passes(state: str) -> bool:
    """Whether waiting may make the node READY and HEALTHY."""
    return _STATES.get(state, _OTHER)[0]


def slice_of_type(accelerator: str) -> Slice | None:
    try:
        return resolve(accelerator)
    except UnknownTopologyError:
        return None


def check_node(
    node: Node,
    where: NodeLocation,
    accelerator: str | None,
    runtime: str | None,
    world_size: int | None,
) -> Iterator[Finding]:
    """An expected value of ``None`` allows any."""
    yield _check_state(node, where)
    yield _health(node, where)
    if node.symptoms:
        remedy = "they may be from an earlier run; if they are new, inspect that worker"
        yield warning("symptoms", "; ".join(node.symptoms), "none", remedy)
    if node.maintenance:
        remedy = "save checkpoints often, or start after the maintenance"
        yield warning("maintenance", node.maintenance, "none", remedy)
    wanted = slice_of_type(node.accelerator)
    if accelerator is not None and _same_slice(slice_of_type(accelerator), wanted):
        accelerator = node.accelerator  # v5e-16 is a v5litepod-16
    yield _check_stated("accelerator type", node.accelerator, accelerator, "--accelerator_type")
    yield _check_stated("runtime version", node.runtime, runtime, "--runtime_version")
    yield _workers(node, where, wanted)
    if world_size is not None:
        yield _world_size(node, wanted, world_size)


def _check_state(node: Node, where: NodeLocation) -> Finding:
    if node.state != "READY":
        return failed("state", node.state, "READY", where.fill(_STATES.get(node.state, _OTHER)[1]))
    kind = ", spot: may be preempted at any time" if node.spot else ""
    return ok("state", f"READY ({where.tpu} in {where.zone}{kind})")


def _health(node: Node, where: NodeLocation) -> Finding:
    if node.health == "HEALTHY":
        return ok("health", "HEALTHY")
    if node.state != "READY":
        return skipped("health", f"{node.health or 'not stated'}, because the node is not READY")
    if not node.health:
        return warning("health", "not stated", "HEALTHY", "wait for the first report: --wait 300")
    found = f"{node.health}: {node.health_description}".removesuffix(": ")
    remedy = _HEALTH_REMEDIES.get(node.health, _OTHER_HEALTH)
    return failed("health", found, "HEALTHY", where.fill(remedy))


def _same_slice(a: Slice | None, b: Slice | None) -> bool:
    return a is not None and b is not None and (a.chip.family, a.shape) == (b.chip.family, b.shape)


def _check_stated(name: str, found: str, expected: str | None, flag: str) -> Finding:
    shown = found or "not stated"
    if expected is None or found == expected:
        return ok(name, shown)
    return failed(name, shown, expected, f"create the node with {expected}, or change {flag}")


def _workers(node: Node, where: NodeLocation, wanted: Slice | None) -> Finding:
    name, count = "worker count", len(node.endpoints)
    again = where.fill("'{describe}'; if it stays so, create the node again")
    if not count and node.state != "READY":
        return skipped(name, "no workers, because the node is not READY")
    if not count:
        return failed(name, "no network endpoints", "one for each worker", again)
    if wanted is None:
        found = (
            f"{count}, of an accelerator type that this version of xla_fsdp does not know: "
            f"{node.accelerator or 'not stated'}"
        )
        return warning(name, found, "a known type, such as v4-32", "count the workers manually")
    if count != wanted.hosts:
        expected = f"{wanted.hosts} for {node.accelerator}"
        return failed(name, f"{count} network endpoints", expected, again)
    return ok(name, f"{count} ({node.accelerator}: {wanted.chips} chips)")


def _world_size(node: Node, wanted: Slice | None, ranks: int) -> Finding:
    name, count = "world size", len(node.endpoints)
    if wanted is not None and wanted.devices == ranks:
        each = wanted.devices // wanted.hosts
        return ok(name, f"{ranks} ({wanted.hosts} workers of {each} devices)")
    if wanted is not None:
        found = f"{wanted.devices} devices in {node.accelerator}"
        remedy = f"run with {wanted.devices} ranks, or on another slice"
        return failed(name, found, str(ranks), remedy)
    if not count or ranks % count:
        remedy = "run one rank for each device of a worker"
        return failed(name, f"{count} workers", f"a number that divides {ranks}", remedy)
    found = f"{count} workers with an unknown number of devices"
    expected = f"{ranks // count} devices on each, for {ranks} ranks"
    return warning(name, found, expected, "check the number of devices of a worker")
