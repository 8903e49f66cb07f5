"""A torch function mode that changes some operators on the threads of a rank.

- Reading values (``.item()``, ``print``) runs pending collectives together with the other ranks.
- Sampling random numbers on the CPU uses the rank's random state.
- The initial values of optimizer state become device data.
- ``backward`` passes the mode on to autograd's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ... import xlac
from ...tree import overrides_dispatch, tensors_in
from ..rank import RankContext, current_rank
from .session import Session

_CONSTANTS: dict[Callable, int] = {
    torch.zeros: 0,
    torch.zeros_like: 0,
    torch.Tensor.new_zeros: 0,
    torch.ones: 1,
    torch.ones_like: 1,
    torch.Tensor.new_ones: 1,
}


class RankMode(TorchFunctionMode):
    """Types with ``answers_first`` (sharded parameters) handle an operator before the mode."""

    def __init__(self, session: Session, context: RankContext) -> None:
        super().__init__()
        self.session = session
        self.context = context

    def __torch_function__(
        self,
        func: Callable,
        types: Iterable[type],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if types and torch._C._is_torch_function_enabled():
            for kind in types:
                # The type may run a collective, so no lock of a read may be held here.
                if getattr(kind, "answers_first", False):
                    with self:
                        return kind.__torch_function__(func, types, args, kwargs)  # type: ignore[attr-defined]
        special = _SPECIAL.get(func)
        if special is not None and self.context.active:
            return special(self, func, args, kwargs or {})
        if isinstance(func, FunctionType) and func not in _TORCHS_OWN and self.context.active:
            with _DrawsInside(self):
                return func(*args, **kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


class _DrawsInside(TorchDispatchMode):
    """Finds operators that sample in Python functions, where torch disables RankMode."""

    def __init__(self, mode: RankMode) -> None:
        super().__init__()
        self._generators, self._context = mode.session.generators, mode.context

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not xla_tensors((args, kwargs)):
            return self._generators.run(self._context, func, *args, **kwargs)
        return func(*args, **kwargs)


def _read_values(mode: RankMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    tensors = xla_tensors((args, kwargs)) if reads_to_host(func, args, kwargs) else []
    if not tensors:
        return func(*args, **kwargs)
    read = partial(func, *args, **kwargs)
    return mode.session.fetch(mode.context, _name_of_read(func), tensors, read)


def _draw_random(mode: RankMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    value = args[0] if args else None
    if isinstance(value, torch.Tensor) and value.is_xla:  # type: ignore[attr-defined]  # not in torch's stubs
        if func not in HOST_DRAWS:
            return func(*args, **kwargs)
        # Runs on the CPU: no collective may run while the generator is locked.
        mode.session.before_read(mode.context, _name_of_read(func), xla_tensors((args, kwargs)))
    return mode.session.generators.run(mode.context, func, *args, **kwargs)


def _make_constant(mode: RankMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Inside an optimizer's step the result becomes device data."""
    value = func(*args, **kwargs)
    if not mode.context.stepping or torch.is_grad_enabled() or value.device.type != "xla":
        return value
    fill = _CONSTANTS.get(func)
    if fill is None:
        fill = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
    if isinstance(fill, torch.Tensor) or kwargs.get("out") is not None:
        return value
    data = torch.full(value.shape, fill, dtype=value.dtype, device="cpu").to(value.device)
    if not data.dim():
        # Filling with a number would make a constant if the number is 0 or 1.
        mode.session.sync_tensors(mode.context, "the optimizer's state", [data])
    return data


