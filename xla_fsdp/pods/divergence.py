"""``detect_divergence``: finds the first value that is not finite, and ranks that differ.

"First" is the order of tracing, which is equal on all ranks: the rank that computed a NaN has an
earlier flag than ranks that received it in a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..checkpoint.rank_exchange import RankExchange
from ..collectives.random_state import synced_device
from ..planning.tracing.naming import plain_name
from ..ranks.autograd_thread import in_backward
from ..scan.blocks import ScannedBlocks
from ..sharding.gradients import reduced_grad
from ..tree import tensors_in
from ..wording import join_some, runs

_SEEN = "_xla_fsdp_divergence"


class _ModulesOfTensor:
    """The modules that return (innermost first) and receive a tensor in a ``step``."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step
        self.makers: list[str] = []
        self.takers: list[str] = []

    def made_gradient(self) -> tuple[str, str | None]:
        if self.takers:
            inner = _innermost(self.takers)
            return f"the gradient that {_module_text(inner)} returned", inner
        if self.makers and self.makers[-1]:  # used by the code of the next outer module
            outer = self.makers[-1].rpartition(".")[0]
            return f"the gradient of {self.what}, from {_module_text(outer)} itself,", outer
        return f"the gradient of {self.what}", None


class DivergenceError(RuntimeError):
    """A value is not finite, or ranks differ; raised on every rank.

    Attributes:
        step: the step; the first one is 1.
        ranks: the ranks with the first value that is not finite, or those that differ from most.
        module: dotted name of the module that computed that value; ``None`` if there is none.
    """

    def __init__(self, message: str, step: int, ranks: list[int], module: str | None) -> None:
        super().__init__(message)
        self.step, self.ranks, self.module = step, ranks, module

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.step, self.ranks, self.module)


