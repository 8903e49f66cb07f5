"""Auto-wrap policies and the walk that applies them.

A policy is ``policy(module, recurse, unwrapped_params) -> bool``: whether to visit the children
(``recurse=True``), or to wrap the module. ``unwrapped_params``: parameters outside of wrapped
children.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from .names import is_wrapper
from .sharding.user_checks import has_forward
from .wording import join_some

Policy = Callable[..., bool]

# Modules that read the weights of their children directly.
LEAVES = frozenset({nn.MultiheadAttention})


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wraps every submodule."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wraps the submodules for which ``lambda_fn`` is true."""
    return True if recurse else bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wraps the submodules of the given classes."""
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Wraps modules with at least ``min_num_params`` parameters that are not wrapped further down.

    Args:
        force_leaf_modules: classes whose children are not visited; default
            ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``.
        exclude_wrap_modules: classes that are not wrapped; default
            ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``.
    """
    leaves, excluded = force_leaf_modules, exclude_wrap_modules
    if leaves is None:
        leaves = vars(size_based_auto_wrap_policy)["FORCE_LEAF_MODULES"]
    if excluded is None:
        excluded = vars(size_based_auto_wrap_policy)["EXCLUDE_WRAP_MODULES"]
    barred = tuple(leaves if recurse else excluded)
    return unwrapped_params >= min_num_params and not isinstance(module, barred)


vars(size_based_auto_wrap_policy).update(
    FORCE_LEAF_MODULES=LEAVES, EXCLUDE_WRAP_MODULES=frozenset({nn.ModuleList, nn.ModuleDict})
)


def require_unwrapped(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if is_wrapper(child):
            raise ValueError(
                f"with auto_wrap_policy no submodule may be wrapped already, but {name!r} is. "
                "Wrap either manually or by policy"
            )


def warn_if_none_chosen(module: nn.Module, policy: Policy) -> None:
    """Warns if ``policy`` has wrapped nothing, unless it is :func:`size_based_auto_wrap_policy`."""
    chooses = policy
    while isinstance(chooses, functools.partial):
        chooses = chooses.func
    inside = [one for one in module.modules() if one is not module]
    if chooses is size_based_auto_wrap_policy or any(map(is_wrapper, inside)):
        return
    classes = sorted({type(one).__name__ for one in inside if has_forward(one)})
    if classes:
        warnings.warn(
            f"auto_wrap_policy chose none of the submodules of {type(module).__name__}, so all of "
            "its full parameters are gathered together and are in memory at the same time. "
            f"Choose among its classes ({join_some(classes, 8)}), or pass no policy",
            stacklevel=4,
        )


def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Policy,
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wraps, in place, the submodules that the policy chooses and that have a forward.

    A module attribute ``_wrap_overrides`` (a dict) takes precedence over ``kwargs`` of
    ``wrapper_cls``. A module with several names is wrapped once.

    Returns:
        The module (wrapped if the policy says so and ``only_wrap_children`` is false), and the
            number of parameters wrapped in it.
    """
    ignored = set(ignored_params)
    done: dict[nn.Module, tuple[nn.Module, int]] = {}

    def chosen(module: nn.Module, recurse: bool, count: int) -> bool:
        try:
            return auto_wrap_policy(module=module, recurse=recurse, unwrapped_params=count)
        except TypeError as error:
            raise TypeError(
                f"auto_wrap_policy={auto_wrap_policy!r} failed for a {type(module).__name__}: "
                f"{error}. Pass a policy(module, recurse, unwrapped_params), such as functools."
                "partial(xla_fsdp.wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})"
            ) from error

    def wrap(module: nn.Module, only_children: bool = False) -> tuple[nn.Module, int]:
        total = sum(p.numel() for p in module.parameters() if p not in ignored)
        if not chosen(module, True, total):
            return module, 0
        wrapped = 0
        leaf = isinstance(module, tuple(LEAVES))  # overrides the policy
        # named_children() omits a module's second name.
        for name, child in () if leaf else list(module._modules.items()):
            if child is None or child in ignored_modules:
                continue
            if child not in done:
                done[child] = wrap(child)
                wrapped += done[child][1]
            module._modules[name] = done[child][0]
        if only_children or not has_forward(module):
            return module, wrapped
        if not chosen(module, False, total - wrapped):
            return module, wrapped
        options = {**kwargs, **getattr(module, "_wrap_overrides", {})}
        made = wrapper_cls(module, **options)
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"auto_wrapper_callable={wrapper_cls!r} must return a module, got {made!r}. Return "
                "the wrapper"
            )
        return made, total

    return wrap(module, only_wrap_children)