def _backward(mode: RankMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    # Autograd's threads use the active modes, but torch has disabled this one for the call.
    with mode:
        return _plain_backward(*args, **kwargs)


def _plain_backward(
    self: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)


class StateAsDeviceData:
    """Makes new optimizer state device data, so that all steps run the same program.

    Initial zeros would be constants in the first step's program, and input data in the next.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known = WeakSet[Optimizer]()
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        context = current_rank()
        if context is None or context.as_on_tpu:
            return
        # If a step raises, this stays set, which is harmless.
        context.stepping = True
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        if type(optimizer) is torch.optim.SGD:
            _start_momentum(optimizer)
        # Adagrad creates its state in its constructor.
        pending = [value for value in xla_tensors(optimizer.state) if xlac.are_pending([value])[0]]
        if pending:
            self._session.sync_tensors(context, "the optimizer's first step", pending)

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        context = current_rank()
        if context is not None:
            context.stepping = False


def _start_momentum(optimizer: torch.optim.SGD) -> None:
    # Without dampening, a first momentum of zeros gives the same result.
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                grad, state = parameter.grad, optimizer.state[parameter]
                if grad is not None and grad.is_xla and state.get("momentum_buffer") is None:
                    with torch.no_grad():  # see _make
                        state["momentum_buffer"] = torch.zeros_like(grad)


def reads_to_host(func: Callable, args: tuple, kwargs: dict) -> bool:
    if func not in _MAY_READ:
        return True
    if func in (torch.Tensor.copy_, torch.Tensor.__setitem__):
        return not args[0].is_xla
    if func is torch.tensor:
        return True
    # Only a move off the device reads.
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, torch.Tensor):
            value = value.device
        if isinstance(value, torch.device) and value.type != "xla":
            return True
        if isinstance(value, str) and not value.startswith(("xla", "torch.xla")):
            return True
    return False


def xla_tensors(value: Any) -> list[torch.Tensor]:
    """Those on the device that torch_xla sees, so no FakeTensor."""
    return [
        tensor
        for tensor in tensors_in(value)
        if tensor.is_xla and not overrides_dispatch(type(tensor))
    ]


def _name_of_read(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    return f"a read of a tensor's value ({name})"


def _collect(owners_and_names: dict[Any, str]) -> set:
    found: set[Any] = set()
    for owner, names in owners_and_names.items():
        found.update(getattr(owner, name) for name in names.split() if hasattr(owner, name))
    return found


_MAY_READ = _collect({torch.Tensor: "to type type_as copy_ __setitem__", torch: "as_tensor"})
READS = _MAY_READ | _collect({
    torch.Tensor:
        "item tolist cpu numpy __bool__ __float__ __int__ __index__ __complex__ __repr__ "
        "__format__ __array__ __reduce_ex__ __contains__ is_nonzero equal allclose "
        "nonzero unique __dlpack__ masked_select",
    torch: "tensor is_nonzero equal allclose nonzero unique masked_select",
})  # fmt: skip
# torch_xla computes these on the CPU. A missing operator cuts the graph unseen, which works if all
# ranks do it.
_CPU_ONLY = (
    "angle addbmm bincount bucketize histc nansum searchsorted unique_consecutive vdot _weight_norm"
)
READS |= _collect({
    torch: _CPU_ONLY,
    torch.Tensor: _CPU_ONLY,
    torch.linalg: "eig eigvals householder_product matrix_exp solve_triangular",
    F: "fold grid_sample huber_loss multi_margin_loss unfold",
})  # fmt: skip

# Operators that torch tags as sampling, and functions over them.
_RANDOM = (
    "alpha_dropout bernoulli binomial cauchy dropout exponential feature_alpha_dropout "
    "feature_dropout geometric gru gru_cell log_normal lstm multinomial native_dropout normal "
    "poisson rand rand_like randint randint_like randn randn_like random randperm rnn_relu "
    "rnn_tanh rrelu rrelu_with_noise uniform scaled_dot_product_attention _standard_gamma "
    "_sample_dirichlet _fused_dropout lobpcg pca_lowrank svd_lowrank"
)
_RANDOM += " " + " ".join(f"{name}_" for name in _RANDOM.split())
DRAWS = _collect({
    torch: _RANDOM,
    torch.Tensor: _RANDOM,
    torch._VF: "lstm gru rnn_tanh rnn_relu",
    torch._C._nn: "rrelu_with_noise rrelu_with_noise_ scaled_dot_product_attention",
    F: _RANDOM + " dropout1d dropout2d dropout3d gumbel_softmax multi_head_attention_forward "
       "fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
       "fractional_max_pool3d_with_indices",
})  # fmt: skip
# torch_xla may compute these on the CPU, if a tensor is on an XLA device.
HOST_DRAWS = DRAWS - _collect({
    torch: "dropout bernoulli native_dropout scaled_dot_product_attention rand_like randn_like "
           "gru gru_cell lstm rnn_relu rnn_tanh",
    torch._VF: "gru lstm rnn_relu rnn_tanh",
    torch.Tensor: "bernoulli bernoulli_ uniform_ normal_ exponential_",
    torch._C._nn: "scaled_dot_product_attention",
    F: "dropout dropout1d dropout2d dropout3d alpha_dropout scaled_dot_product_attention "
       "feature_alpha_dropout multi_head_attention_forward gumbel_softmax",
})  # fmt: skip

# These do not sample, unless in _SPECIAL too.
_TORCHS_OWN = {
    value
    for owner in (F, torch, torch.functional, torch.Tensor)
    for value in vars(owner).values()
    if isinstance(value, FunctionType)
}

_SPECIAL: dict[Callable, Callable] = {
    **dict.fromkeys(READS, _read_values),
    **dict.fromkeys(DRAWS, _draw_random),
    **dict.fromkeys((*_CONSTANTS, torch.full_like), _make_constant),
    torch.Tensor.backward: _backward,
}
