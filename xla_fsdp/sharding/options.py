"""Every option, declared once: its type, default and check, and which entry points take it.

To add an option, add a field to :class:`FSDPOptions`, a line to its docstring, code and a test.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
import torch_xla.runtime as xr
from torch import nn

from ..collectives.order import BackwardPrefetch
from ..collectives.routes import require_collective_routes
from ..collectives.world import World
from ..ranks.slices import slices_of_ranks
from ..wording import Check, flag, must_be
from .cpu_offload import CPUOffload
from .ignored import as_list
from .mixed_precision import MixedPrecision, dtype_or_none

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing since Python 3.11

Groups = Sequence[Sequence[int]]


class ShardingStrategy(enum.Enum):
    """Which state of a model is sharded over which ranks, and when. torch FSDP's names."""

    FULL_SHARD = enum.auto()  # parameters, gradients, optimizer state (ZeRO-3)
    SHARD_GRAD_OP = enum.auto()  # the same, but full parameters stay until the backward (ZeRO-2)
    NO_SHARD = enum.auto()  # everything is replicated, and gradients are averaged
    HYBRID_SHARD = enum.auto()  # FULL_SHARD within groups; gradients are averaged over groups
    _HYBRID_SHARD_ZERO2 = enum.auto()  # SHARD_GRAD_OP within such groups


S = ShardingStrategy
_HYBRID = (S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2)
_RESHARDS = {
    S.FULL_SHARD: True,
    S.HYBRID_SHARD: True,
    S.SHARD_GRAD_OP: False,
    S._HYBRID_SHARD_ZERO2: False,
}


def checked_mesh(device_mesh: Any, name: str = "device_mesh") -> list[int] | list[list[int]]:
    """The ordinals of ``device_mesh``: a tensor, nested lists, or an object with a ``.mesh``.

    Raises ValueError if it is something else, or does not contain every rank once.
    """
    ranks = list(range(xr.world_size()))
    try:
        mesh = torch.as_tensor(getattr(device_mesh, "mesh", device_mesh), device="cpu")
        whole = not mesh.is_floating_point()
        fits = whole and mesh.dim() in (1, 2) and sorted(mesh.flatten().tolist()) == ranks
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(
            f"{name} must contain each of the {len(ranks)} ranks once, in a 1-D mesh (the "
            "ranks that share the parameters) or a 2-D mesh (each row is such a group, ranks with "
            f"the same shard are in one column), got {device_mesh!r}. Pass a DeviceMesh, a tensor "
            "or lists of ordinals"
        )
    return mesh.tolist()


def mesh_of_slices(strategy: ShardingStrategy | None) -> list[list[int]] | None:
    """The default 2-D mesh, with one row a slice; ``None`` on one slice, or without replicas.

    Raises ValueError if the slices have different sizes.
    """
    if strategy is not None and strategy not in _HYBRID:
        return None
    slices = slices_of_ranks()
    if not slices:
        return None
    if len({len(one) for one in slices}) > 1:
        raise ValueError(
            f"the ranks are on slices of {', '.join(str(len(one)) for one in slices)}, which must "
            "have equal sizes to shard within each slice and replicate over them. Use slices of "
            "equal size, or pass sharding_strategy=ShardingStrategy.FULL_SHARD to shard over all "
            "ranks"
        )
    return [list(one) for one in slices]


