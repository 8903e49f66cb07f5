"""The name, zone and project of a node."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..supervision.metadata_server import ask
from .errors import UsageError

# An address and not a name: without a name server, looking up a name can take half a minute.
_METADATA_ADDRESS = "169.254.169.254"
_METADATA_SECONDS = 2
_ZONE_VARIABLES = ("CLOUDSDK_COMPUTE_ZONE",)
_PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")


@dataclass(frozen=True)
class NodeLocation:
    tpu: str
    zone: str
    project: str

    @property
    def location(self) -> str:
        """The parent of the zone's nodes in the API."""
        return f"projects/{self.project}/locations/{self.zone}"

    def gcloud(self, verb: str) -> str:
        """A gcloud command for this node that the user can run."""
        return (
            f"gcloud compute tpus tpu-vm {verb} {self.tpu} --zone {self.zone} "
            f"--project {self.project}"
        )


def find_node(tpu: str, zone: str | None, project: str | None) -> NodeLocation:
    """Returns the node, zone and project from the flags, with defaults for missing ones.

    The defaults come from gcloud's variables and, on Google Cloud, from this machine's metadata.

    Raises:
        UsageError: there is no zone or project, or a name is not valid.
    """
    project = project or _variable(_PROJECT_VARIABLES) or _metadata("project/project-id")
    # If there is no project, the metadata server did not answer, so do not query it again.
    zone = zone or _variable(_ZONE_VARIABLES) or (project and _zone_of_this_machine())
    missing = [flag for flag, value in (("--zone", zone), ("--project", project)) if not value]
    if missing:
        raise UsageError(
            f"give {' and '.join(missing)}: this machine is not on Google Cloud, and the variables "
            f"{', '.join(_ZONE_VARIABLES + _PROJECT_VARIABLES)} are not set"
        )
    for flag, value, form in (
        ("--tpu", tpu, r"[A-Za-z0-9._-]+"),
        ("--zone", zone, r"[A-Za-z0-9-]+"),
        ("--project", project, r"[A-Za-z0-9.:_-]+"),
    ):
        if not re.fullmatch(form, value):
            raise UsageError(f"{flag} {value!r} is not a valid name")
    return NodeLocation(tpu, zone, project)


def _variable(names: Sequence[str]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _zone_of_this_machine() -> str:
    return _metadata("instance/zone").rpartition("/")[2]  # projects/123/zones/us-central2-b


def _metadata(path: str) -> str:
    """A value of this machine's Google Cloud metadata; "" on other machines."""
    host = os.environ.get("GCE_METADATA_HOST") or _METADATA_ADDRESS
    try:
        return ask(host, path, _METADATA_SECONDS) or ""
    except OSError:
        return ""
