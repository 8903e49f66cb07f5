"""Applies settings to a model: what is wrapped, recomputed and scanned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
import torch_xla.runtime as xr
from torch import nn

from ...collectives.order import BackwardPrefetch
from ...ranks.slices import slices_of_ranks
from ...remat import checkpoint_module
from ...scan.blocks import scan_blocks
from ...wrap import size_based_auto_wrap_policy
from ...wrapper import XlaFullyShardedDataParallel
from ..tracing.naming import plain
from .blocks import Blocks, find_blocks, list_of, replace_modules
from .grouped import BlockRow, GroupedBlocks, named_row
from .kept import Kept, by_name, keeps, numbers

_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
# Options of the wrapper and of the loop that settings decide on.
_DECIDED = frozenset(
    "reshard_after_forward forward_prefetch backward_prefetch limit_all_gathers collective_routes"
    " device_mesh sharding_strategy sharding_groups sharding_rank sharding_world_size"
    " replication_groups auto_wrap_policy auto_wrapper_callable offload prefetch keep".split()
)


class Settings(Protocol):
    """What of ``ShardingSettings`` decides how a model is wrapped."""

    @property
    def units(self) -> str | int: ...
    @property
    def scan(self) -> bool: ...
    @property
    def scan_prefetch(self) -> bool: ...
    @property
    def reshard_after_forward(self) -> bool | int: ...
    @property
    def blocks_per_unit(self) -> int: ...
    @property
    def kept_blocks(self) -> Kept: ...
    @property
    def recompute(self) -> str | int: ...
    @property
    def keep(self) -> tuple[str, ...]: ...
    @property
    def offload(self) -> bool: ...
    @property
    def shard_ranks(self) -> int | None: ...
    @property
    def forward_prefetch(self) -> bool: ...
    @property
    def backward_prefetch(self) -> str: ...
    @property
    def limit_all_gathers(self) -> bool: ...
    @property
    def collective_routes(self) -> str: ...


def wrap_model(
    settings: Settings,
    model: nn.Module,
    blocks: Blocks,
    ignore: Collection[str],
    options: Mapping[str, Any],
) -> nn.Module:
    """See ``ShardingSettings.wrap``."""
    _require_undecided(options)
    if isinstance(settings.units, int):
        return wrap_root(settings, model, options)
    found = find_blocks(model, blocks)
    _require_so_many(settings, len(found))
    if settings.scan or (settings.blocks_per_unit > 1 and found):
        name = list_of(model, found) if found else None
        if name is None:
            what = "scan=True" if settings.scan else f"blocks_per_unit={settings.blocks_per_unit}"
            raise ValueError(
                f"{what}: the blocks are not all of one nn.Sequential, so nothing calls them as a "
                "whole. Build them with settings.join(...) and call that, x = self.blocks(x)"
            )
        path, _, attribute = name.rpartition(".")
        parent = model.get_submodule(path)
        _require_no_hooks(name, getattr(parent, attribute))
        setattr(parent, attribute, join_blocks(settings, found, ignore, options))
        return wrap_root(settings, model, options)
    wrapped = zip(found, _each(settings, found, options), strict=True)
    replace_modules(model, {block: one for block, one in wrapped if one is not block})
    return wrap_root(settings, model, options)


def join_blocks(
    settings: Settings,
    blocks: Iterable[nn.Module],
    ignore: Collection[str],
    options: Mapping[str, Any],
) -> nn.Module:
    """See ``ShardingSettings.join``."""
    _require_undecided(options)
    if settings.scan:
        loop: dict[str, Any] = {"offload": settings.offload, "prefetch": settings.scan_prefetch}
        loop |= {"keep": settings.keep, "ignore": ignore, **_options(settings, False)}
        return scan_blocks(blocks, **loop, **options)
    joined: BlockRow | GroupedBlocks
    if settings.blocks_per_unit > 1:
        joined = GroupedBlocks(_groups(settings, blocks, options))
    else:
        joined = BlockRow(*_each(settings, blocks, options))
    _require_so_many(settings, len(joined))
    return joined


def wrap_root(settings: Settings, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """See ``ShardingSettings.wrap_root``."""
    _require_undecided(options)
    how = {**_options(settings, False), **options}
    if not isinstance(settings.units, int):
        return XlaFullyShardedDataParallel(model, **how)
    units = _UnitsBySize(settings, model)
    policy = partial(size_based_auto_wrap_policy, min_num_params=settings.units)
    how |= {"auto_wrap_policy": policy, "auto_wrapper_callable": units.wrap}
    wrapped = XlaFullyShardedDataParallel(model, **how)
    units.require_all_named()
    return wrapped


class _UnitsBySize:
    """What wraps the units that a policy chooses."""

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        self._settings = settings
        self._names = {module: plain(name) for name, module in model.named_modules()}
        self._seen: list[str] = []

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        settings, name = self._settings, self._names[module]
        self._seen.append(name)
        if keeps(settings.kept_blocks, -1, name):
            options["reshard_after_forward"] = False
        if settings.recompute == "all":
            module = checkpoint_module(module, offload=settings.offload)
        return XlaFullyShardedDataParallel(module, **options)

    def require_all_named(self) -> None:
        """Raises ValueError if the settings name a unit that there is not."""
        kept = self._settings.kept_blocks
        names = kept if isinstance(kept, tuple) and by_name(kept) else ()
        wrong = [name for name in names if name not in self._seen]
        if wrong:
            raise ValueError(
                f"kept_blocks={kept!r}: {wrong[0]!r} is no unit; with units={self._settings.units} "
                f"they are {', '.join(self._seen) or 'the whole model alone'}"
            )


def _each(
    settings: Settings, blocks: Iterable[nn.Module], options: Mapping[str, Any]
) -> Iterator[nn.Module]:
    """``blocks`` recomputed as the settings say, and each a unit if they are."""
    for number, block in enumerate(_recomputed(settings, blocks)):
        if settings.units == "blocks":
            how = {**_options(settings, keeps(settings.kept_blocks, number)), **options}
            block = XlaFullyShardedDataParallel(block, **how)
        yield block


def _groups(
    settings: Settings, blocks: Iterable[nn.Module], options: Mapping[str, Any]
) -> Iterator[nn.Module]:
    """``blocks`` recomputed as the settings say, several a unit."""
    if options.get("flatten_parameters"):
        raise ValueError(
            "flatten_parameters=True and blocks_per_unit exclude each other: units of several "
            "blocks have no name for a vector of all their parameters. Leave one of them out"
        )
    waiting = enumerate(_recomputed(settings, blocks))
    while group := dict(islice(waiting, settings.blocks_per_unit)):
        kept = {keeps(settings.kept_blocks, number) for number in group}
        if len(kept) > 1:
            together = ", ".join(map(str, group))
            raise ValueError(
                f"kept_blocks={settings.kept_blocks!r}: blocks {together} are one unit "
                f"(blocks_per_unit={settings.blocks_per_unit}), which keeps all of them or none"
            )
        how = {**_options(settings, kept.pop()), **options}
        yield XlaFullyShardedDataParallel(named_row(group), **how)


def _recomputed(settings: Settings, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for number, block in enumerate(blocks):
        every = settings.recompute == "all"
        if every or (isinstance(settings.recompute, int) and number < settings.recompute):
            block = checkpoint_module(block, offload=settings.offload)
        yield block


def _options(settings: Settings, kept: bool) -> dict[str, Any]:
    """Of the wrapper of a unit that is ``kept`` in full for the backward, or not."""
    return {
        "reshard_after_forward": False if kept else settings.reshard_after_forward,
        "forward_prefetch": settings.forward_prefetch,
        "backward_prefetch": _PREFETCH[settings.backward_prefetch],
        "limit_all_gathers": settings.limit_all_gathers,
        "collective_routes": settings.collective_routes,
        "device_mesh": _mesh(settings.shard_ranks),
    }


def _mesh(shared: int | None) -> list[int] | list[list[int]] | None:
    ranks = xr.world_size()
    if shared is None or shared == ranks:
        # On several slices none would mean each by itself.
        return list(range(ranks)) if slices_of_ranks() else None
    if ranks % shared:
        allowed = [number for number in range(1, ranks + 1) if ranks % number == 0]
        raise ValueError(
            f"shard_ranks={shared} does not divide the {ranks} ranks: one of {allowed}, or None"
        )
    return torch.arange(ranks).view(-1, shared).tolist()


def _require_undecided(options: Mapping[str, Any]) -> None:
    wrong = sorted(_DECIDED.intersection(options))
    if wrong:
        raise ValueError(
            f"{', '.join(f'{name}={options[name]!r}' for name in wrong)}: the settings decide on "
            "that; leave it out, or change them with settings.changed(...)"
        )


def _require_no_hooks(name: str, blocks: nn.Module) -> None:
    """Of a list of blocks that something else takes the place of."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    if any(getattr(blocks, kind) for kind in kinds):
        raise ValueError(
            f"{name!r} has hooks, which would be lost with scan or blocks_per_unit: register them "
            "after wrapping, on what is there then"
        )


def _require_so_many(settings: Settings, count: int) -> None:
    most = {"kept_blocks": 1 + max(numbers(settings.kept_blocks), default=-1)}
    if isinstance(settings.recompute, int):
        most["recompute"] = settings.recompute
    for name, value in most.items():
        if value > count:
            given = getattr(settings, name)
            raise ValueError(f"{name}={given!r}: the model has {count} blocks; at most {count}")