def strategy_options(
    strategy: ShardingStrategy | None,
    mesh: list[int] | list[list[int]] | None,
    sharding_groups: Groups | None,
    replication_groups: Groups | None,
) -> dict[str, Any]:
    """The options that ``sharding_strategy`` and ``device_mesh`` set, by name.

    Raises ValueError if the strategy is incompatible with the mesh or the groups.
    """
    rows = None if mesh is None else torch.tensor(mesh, device="cpu")
    hybrid = strategy in _HYBRID
    if rows is not None and strategy is not None and (rows.dim() == 2) != hybrid:
        raise ValueError(
            f"sharding_strategy={strategy} needs a {2 if hybrid else 1}-D device_mesh, got {mesh}. "
            "Pass a (replicate, shard) mesh with a HYBRID strategy, and one list of ranks with any "
            "other"
        )
    if hybrid and mesh is None and not (sharding_groups and replication_groups):
        raise ValueError(
            f"sharding_strategy={strategy} needs groups, but got device_mesh=None, "
            f"sharding_groups={sharding_groups} and replication_groups={replication_groups}. Pass "
            "device_mesh=[[0, 1], [2, 3]], whose rows share the parameters, or sharding_groups and "
            "replication_groups (with several slices, each slice is a group by default)"
        )
    if strategy in (S.FULL_SHARD, S.SHARD_GRAD_OP) and replication_groups:
        raise ValueError(
            f"sharding_strategy={strategy} has no replicas, but replication_groups="
            f"{replication_groups} was given. Pass a HYBRID strategy, or leave one of them out"
        )
    meant: dict[str, Any] = {}
    if strategy in _RESHARDS:
        meant["reshard_after_forward"] = _RESHARDS[strategy]
    if strategy is S.NO_SHARD:
        rows = torch.arange(xr.world_size(), device="cpu")[:, None]
    if rows is not None:
        rows = rows if rows.dim() == 2 else rows[None]
        meant["sharding_groups"] = rows.tolist()
        meant["sharding_world_size"] = rows.shape[1]
        meant["sharding_rank"] = int((rows == xr.global_ordinal()).nonzero()[0, 1])
        if rows.shape[0] > 1:
            meant["replication_groups"] = rows.T.tolist()
    return meant


def checked_reshard(value: int, size: int) -> bool | int:
    """Checks ``reshard_after_forward``; raises ValueError unless it divides ``size`` ranks."""
    allowed = [number for number in range(1, size + 1) if size % number == 0]
    if value not in allowed:
        raise ValueError(
            "reshard_after_forward as a number of ranks must divide the "
            f"{size} ranks that share the parameters, got {value}. Pass one of {allowed}, or True "
            "or False"
        )
    return value if 1 < value < size else value == size > 1


WRAPPER, FULLY_SHARD, SCAN = "XlaFullyShardedDataParallel", "fully_shard", "scan_blocks"

# With what to use instead. Kept for one release.
_REMOVED = {
    "gather_dtype": "gathering in 8 bits made no step shorter. Leave it out; "
    "compute_dtype=torch.bfloat16 gathers in 16 bits",
}

# Options of torch's FSDP1 and of torch_xla's class.
_ELSEWHERE = {
    "process_group": "Pass device_mesh or sharding_groups",
    "device_id": "Leave it out: the wrapper moves the module to the device",
    "use_orig_params": "Leave it out: parameters keep their names and shapes, unless "
    "flatten_parameters=True",
    "_shard_size_multiple": "Leave it out",
    "_use_xla_patched_linear": "Leave it out",
}


def option(
    default: Any,
    check: Check | None = None,
    taken_by: Collection[str] = (WRAPPER, FULLY_SHARD, SCAN),
    *,
    instead: str = "",
    inherited: bool = True,
) -> Any:
    """Declares an option.

    Args:
        check: applied to each value; ``None``: the code that uses the option checks it.
        instead: the argument of ``fully_shard`` that replaces it there.
        inherited: False for options of one module, and for options without effect.
    """
    taken_by = [one for one in taken_by if not (instead and one == FULLY_SHARD)]
    how = {"check": check, "taken_by": taken_by, "instead": instead, "inherited": inherited}
    return field(default=default, compare=inherited, metadata=how)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kinds)


def _groups(name: str, value: Any) -> list[list[int]] | None:
    try:
        return None if value is None else [[*map(operator.index, group)] for group in value]
    except TypeError as error:
        raise TypeError(
            f"{name} must be lists of ordinals, such as [[0, 1], [2, 3]], or None, got {value!r}. "
            "Pass one list for each group, or leave it out"
        ) from error


