"""``detect_divergence``: the first module that makes a value that is not finite, and ranks that
differ where they must not.

Hooks leave a flag for each tensor that goes from module to module, and for each gradient that comes
back: one element on the device, part of the step's program. Flags are in the order in which they
were traced, which is the same on every rank, so "first" has a meaning across ranks: a rank whose
own data made a NaN is earlier than those that got it in a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..checkpoint.meeting import Meeting
from ..collectives.random_state import at_rest
from ..planning.tracing.naming import plain
from ..scan.blocks import ScannedBlocks
from ..tree import tensors_in
from ..wording import some_of

_SEEN = "_xla_fsdp_divergence"  # on a tensor that is watched


class _Seen:
    """Where a tensor that is watched comes from and goes to.

    Attributes:
        what: for messages.
        makers: modules that returned it, the innermost first.
        takers: modules that were called with it, in order.
        step: in which this was; a tensor may be an input in the next one, too.
    """

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step
        self.makers: list[str] = []
        self.takers: list[str] = []

    def made_gradient(self) -> tuple[str, str | None]:
        """What made its gradient: in words, and the module."""
        if self.takers:
            inner = _innermost(self.takers)
            return f"the gradient that {_shown(inner)} gave back", inner
        if self.makers and self.makers[-1]:  # taken by what the next outer module does itself
            outer = self.makers[-1].rpartition(".")[0]
            return f"the gradient of {self.what}, from {_shown(outer)} itself,", outer
        return f"the gradient of {self.what}", None


class DivergenceError(RuntimeError):
    """A value is not finite, or ranks differ; raised on every rank.

    Attributes:
        step: the step, the first one counted as 1.
        ranks: where it was first, or those that differ from most.
        module: dotted name of the module that made the first value that is not finite; ``None`` if
            no module did, or ranks differ.
    """

    def __init__(self, message: str, step: int, ranks: list[int], module: str | None) -> None:
        super().__init__(message)
        self.step, self.ranks, self.module = step, ranks, module

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.step, self.ranks, self.module)


class detect_divergence:
    """Looks for values that are not finite, and for ranks that differ.

    ::

        with xla_fsdp.detect_divergence(model, every=100) as divergence:
            for batch in loader:
                loss = ...
                loss.backward()
                norm = model.clip_grad_norm_(1.0)
                optimizer.step()
                divergence.step(loss, grad_norm=norm)

    Every ``every``-th step is looked at: it is a program of its own, with a flag for each tensor
    between modules, and :meth:`step` waits for its values. The other steps are what they are
    without; so is everything outside of the ``with``.

    Inside ``scan_blocks`` one loop stands for all blocks: it is looked at as one module. Gradients
    that a loss scaler lets overflow are not finite: look at them after it.

    Args:
        model: the root module; wrapped or not. Looked at in training mode only.
        every: how many steps from one look to the next; the ``every``-th is the first one.
        rtol: by how much, relative to the largest, values given by name may differ between ranks.

    Raises:
        TypeError, ValueError: a wrong argument.
    """

    def __init__(self, model: nn.Module, every: int = 1, *, rtol: float = 0.0) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a module, got {type(model).__name__}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be an int of at least 1, got {every!r}")
        if not 0.0 <= rtol < 1.0:
            raise ValueError(f"rtol must be at least 0 and less than 1, got {rtol!r}")
        self._model, self._every, self._rtol = model, every, rtol
        self._step = 1
        self._forward: list[tuple[str, str | None, torch.Tensor]] = []  # what, module, flag
        self._backward: list[tuple[Callable[[], tuple[str, str | None]], torch.Tensor]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> detect_divergence:
        for name, module in _modules(self._model):
            self._hooks += [
                module.register_forward_pre_hook(self._entering(name), with_kwargs=True),
                module.register_forward_hook(self._leaving(name)),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._forward.clear()
        self._backward.clear()

    @property
    def looking(self) -> bool:
        """Whether this step is looked at."""
        return self._step % self._every == 0 and self._model.training

    def step(self, loss: torch.Tensor | None = None, **agreeing: torch.Tensor | float) -> None:
        """Call it on every rank at the end of each step, before gradients are set to zero.

        Args:
            loss: of this rank; must be finite.
            agreeing: what must be the same on all ranks: a gradient norm, a loss that was reduced.

        Raises:
            DivergenceError: on all ranks, if any has found anything.
        """
        step, looking = self._step, self.looking
        self._step += 1
        if not looking:
            return
        events = self._events(loss)
        bad, values = self._fetch(events, agreeing)
        first = next((number for number, flag in enumerate(bad) if flag), None)
        told = [first, *events[first][:2]] if first is not None else None
        everybody = Meeting().gather("look for divergence", [told, values])
        self._judge_finite(step, [each[0] for each in everybody])
        for name in agreeing:
            self._judge_agreement(step, name, [each[1][name] for each in everybody])

    def _events(self, loss: torch.Tensor | None) -> list[tuple[str, str | None, torch.Tensor]]:
        forward, backward = self._forward, self._backward
        self._forward, self._backward = [], []
        events = list(forward)
        if loss is not None:
            events.append(("the loss", None, _not_finite(loss)))
        events += [(*tell(), flag) for tell, flag in backward]
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                name = plain(name)
                what = f"the gradient of the parameter {name}"
                events.append((what, name.rpartition(".")[0], _not_finite(parameter.grad)))
        return events

    def _fetch(
        self, events: list[tuple[str, str | None, torch.Tensor]], agreeing: dict[str, Any]
    ) -> tuple[list[bool], dict[str, float]]:
        tensors = [value for value in agreeing.values() if isinstance(value, torch.Tensor)]
        numbers = [value.detach().reshape(()).float() for value in tensors]
        flags = torch.stack([flag for _, _, flag in events]) if events else None
        with at_rest():  # all of the step in one program; what is read then is there
            bad = [] if flags is None else flags.cpu().tolist()
        read = iter([number.item() for number in numbers])
        values = {
            name: next(read) if isinstance(value, torch.Tensor) else float(value)
            for name, value in agreeing.items()
        }
        return bad, values

    def _judge_finite(self, step: int, told: list[list | None]) -> None:
        found = [each for each in told if each is not None]
        if not found:
            return
        first = min(each[0] for each in found)
        ranks = [rank for rank, each in enumerate(told) if each is not None and each[0] == first]
        what, module = next(each[1:] for each in found if each[0] == first)
        others = len(found) - len(ranks)
        message = f"step {step}: {what} is not finite on {_named(ranks, len(told))}"
        if others:
            message += f"; {others} more had it later, from a reduction or of their own"
        raise DivergenceError(message, step, ranks, module)

    def _judge_agreement(self, step: int, name: str, values: list[float]) -> None:
        finite = [value for value in values if math.isfinite(value)]
        largest = max((abs(value) for value in finite), default=0.0)

        def same(a: float, b: float) -> bool:
            return a == b or abs(a - b) <= self._rtol * largest or (a != a and b != b)

        # What most ranks have; of as many, what the lowest rank has.
        usual = max(values, key=lambda one: sum(same(one, other) for other in values))
        odd = [rank for rank, value in enumerate(values) if not same(value, usual)]
        if odd:
            listed = some_of([f"rank {rank}: {values[rank]!r}" for rank in odd], 8)
            raise DivergenceError(
                f"step {step}: {name} must be the same on all ranks, and is {usual!r} but on "
                f"{listed}. Ranks that differ have other weights, or ran another program",
                step, odd, None,
            )  # fmt: skip
        if not math.isfinite(usual):
            raise DivergenceError(
                f"step {step}: {name} is {usual!r} on all ranks, and nothing before it was seen to "
                "be other than finite", step, list(range(len(values))), None,
            )  # fmt: skip

    def _entering(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not self.looking:
                return
            for tensor in _with_nan((args, kwargs)):
                # If no module has returned it: the model's input, or made between modules.
                self._watched(tensor, f"an input of {_shown(name)}", None).takers.append(name)

        return hook

    def _leaving(self, name: str) -> Callable:
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            if not self.looking:
                return
            for tensor in _with_nan(outputs):
                # A container returns what its last module returned.
                self._watched(tensor, f"the output of {_shown(name)}", name).makers.append(name)

        return hook

    def _watched(self, tensor: torch.Tensor, what: str, maker: str | None) -> _Seen:
        found: _Seen | None = getattr(tensor, _SEEN, None)
        if found is not None and found.step == self._step:
            return found
        seen = _Seen(what, self._step)
        setattr(tensor, _SEEN, seen)
        # A checkpointed module runs once more in the backward, and only then with a graph.
        if torch._C._current_graph_task_id() == -1:
            self._forward.append((what, maker, _not_finite(tensor)))
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            tensor.register_hook(
                lambda grad: self._backward.append((seen.made_gradient, _not_finite(grad)))
            )
        return seen


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside_a_loop: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside_a_loop:
            continue
        if isinstance(module, ScannedBlocks):
            inside_a_loop.update(one for one in module.modules() if one is not module)
        yield plain(name), module


def _with_nan(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` whose dtype has NaN."""
    return [t for t in tensors_in(value) if t.is_floating_point() or t.is_complex()]


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (~torch.isfinite(tensor.detach())).any()


def _innermost(names: list[str]) -> str:
    """Of modules that took one tensor, in order of their calls: the first one, or what it handed
    the tensor on to."""
    last = names[0]
    for name in names[1:]:
        if not last or name == last or name.startswith(f"{last}."):
            last = name
    return last


def _shown(name: str) -> str:
    return name or "the model"


def _named(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return "all ranks" if size > 1 else "rank 0"
    listed = ", ".join(map(str, ranks[:16]))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{' ...' if len(ranks) > 16 else ''}"
