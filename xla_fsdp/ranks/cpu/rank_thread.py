"""The life of one rank's thread, from its function's first line to its result."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ...tree import map_tensors, tensors_in
from ..errors import Preempted, RankError, RankStopped
from ..rank import RankContext, _set_current_rank
from .mode import RankMode
from .session import Session
from .sync_points import adopt_autograd_thread

_OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "worker.py"))


class RankThread(threading.Thread):
    """Runs ``fn(rank, *args)`` as one rank.

    A daemon: a rank that is stuck in C++ must not keep the process from ending.

    Attributes:
        result: what ``fn`` returned, XLA tensors in it moved to the CPU.
        interrupted: :class:`RankStopped` was raised in this thread.
    """

    def __init__(
        self,
        session: Session,
        context: RankContext,
        fn: Callable,
        args: tuple,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(name=f"rank {context.rank}", daemon=True)
        self.result: Any = None
        self.interrupted = False
        self._session = session
        self._context = context
        self._fn = fn
        self._fn_args = args
        self._on_end = on_end

    def run(self) -> None:
        session, context = self._session, self._context
        context.thread = threading.get_ident()
        session.adopt_thread(context)
        try:
            with RankMode(session, context):
                adopt_autograd_thread(session, context)
                value = self._call()
                session.materialize(
                    context, [t for t in tensors_in(value) if t.device.type == "xla"]
                )
                self.result = _to_cpu(value)
                session.finish(context)
        except RankStopped:
            pass
        except BaseException as error:  # whatever it is, the caller gets it
            session.barrier.stop(_rank_error(session, context, error))
        finally:
            _set_current_rank(None)
            # The caller may keep the error and so this frame: it must not keep the model.
            del self._fn, self._fn_args
            self._on_end()

    def _call(self) -> Any:
        try:
            return self._fn(self._context.rank, *self._fn_args)
        except Preempted as error:
            # An end that all ranks come to, like a return; launch hands it on when they have.
            self._session.preempted = error
            return None
        except SystemExit as error:
            if error.code in (None, 0):
                return None
            raise


def _rank_error(session: Session, context: RankContext, error: BaseException) -> RankError:
    error.__traceback__ = _users_part(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    others = session.barrier.places().splitlines()
    del others[context.rank]
    who = f"rank {context.rank} of {context.size}"
    message = f"{who} raised {type(error).__name__}: {error}"
    if others:
        message += "\n\nThe other ranks were stopped:\n" + "\n".join(others)
    failure = RankError(message, context.rank, text)
    failure.__cause__ = error
    return failure


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    # The frames that lead from this file to the user's function say nothing about the error.
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in _OWN_FILES:
        first = first.tb_next
    return first or trace


def _to_cpu(value: Any) -> Any:
    return map_tensors(lambda t: t.detach().cpu() if t.is_xla else t, value)