def _ignored(*kinds: type) -> Check:
    return lambda name, value: tuple(as_list(name, value, kinds))


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, str) and isinstance(value, Iterable):
        names = tuple(value)
        if all(isinstance(one, str) for one in names):
            return names
    example = (value if isinstance(value, str) else "mlp.up",)
    raise TypeError(f"{name} must be names, such as {example}, got {value!r}. Pass a list of names")


_number = must_be(
    "a number or None", lambda value: _is(Integral)(value) and not isinstance(value, bool)
)
_function = must_be("a function or None", lambda value: value is None or callable(value))
_prefetch = must_be(f"{', '.join(map(str, BackwardPrefetch))} or None", _is(BackwardPrefetch))
_reshard = must_be("True, False or a number of ranks", lambda value: isinstance(value, Integral))
_strategy = must_be(
    f"{', '.join(map(str, ShardingStrategy))} or None",
    _is(ShardingStrategy),
    ValueError,
    "Take it from xla_fsdp.ShardingStrategy, or leave it out",
)
_precision = must_be("an xla_fsdp.MixedPrecision or None", _is(MixedPrecision), ValueError)
_offload = must_be(
    "an xla_fsdp.CPUOffload or None",
    _is(CPUOffload),
    fix="Instead of torch's CPUOffload(offload_params=True) pass xla_fsdp.CPUOffload()",
)


_ALONE: Any = {"taken_by": (WRAPPER,), "inherited": False}


