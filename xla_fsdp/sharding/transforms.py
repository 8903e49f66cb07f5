"""What would transform a wrapped module's forward, and is refused.

A wrapper's forward puts full parameters in their places and frees them afterwards; its backward
gathers them again. A transformation that traces Python by itself, or replaces autograd, would have
the one without the other.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn
from torch._dynamo import OptimizedModule

_REMEDY = (
    "leave torch.compile out: whatever a step does is traced as it is, and XLA compiles all of it "
    "as one program"
)


def require_plain_call(name: str) -> None:
    """Raises RuntimeError inside of torch.compile and of torch.func; ``name`` of the module."""
    if torch.compiler.is_compiling():
        _refuse_compilation(name)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"the forward of {name}, which is wrapped, was called inside of a transformation of "
            "torch.func (grad, vmap, jvp, jacrev, ...), which knows nothing of shards: for "
            "gradients call backward, or torch.autograd.grad(loss, inputs, create_graph=True) for "
            "those with respect to inputs; give a batch a dimension instead of vmap, and transform "
            "the model before wrapping, or a function of its output"
        )


def require_uncompiled(root: nn.Module) -> None:
    """Raises RuntimeError if a module in ``root`` is compiled by torch.compile."""
    for name, module in root.named_modules():
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            raise RuntimeError(
                f"module {name or type(module).__name__!r} is compiled by torch.compile, and in a "
                "wrapper: its graphs would be programs of their own, which need the full "
                "parameters as inputs and are not freed, and ranks that are threads of one process "
                f"would compile at the same time; {_REMEDY}"
            )


@torch.compiler.disable
def _refuse_compilation(name: str) -> NoReturn:
    raise RuntimeError(
        f"the forward of {name}, which is wrapped, was called inside of torch.compile: {_REMEDY}"
    )
