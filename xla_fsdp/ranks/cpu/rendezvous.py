"""``xm.rendezvous`` and ``xm.mesh_reduce`` on CPU ranks: an exchange in Python.

torch_xla builds them from collectives over the payload's bytes; in one process a meeting is enough.
Payloads are pickled, so that ranks share no objects, as between processes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla

from ... import xlac
from .patches import Replacements


class Rendezvous(Replacements):
    """Of what meets on the host."""

    NAMES = ("rendezvous", "xla_rendezvous", "mesh_reduce")

    def rendezvous(
        self, tag: str, payload: bytes = b"", replicas: Sequence[int] = ()
    ) -> list[bytes]:
        """See ``xm.rendezvous``. Tags must be equal on all ranks (TPU only logs them)."""
        if self._session.rank_of() is None:
            return self._original["rendezvous"](tag, payload, list(replicas))
        return self._exchange("xm.rendezvous", tag, payload, replicas)

    def xla_rendezvous(
        self, payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
    ) -> list[bytes]:
        """See ``xm.xla_rendezvous``."""
        if self._session.rank_of() is None:
            return self._original["xla_rendezvous"](payload, ordinals, tag)
        return self._exchange("xm.xla_rendezvous", tag, payload, ordinals)

    def mesh_reduce(self, tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
        """See ``xm.mesh_reduce``: ``reduce_fn`` gets a copy of every rank's data, by rank."""
        if self._session.rank_of() is None:
            return self._original["mesh_reduce"](tag, data, reduce_fn)
        buffer = io.BytesIO()
        torch.save(xlac.tree_to_host(data), buffer)
        payloads = self._exchange("xm.mesh_reduce", tag, buffer.getvalue(), None)
        # These bytes were written by this process a moment ago: any class may be in them.
        return reduce_fn([torch.load(io.BytesIO(each), weights_only=False) for each in payloads])

    def _exchange(
        self, what: str, tag: str | None, payload: bytes, ordinals: Sequence[int] | None
    ) -> list[bytes]:
        context = self._session.rank_of()
        assert context is not None  # as its callers have seen
        if ordinals and len(ordinals) != self._session.size:
            raise ValueError(
                f"{what}: only a rendezvous of all {self._session.size} ranks is supported, "
                f"got ranks {list(ordinals)}; leave the argument out"
            )
        if not isinstance(payload, bytes):
            raise TypeError(f"{what}: payload must be bytes, got {type(payload).__name__}")
        torch_xla.sync()  # as on TPU, where a rendezvous is a program of its own
        return self._session.exchange(context, f"{what}({tag!r})", (what, tag), payload)
