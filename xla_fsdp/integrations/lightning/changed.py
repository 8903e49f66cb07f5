"""What changes in Lightning while its integration is installed."""

from __future__ import annotations

from ..changes import Changes

changes = Changes("lightning", extra="lightning")
# Beyond those, where its own names are to mean ours.
drop_in = Changes("lightning", extra="lightning")
