"""The release of Lightning that all of this was written for; looked at before anything else."""

from __future__ import annotations

from ..changes import Changes

RELEASES = ["2.6.6"]

changes = Changes("lightning", RELEASES, extra="lightning")
# Beyond those, where its own names are to mean ours.
drop_in = Changes("lightning", RELEASES, extra="lightning")
