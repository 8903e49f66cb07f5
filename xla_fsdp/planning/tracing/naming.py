"""Names instructions by module and phase of the step, with scopes that XLA copies into the program.

In the backward an instruction belongs to the module whose output got its gradient last.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch_xla
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ... import xlac
from ...inplace import FSDPModule
from ...ranks.autograd_thread import in_backward, run_there
from ...tree import tensors_in

# Marks a tensor whose gradient hook sets the name of the backward.
_NAMED = "_xla_fsdp_named"
_IN_TREE_SEPARATOR = "_FSDP_SHARD_SEPARATOR_"


class Naming:
    """``on_root_call`` is called before each call of a root, a module that the step itself calls.

    ``in_backward``: whether a backward was traced since this was set to False.
    """

    def __init__(self, on_root_call: Callable[[], object]) -> None:
        self.roots: list[nn.Module] = []
        self.in_backward = False
        self._on_root_call = on_root_call
        self._names: dict[nn.Module, str] = {}
        self._threads = _Thread()

    @contextlib.contextmanager
    def active(self) -> Iterator[Naming]:
        debug = xlac.has_scopes()
        with contextlib.ExitStack() as stack:
            xlac.set_has_scopes(True)
            stack.callback(xlac.set_has_scopes, debug)
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            # Modules that are sharded in place gather before torch calls hooks.
            stack.callback(setattr, FSDPModule, "__call__", FSDPModule.__call__)
            FSDPModule.__call__ = self._named(FSDPModule.__call__)  # type: ignore[method-assign]
            stack.callback(self.close)
            yield self

    def name_of(self, module: nn.Module) -> str:
        if module not in self._names:
            for name, child in module.named_modules():
                self._names.setdefault(child, plain_name(name))
        return self._names[module]

    def enter(self, phase: str) -> None:
        """Names what this thread traces until :meth:`leave`."""
        self._threads.stack.append((None, xlac.scope(f"{phase}[]")))

    def leave(self) -> None:
        if self._threads.stack:
            self._threads.stack.pop()

    def is_in(self, module: nn.Module | None) -> bool:
        return bool(self._threads.stack) and self._threads.stack[-1][0] is module

    def close(self) -> None:
        """Ends all names on this thread and on that of autograd."""
        self._close_here()
        run_there(torch_xla.device(), self._close_here)

    def clear(self) -> None:
        self.roots.clear()
        self._names.clear()

    def _close_here(self) -> None:
        while self._threads.stack:
            self._threads.stack.pop()
        self._threads.modules = 0
        self._threads.gradient.clear()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        recomputes = in_backward()
        if not recomputes and not self._threads.modules:
            if module not in self.roots:
                self.roots.append(module)
            self._on_root_call()
        self._threads.modules += 1
        phase = "recompute" if recomputes else "forward"
        self._threads.stack.append((module, xlac.scope(f"{phase}[{self.name_of(module)}]")))

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not self.is_in(module):  # entered before
            return
        self.leave()
        self._threads.modules -= 1
        name = self.name_of(module)
        for tensor in tensors_in(outputs):
            # A container returns what its last module returned.
            if tensor.grad_fn is not None and not hasattr(tensor, _NAMED):
                setattr(tensor, _NAMED, True)
                tensor.register_hook(lambda grad: self._gradient_reached(name))

    def _named(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def named(module: FSDPModule, *args: Any, **kwargs: Any) -> Any:
            if module._unit.computing:
                return call(module, *args, **kwargs)
            self._enter(module, args)
            outputs = None
            try:
                outputs = call(module, *args, **kwargs)
            finally:
                self._leave(module, args, outputs)
            return outputs

        return named

    def _gradient_reached(self, name: str) -> None:
        current = self._threads.gradient
        current.clear()  # the previous scope must end first
        current.append(xlac.scope(f"backward[{name}]"))
        self.in_backward = True


class _Thread(threading.local):
    """The open scopes of a thread; a scope ends when its object is dropped."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module | None, Any]] = []
        self.modules = 0  # in the stack
        self.gradient: list[Any] = []


def plain_name(name: str) -> str:
    """A dotted name without the parts of wrappers, which begin with an underscore."""
    name = name.replace("_fsdp_shard" + _IN_TREE_SEPARATOR, "").replace(_IN_TREE_SEPARATOR, ".")
    return ".".join(part for part in name.split(".") if part and not part.startswith("_"))
