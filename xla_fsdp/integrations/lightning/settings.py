"""Translates the arguments of a strategy into options of this package's wrapper."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from ...names import is_wrapper
from ...remat import checkpoint_module
from ...sharding.mixed_precision import MixedPrecision
from ...sharding.options import WRAPPER, FSDPOptions
from ...wrap import has_forward, transformer_auto_wrap_policy
from ...wrapper import XlaFullyShardedDataParallel
from ..sharding import meant_by_name, strategy_by_name

Policy = Collection[type[nn.Module]] | Callable[..., bool]

STATE_DICT_TYPES = ("full", "sharded")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class Settings:
    """How modules are wrapped; see the strategies for the arguments.

    Raises:
        ValueError, TypeError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        auto_wrap_policy: Policy | None,
        activation_checkpointing_policy: Collection[type[nn.Module]] | None,
        state_dict_type: str,
        options: dict[str, Any],
    ) -> None:
        if state_dict_type not in STATE_DICT_TYPES:
            raise ValueError(
                f"state_dict_type must be 'full' or 'sharded', got {state_dict_type!r}"
            )
        self.state_dict_type = state_dict_type
        self.layers = _classes("auto_wrap_policy", auto_wrap_policy)
        self.policy = auto_wrap_policy if self.layers is None else None
        if self.policy is not None and not callable(self.policy):
            raise TypeError(
                "auto_wrap_policy must be a set of classes, or a function (module, recurse, "
                f"unwrapped_params) -> bool, got {auto_wrap_policy!r}"
            )
        self.recomputed = _classes(
            "activation_checkpointing_policy", activation_checkpointing_policy
        )
        if activation_checkpointing_policy is not None and self.recomputed is None:
            raise TypeError(
                "activation_checkpointing_policy must be a set of classes, got "
                f"{activation_checkpointing_policy!r}"
            )
        self.options = {"sync_module_states": True, **options}
        self.wrapper = self.options.pop("auto_wrapper_callable", None)
        if self.wrapper is not None and self.recomputed:
            raise ValueError(
                "auto_wrapper_callable and activation_checkpointing_policy both choose the wrapper "
                "of submodules. Give only one of them"
            )
        given, strategy = dict(self.options), self.options.get("sharding_strategy")
        if isinstance(strategy, str):
            given["sharding_strategy"] = strategy_by_name(strategy)
        FSDPOptions.of(WRAPPER, **given)

    def wrap(self, module: nn.Module, precision: str) -> nn.Module:
        """Wraps ``module``, unless it is a wrapper already."""
        if is_wrapper(module):
            return module
        options = dict(self.options)
        if isinstance(options.get("sharding_strategy"), str):
            options |= meant_by_name(options.pop("sharding_strategy"))
        if not {"compute_dtype", "mixed_precision"} & set(options):
            if precision == "bf16-mixed":
                # Autocast chooses the dtype of each operator, so inputs are not cast.
                options["mixed_precision"] = MixedPrecision(
                    torch.bfloat16, cast_forward_inputs=False, cast_root_forward_inputs=False
                )
            elif precision == "bf16-true":
                options["compute_dtype"] = torch.bfloat16
        if precision == "bf16-true":
            module = module.to(torch.bfloat16)
        policy, wrapper = self._policy(), self.wrapper
        if policy is not None and any(map(is_wrapper, module.modules())):
            warnings.warn(
                f"auto_wrap_policy is ignored, because {type(module).__name__} has submodules that "
                "are wrapped already. Wrap the others manually, too, or pass a policy only",
                stacklevel=2,
            )
            policy = wrapper = None
        elif self.recomputed:
            if isinstance(module, tuple(self.recomputed)):
                module = checkpoint_module(module)
            wrapper = functools.partial(_recomputed, tuple(self.recomputed))
        return XlaFullyShardedDataParallel(
            module, auto_wrap_policy=policy, auto_wrapper_callable=wrapper, **options
        )

    def wrap_children(self, module: nn.Module, precision: str) -> None:
        """Wraps the submodules of ``module``, which itself computes without a forward.

        Raises:
            ValueError: ``module`` has parameters outside of its submodules, which no wrapper would
                gather.
        """
        own = [name for name, value in module._parameters.items() if value is not None]
        if own:
            raise ValueError(
                f"{', '.join(own)} would not be sharded: with manual optimization each submodule "
                f"of {type(module).__name__} is wrapped separately. Move these parameters into a "
                "submodule with a forward"
            )
        for name, child in list(module._modules.items()):
            if child is None or is_wrapper(child) or not any(True for _ in child.parameters()):
                continue
            if has_forward(child):
                setattr(module, name, self.wrap(child, precision))
            else:
                self.wrap_children(child, precision)

    def require_classes(self, module: nn.Module) -> None:
        """Raises ValueError if a class in a policy occurs nowhere in ``module``."""
        for name, classes in (
            ("auto_wrap_policy", self.layers),
            ("activation_checkpointing_policy", self.recomputed),
        ):
            if classes and not any(isinstance(each, tuple(classes)) for each in module.modules()):
                wanted = ", ".join(sorted(each.__name__ for each in classes))
                there = ", ".join(sorted({type(each).__name__ for each in module.modules()}))
                raise ValueError(
                    f"{name}: no module in {type(module).__name__} is of class {wanted}; it has "
                    f"{there}. Pass one of these, or a function if models differ"
                )

    def _policy(self) -> Callable[..., bool] | None:
        if self.layers is None:
            policy = self.policy
            # Other libraries' policies have another name for the last argument.
            return None if policy is None else functools.partial(_asked, policy)
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=self.layers)


def _classes(name: str, given: Any) -> set[type[nn.Module]] | None:
    if not isinstance(given, (set, frozenset, list, tuple)):
        return None
    for each in given:
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise TypeError(f"{name} must have classes of modules, got {each!r}")
    return set(given)


def _asked(policy: Any, module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
    return bool(policy(module, recurse, unwrapped_params))


def _recomputed(classes: tuple[type[nn.Module], ...], module: nn.Module, **options: Any) -> Any:
    if isinstance(module, classes):
        module = checkpoint_module(module)
    return XlaFullyShardedDataParallel(module, **options)
