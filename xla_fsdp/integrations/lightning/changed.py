"""The changes in Lightning while the integration is installed."""

from __future__ import annotations

from ..changes import Changes

changes = Changes("lightning", extra="lightning")
# Further changes, which make Lightning's own names select this package.
drop_in = Changes("lightning", extra="lightning")