@dataclass(frozen=True)
class FSDPOptions:
    """Options of :class:`~xla_fsdp.XlaFullyShardedDataParallel`, :func:`~xla_fsdp.fully_shard` and
    :func:`~xla_fsdp.scan_blocks`, in more detail in docs/reference/options.md.

    Attributes:
        reshard_after_forward: free full parameters after the forward and gather them again for the
            backward (ZeRO-3). ``False``: keep them (ZeRO-2). ``k``, a divisor of the ranks: store
            one ``k``-th on each of ``k`` consecutive ranks (ZeRO++'s hpZ).
        flatten_parameters: store all parameters of this wrapper in a vector for each dtype,
            trainable and frozen ones separately: ``flat_param_0``, ...
        execute_sharding_on_init: cut the parameters immediately if the module was on the device.
        optimization_barrier_in_forward: gather only when the module's inputs exist.
        optimization_barrier_in_backward: gather only when the gradient of its outputs exists.
        sync_on_finalization: call ``torch_xla.sync()`` at the end of every backward of the root.
        disable_reshard_on_root: keep the root's direct parameters from forward to backward.
        compute_dtype: dtype in which parameters are gathered, the module computes and gradients
            are reduced. Floating-point inputs are cast; shards keep their dtype. Default: no casts.
        buffer_dtype: dtype of floating-point buffers, not of ``SyncBatchNorm``. Default:
            ``compute_dtype``.
        fp32_reduce_scatter: reduce gradients in float32, for up to twice the bytes.
        sharding_groups: groups of ordinals of the ranks that share one copy of the parameters,
            e.g. ``[[0, 1], [2, 3]]``. Default: all ranks; on several TPU slices each slice.
        sharding_rank, sharding_world_size: this rank's index in its group, and the group's size.
        shard_param_on_dim_0: shard along dimension 0 and keep the other dimensions.
        pin_layout_in_collective_ops, reduce_scatter_bucket_size_mb, coalesce_all_gather_ops:
            accepted without effect, for scripts of torch_xla's class.
        auto_wrap_policy: wraps submodules first, see :mod:`xla_fsdp.wrap`.
        auto_wrapper_callable: called to wrap submodules instead of the class, e.g.
            ``lambda m, *a, **k: FSDP(checkpoint_module(m), *a, **k)``.
        param_init_fn: initializes a submodule on the meta device, default ``reset_parameters()``.
        replication_groups: groups of ordinals that store the same shard and average gradients,
            e.g. ``[[0, 2], [1, 3]]``. Default: the copies of ``sharding_groups`` are independent.
        forward_prefetch: gather the next wrapper while this one computes its forward.
        backward_prefetch: gather the next wrapper while this one computes (``BACKWARD_PRE``) or
            reduces (``BACKWARD_POST``) its backward, or after that (``None``).
        limit_all_gathers: gather for a backward only after the gradients of the second wrapper
            before it are reduced.
        sync_module_states: broadcast parameters and buffers from the first rank of each group.
        sharding_strategy: torch FSDP's name for ``reshard_after_forward`` and the groups.
        device_mesh: ordinals of all ranks, which share the parameters; of a 2-D ``(replicate,
            shard)`` mesh each row does, and columns average gradients.
        mixed_precision: torch FSDP's names for dtypes, see :class:`~xla_fsdp.MixedPrecision`.
        cpu_offload: see :class:`~xla_fsdp.CPUOffload`.
        ignored_modules, ignored_parameters, ignored_states: submodules and parameters (or either)
            that stay replicated. Their gradients are not reduced.
        collective_routes: ``"auto"``: stages or rings over a TPU slice where they make a step
            faster. ``"default"``: the compiler chooses.
        ignore: for ``scan_blocks``: names of attributes in which the blocks may differ.
        offload: for ``scan_blocks``: on TPU, store the blocks' inputs in host memory.
        prefetch: for ``scan_blocks``: gather the next block while a block computes.
        keep: for ``scan_blocks``: what the backward does not recompute: names of submodules that
            return a tensor (``"mlp.up"``), and ``"attention"``.

    Raises:
        ValueError, TypeError: a value is not allowed, or two values contradict each other.
    """

    # The order of the wrapper's positional arguments, which begins like that of torch_xla's.
    reshard_after_forward: bool | int = option(True, _reshard)
    flatten_parameters: bool = option(False, flag, (WRAPPER, SCAN))
    execute_sharding_on_init: bool = option(True, flag)
    optimization_barrier_in_forward: bool = option(True, flag)
    optimization_barrier_in_backward: bool = option(True, flag)
    sync_on_finalization: bool = option(False, flag)
    disable_reshard_on_root: bool = option(True, flag, instead="reshard_after_forward")
    compute_dtype: torch.dtype | None = option(None, dtype_or_none, instead="mp_policy")
    buffer_dtype: torch.dtype | None = option(None, dtype_or_none)
    fp32_reduce_scatter: bool = option(False, flag, instead="mp_policy")
    sharding_groups: Sequence[Sequence[int]] | None = option(None, _groups, instead="mesh")
    sharding_rank: int | None = option(None, _number, instead="mesh")
    sharding_world_size: int | None = option(None, _number, instead="mesh")
    shard_param_on_dim_0: bool = option(False, flag)
    pin_layout_in_collective_ops: bool = option(True, flag, inherited=False)
    reduce_scatter_bucket_size_mb: int | None = option(0, _number, inherited=False)
    coalesce_all_gather_ops: bool = option(False, flag, inherited=False)
    auto_wrap_policy: Callable[..., bool] | None = option(None, _function, **_ALONE)
    auto_wrapper_callable: Callable[..., nn.Module] | None = option(None, _function, **_ALONE)
    param_init_fn: Callable[[nn.Module], None] | None = option(None, _function)
    replication_groups: Sequence[Sequence[int]] | None = option(None, _groups, instead="mesh")
    forward_prefetch: bool = option(True, flag)
    backward_prefetch: BackwardPrefetch | None = option(BackwardPrefetch.BACKWARD_PRE, _prefetch)
    limit_all_gathers: bool = option(True, flag)
    sync_module_states: bool = option(False, flag)
    sharding_strategy: ShardingStrategy | None = option(
        None, _strategy, instead="mesh and reshard_after_forward"
    )
    device_mesh: Any = option(None, instead="mesh")
    mixed_precision: MixedPrecision | None = option(None, _precision, instead="mp_policy")
    cpu_offload: CPUOffload | None = option(None, _offload, instead="offload_policy")
    ignored_modules: Iterable[nn.Module] | None = option(
        None, _ignored(nn.Module), instead="ignored_params", **_ALONE
    )
    ignored_parameters: Iterable[nn.Parameter] | None = option(
        None, _ignored(nn.Parameter), instead="ignored_params", **_ALONE
    )
    ignored_states: Iterable[nn.Module | nn.Parameter] | None = option(
        None, _ignored(nn.Module, nn.Parameter), instead="ignored_params", **_ALONE
    )
    collective_routes: str = option("auto", lambda _, value: require_collective_routes(value))
    _: KW_ONLY
    ignore: Collection[str] = option((), _names, (SCAN,))
    offload: bool = option(False, flag, (SCAN,))
    prefetch: bool = option(False, flag, (SCAN,))
    keep: Collection[str] = option((), _names, (SCAN,))

    @classmethod
    def of(cls, entry: str, /, *args: Any, **given: Any) -> Self:
        """The options that ``entry`` received, by name or in the order of its parameters.

        Raises ValueError for a removed option or one of another entry, TypeError for others.
        """
        signature = cls.signature(entry)
        for name, value in given.items():
            if name in signature.parameters:
                continue
            if name in _REMOVED:
                raise ValueError(f"{name} was removed: {_REMOVED[name]}")
            declared = cls.__dataclass_fields__.get(name)
            if entry == FULLY_SHARD and declared and WRAPPER in declared.metadata["taken_by"]:
                instead = declared.metadata["instead"]
                raise ValueError(
                    f"{name}={value!r} is not supported by fully_shard. "
                    f"{f'Pass {instead}' if instead else 'Leave it out'}, or wrap with "
                    "XlaFullyShardedDataParallel"
                )
            near = difflib.get_close_matches(name, signature.parameters, 1)
            meant = f"Did you mean {near[0]}? " if near else ""
            if name in _ELSEWHERE and entry == WRAPPER:
                meant = f"{_ELSEWHERE[name]}. "
            raise TypeError(
                f"{entry} has no option {name!r}, got {name}={value!r}. {meant}Its options are "
                f"{', '.join(signature.parameters)}"
            )
        return cls(**signature.bind(*args, **given).arguments)

    @classmethod
    def signature(cls, entry: str) -> inspect.Signature:
        every = inspect.signature(cls).parameters.items()
        declared = cls.__dataclass_fields__
        return inspect.Signature(
            [one for name, one in every if entry in declared[name].metadata["taken_by"]]
        )

    def __post_init__(self) -> None:
        for one in fields(self):
            check, value = one.metadata["check"], getattr(self, one.name)
            if check and value is not one.default:
                self._set(one.name, check(one.name, value))
        if self.ignored_states:
            if self.ignored_modules or self.ignored_parameters:
                raise ValueError(
                    "ignored_states was passed together with ignored_modules or "
                    "ignored_parameters, but it is another name for these. Pass either it or these"
                )
            modules = tuple(one for one in self.ignored_states if isinstance(one, nn.Module))
            self._set("ignored_modules", modules)
            rest = tuple(one for one in self.ignored_states if not isinstance(one, nn.Module))
            self._set("ignored_parameters", rest)
            self._set("ignored_states", ())
        precision = self.mixed_precision
        if precision is not None:
            used, reduced = precision.param_dtype, precision.reduce_dtype
            meant = {
                "compute_dtype": used,
                "buffer_dtype": precision.buffer_dtype,
                "fp32_reduce_scatter": reduced is torch.float32 and used is not torch.float32,
            }
            for name, value in self._agreed(f"mixed_precision={precision}", meant).items():
                self._set(name, value)
        offload = self.cpu_offload
        if offload is not None and not offload.parameters:
            self._set("cpu_offload", None)
        elif offload is not None and precision is not None and precision.keep_low_precision_grads:
            raise ValueError(
                "MixedPrecision(keep_low_precision_grads=True) is incompatible with cpu_offload, "
                "because the optimizer on the host needs float32 gradients. Leave one of them out"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _agreed(self, source: str, meant: Mapping[str, Any]) -> dict[str, Any]:
        """The options that ``source`` sets; raises ValueError if one has another value already."""
        agreed = {}
        for name, value in meant.items():
            given, default = getattr(self, name), self.__dataclass_fields__[name].default
            if name == "reshard_after_forward" and not isinstance(given, bool):
                if value and given != 1:
                    continue  # the number of ranks; the strategy only says that it reshards
                given = False if given == 1 else given  # 1 is equal to True
            if given not in (default, value):
                raise ValueError(
                    f"{name}={given!r} contradicts {source}, which means {name}={value!r}. Leave "
                    "one of them out"
                )
            agreed[name] = value
        return agreed

    def resolved(self) -> Self:
        """The options with the calling rank's groups, and the options that depend on them.

        Raises ValueError if a value is not possible with these ranks.
        """
        ranks = mesh = None if self.device_mesh is None else checked_mesh(self.device_mesh)
        groups = self.sharding_groups, self.replication_groups
        if mesh is None and (*groups, self.sharding_rank, self.sharding_world_size) == (None,) * 4:
            ranks = mesh_of_slices(self.sharding_strategy)
        meant: dict[str, Any] = {}
        if ranks is not None or self.sharding_strategy is not None:
            meant = self._agreed(
                f"sharding_strategy={self.sharding_strategy}, device_mesh={ranks}",
                strategy_options(self.sharding_strategy, ranks, *groups),
            )
        options = replace(self, **{"device_mesh": mesh, **meant})
        reshard = options.reshard_after_forward
        if not isinstance(reshard, bool):
            reshard = checked_reshard(reshard, options.sharding_world_size or xr.world_size())
        if options.cpu_offload is not None:
            options.cpu_offload.require_streamable(reshard)
        return replace(options, reshard_after_forward=reshard)

    def inherited(self) -> Self:
        """The options without those for one module only."""
        alone: dict[str, Any] = {
            one.name: one.default for one in fields(self) if not one.metadata["inherited"]
        }
        return replace(self, **alone)

    @classmethod
    def inherits(cls, name: str) -> bool:
        declared = cls.__dataclass_fields__.get(name)
        if declared is None:
            return False
        return declared.metadata["inherited"] and WRAPPER in declared.metadata["taken_by"]

    def as_kwargs(self) -> dict[str, Any]:
        """The options that submodules inherit, as keyword arguments of the wrapper."""
        return {
            one.name: getattr(self, one.name) for one in fields(self) if self.inherits(one.name)
        }

    def world(self) -> World:
        """The world of the calling rank; raises as :meth:`World.current` does."""
        return World.current(
            self.sharding_groups,
            self.sharding_rank,
            self.sharding_world_size,
            self.replication_groups,
            self.collective_routes,
        )


P = ParamSpec("P")
Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(entry: str) -> Callable[[Function], Function]:
    """Makes the signature of ``entry`` show its options instead of ``*args`` and ``**options``."""

    def describe(function: Function) -> Function:
        signature = inspect.signature(function)
        own = {one.name: one for one in signature.parameters.values()}
        positional = own.pop("args", None)
        del own["options"]
        options = FSDPOptions.signature(entry).parameters.values()
        more = [one for one in options if one.name not in own]
        if positional is None:
            more = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in more]
        shown = signature.replace(parameters=[*own.values(), *more])
        vars(function)["__signature__"] = shown
        return function

    return describe


def constructor(
    options: Callable[P, FSDPOptions],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, nn.Module, P], None]]:
    """:func:`takes_options` for the wrapper's constructor, visible to type checkers too."""
    return takes_options(WRAPPER)
