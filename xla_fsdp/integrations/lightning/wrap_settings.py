"""Translates arguments and precision of a strategy into options of this package's wrapper."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch_xla
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision as TrainerPrecision
from torch import nn

from ...names import is_wrapper
from ...remat import checkpoint_module
from ...sharding.mixed_precision import MixedPrecision
from ...sharding.options import WRAPPER, FSDPOptions
from ...tree import cast_floats
from ...wrap import has_forward, transformer_auto_wrap_policy
from ...wrapper import XlaFullyShardedDataParallel
from ..optimizers import average_unsharded
from ..sharding import any_policy, meant_by_name, strategy_by_name, wrap_recomputed

LightningPolicy = Collection[type[nn.Module]] | Callable[..., bool]

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class WrapSettings:
    """How modules are wrapped; see the strategies for arguments and errors."""

    def __init__(
        self,
        auto_wrap_policy: LightningPolicy | None,
        activation_checkpointing_policy: Collection[type[nn.Module]] | None,
        state_dict_type: str,
        options: dict[str, Any],
    ) -> None:
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(
                f"state_dict_type must be 'full' or 'sharded', got {state_dict_type!r}"
            )
        self.saves_shards = state_dict_type == "sharded"
        self.policy = any_policy(auto_wrap_policy) if callable(auto_wrap_policy) else None
        classes = auto_wrap_policy if self.policy is None else None
        function = ", or a function (module, recurse, unwrapped_params) -> bool"
        self.layers = _classes("auto_wrap_policy", classes, function)
        classes = activation_checkpointing_policy
        self.recomputed = _classes("activation_checkpointing_policy", classes)
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
        if is_wrapper(module):
            return module
        options = self.options_of_wrapper(precision)
        if precision == "bf16-true":
            module = module.to(torch.bfloat16)
        if self.recomputed and isinstance(module, tuple(self.recomputed)):
            module = checkpoint_module(module)
        if "auto_wrap_policy" in options and any(map(is_wrapper, module.modules())):
            warnings.warn(
                f"auto_wrap_policy is ignored, because {type(module).__name__} has submodules that "
                "are wrapped already. Wrap the others manually, too, or pass a policy only",
                stacklevel=2,
            )
            del options["auto_wrap_policy"]
            options.pop("auto_wrapper_callable", None)
        return XlaFullyShardedDataParallel(module, **options)

    def options_of_wrapper(self, precision: str) -> dict[str, Any]:
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
        wrapper, policy = self.wrapper, self.policy
        if self.layers is not None:
            policy = functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls=self.layers
            )
        if self.recomputed:
            wrapper = functools.partial(wrap_recomputed, self.recomputed)
        chosen = {"auto_wrap_policy": policy, "auto_wrapper_callable": wrapper}
        return options | {name: value for name, value in chosen.items() if value is not None}

    def wrap_children(self, module: nn.Module, precision: str) -> None:
        """Wraps the submodules of ``module``, which itself computes without a forward. Raises
        ValueError if it has parameters of its own, which no wrapper would gather."""
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


def _classes(name: str, given: Any, otherwise: str = "") -> set[type[nn.Module]] | None:
    if given is None:
        return None
    members = given if isinstance(given, (set, frozenset, list, tuple)) else (None,)
    if not all(isinstance(each, type) and issubclass(each, nn.Module) for each in members):
        raise TypeError(f"{name} must be a set of classes of modules{otherwise}, got {given!r}")
    return set(given)


class _Computed:
    """``plugin``: what Lightning creates from ``precision=...``, or ``None`` for "32-true". Raises
    ValueError for a precision that is not supported on XLA."""

    precision: Any

    def __init__(self, plugin: Any) -> None:
        name = "32-true" if plugin is None else getattr(plugin, "precision", type(plugin).__name__)
        if name in ("16-true", "16-mixed"):
            raise ValueError(
                f"precision={name!r} is not supported on XLA, because TPUs have no float16 units. "
                "Use 'bf16-mixed', which needs no loss scaling"
            )
        if name not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
        self.precision = name

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        if self.precision != "bf16-mixed":
            yield
            return
        # Losses and norms are float32; parameters are gathered in bfloat16.
        with torch.autocast("xla", dtype=torch.bfloat16):
            yield

    def convert_output(self, data: Any) -> Any:
        if self.precision == "32-true":
            return data
        return cast_floats(data, torch.float32)


class ShardedFabricPrecision(_Computed, FabricPrecision):
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        average_unsharded(optimizer)
        result = optimizer.step(**kwargs)
        torch_xla.sync()
        return result


class ShardedTrainerPrecision(_Computed, TrainerPrecision):
    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        compute = functools.partial(self._wrap_closure, model, optimizer, closure)
        needed = inspect.signature(optimizer.step).parameters.get("closure")
        if needed is not None and needed.default is inspect.Parameter.empty:
            result = optimizer.step(closure=compute, **kwargs)
        else:
            # Backward before the step and not in it, because hooks of the step read gradients.
            result = compute()
            optimizer.step(**kwargs)
        torch_xla.sync()  # computes the logged values, so that the first rank alone can read them
        return result

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        average_unsharded(getattr(optimizer, "optimizer", optimizer))
        super()._after_closure(model, optimizer)