class detect_divergence:
    """Detects values that are not finite, and ranks that differ.

    ::

        with xla_fsdp.detect_divergence(model, every=100) as divergence:
            for batch in loader:
                ...
                norm = model.clip_grad_norm_(1.0)
                optimizer.step()
                divergence.step(loss, grad_norm=norm)

    A checked step is a separate program, and :meth:`step` waits for its values; other steps are not
    changed. Blocks of ``scan_blocks`` are checked as one module. A loss scaler lets gradients
    overflow, so check them after it.

    Args:
        model: the root module; checked in training mode only.
        every: the number of steps from one check to the next; the ``every``-th step is the first.
        rtol: the allowed difference between ranks for values passed to :meth:`step` by name,
            relative to the largest value.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(self, model: nn.Module, every: int = 1, *, rtol: float = 0.0) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a module, got {type(model).__name__}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be an int of at least 1, got {every!r}")
        if not isinstance(rtol, (int, float)) or not 0.0 <= rtol < 1.0:
            raise ValueError(f"rtol must be at least 0 and less than 1, got {rtol!r}")
        self._model, self._every, self._rtol = model, every, rtol
        self._step = 1
        self._forward: list[tuple[str, str | None, torch.Tensor]] = []
        self._backward: list[tuple[Callable[[], tuple[str, str | None]], torch.Tensor]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> detect_divergence:
        for name, module in _modules(self._model):
            self._hooks += [
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                module.register_forward_hook(partial(self._leave, name)),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._forward.clear()
        self._backward.clear()

    @property
    def looking(self) -> bool:
        """Whether this step is checked."""
        return self._step % self._every == 0 and self._model.training

    def step(self, loss: torch.Tensor | None = None, **agreeing: torch.Tensor | float) -> None:
        """Ends a step. Call it on every rank before gradients are set to zero.

        Args:
            loss: this rank's loss; must be finite.
            agreeing: values that must be the same on all ranks, for example a gradient norm.

        Raises:
            DivergenceError: on all ranks, if any rank has found a problem.
        """
        step, looking = self._step, self.looking
        self._step += 1
        if not looking:
            return
        events = self._events(loss)
        bad, values = self._fetch(events, agreeing)
        first = next((number for number, flag in enumerate(bad) if flag), None)
        told = [first, *events[first][:2]] if first is not None else None
        everybody = RankExchange().gather_values("detect divergence", [told, values])
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
            grad = reduced_grad(parameter)
            if grad is not None:
                name = plain_name(name)
                what = f"the gradient of the parameter {name}"
                events.append((what, name.rpartition(".")[0], _not_finite(grad)))
        return events

    def _fetch(
        self, events: list[tuple[str, str | None, torch.Tensor]], agreeing: dict[str, Any]
    ) -> tuple[list[bool], dict[str, float]]:
        numbers = {
            name: value.detach().reshape(()).float() if isinstance(value, torch.Tensor) else value
            for name, value in agreeing.items()
        }
        flags = torch.stack([flag for _, _, flag in events]) if events else None
        with synced_device():  # runs the entire step as one program
            bad = [] if flags is None else flags.cpu().tolist()
        return bad, {name: float(number) for name, number in numbers.items()}

    def _judge_finite(self, step: int, reports: list[list | None]) -> None:
        found = {rank: each for rank, each in enumerate(reports) if each is not None}
        if not found:
            return
        first = min(each[0] for each in found.values())
        ranks = [rank for rank, each in found.items() if each[0] == first]
        _, what, module = found[ranks[0]]
        everywhere = 1 < len(ranks) == len(reports)
        where = "all ranks" if everywhere else runs("rank", ranks)
        others = len(found) - len(ranks)
        message = f"step {step}: {what} is not finite on {where}"
        if others:
            message += f"; on further ranks ({others}) a later value is not finite"
        raise DivergenceError(message, step, ranks, module)

    def _judge_agreement(self, step: int, name: str, values: list[float]) -> None:
        finite = [value for value in values if math.isfinite(value)]
        largest = max((abs(value) for value in finite), default=0.0)

        def same(a: float, b: float) -> bool:
            return a == b or abs(a - b) <= self._rtol * largest or (a != a and b != b)

        # On a tie, that of the lowest rank.
        usual = max(values, key=lambda one: sum(same(one, other) for other in values))
        odd = [rank for rank, value in enumerate(values) if not same(value, usual)]
        if odd:
            listed = join_some([f"rank {rank}: {values[rank]!r}" for rank in odd], 8)
            raise DivergenceError(
                f"step {step}: {name} must be the same on all ranks, but it is {usual!r} except on "
                f"{listed}. These ranks have different weights, or ran a different program",
                step, odd, None,
            )  # fmt: skip
        if not math.isfinite(usual):
            raise DivergenceError(
                f"step {step}: {name} is {usual!r} on all ranks, although all values that were "
                "checked before it are finite", step, list(range(len(values))), None,
            )  # fmt: skip

    def _enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        for tensor in _with_nan((args, kwargs)) if self.looking else ():
            # If no module returned it, it is the model's input or computed between modules.
            self._watched(tensor, f"an input of {_module_text(name)}", None).takers.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, outputs: Any) -> None:
        for tensor in _with_nan(outputs) if self.looking else ():
            self._watched(tensor, f"the output of {_module_text(name)}", name).makers.append(name)

    def _watched(self, tensor: torch.Tensor, what: str, maker: str | None) -> _ModulesOfTensor:
        found: _ModulesOfTensor | None = getattr(tensor, _SEEN, None)
        if found is not None and found.step == self._step:
            return found
        seen = _ModulesOfTensor(what, self._step)
        setattr(tensor, _SEEN, seen)
        # A checkpointed module runs again in the backward, and only then with a graph.
        if not in_backward():
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
        yield plain_name(name), module


def _with_nan(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(value) if t.is_floating_point() or t.is_complex()]


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (~torch.isfinite(tensor.detach())).any()


def _innermost(names: list[str]) -> str:
    """The first of ``names``, or its innermost submodule that took the tensor too."""
    last = names[0]
    for name in names[1:]:
        if not last or name == last or name.startswith(f"{last}."):
            last = name
    return last


def _module_text(name: str) -> str:
    return name or "the model"
