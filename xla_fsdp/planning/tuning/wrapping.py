"""Applies settings to a model: what is wrapped, recomputed and scanned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
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
from .blocks import Blocks, find_blocks, list_of, replace_modules

_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
# Options of the wrapper that settings decide on.
_DECIDED = frozenset(
    "reshard_after_forward forward_prefetch backward_prefetch limit_all_gathers collective_routes"
    " device_mesh sharding_strategy sharding_groups sharding_rank sharding_world_size"
    " replication_groups auto_wrap_policy auto_wrapper_callable".split()
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
    def kept_blocks(self) -> int: ...
    @property
    def recompute(self) -> str | int: ...
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
    settings: Settings, model: nn.Module, blocks: Blocks, options: Mapping[str, Any]
) -> nn.Module:
    """See ``ShardingSettings.wrap``."""
    _require_undecided(options)
    if isinstance(settings.units, int):
        return wrap_root(settings, model, options)
    found = find_blocks(model, blocks)
    _require_so_many(settings, len(found))
    if settings.scan:
        name = list_of(model, found) if found else None
        if name is None:
            raise ValueError(
                "scan=True: the blocks are not all of one nn.Sequential, so nothing calls them as "
                "a whole. Build them with settings.join(...) and call that, x = self.blocks(x)"
            )
        path, _, attribute = name.rpartition(".")
        joined = join_blocks(settings, found, options)
        setattr(model.get_submodule(path), attribute, joined)
        return wrap_root(settings, model, options)
    wrapped = zip(found, _each(settings, found, options), strict=True)
    replace_modules(model, {block: one for block, one in wrapped if one is not block})
    return wrap_root(settings, model, options)


def join_blocks(
    settings: Settings, blocks: Iterable[nn.Module], options: Mapping[str, Any]
) -> nn.Module:
    """See ``ShardingSettings.join``."""
    _require_undecided(options)
    if settings.scan:
        loop: dict[str, Any] = {"offload": settings.offload, "prefetch": settings.scan_prefetch}
        return scan_blocks(blocks, **{**loop, **_options(settings, 0), **options})
    joined = nn.Sequential(*_each(settings, blocks, options))
    _require_so_many(settings, len(joined))
    return joined


def wrap_root(settings: Settings, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """See ``ShardingSettings.wrap_root``."""
    _require_undecided(options)
    how = {**_options(settings, settings.kept_blocks), **options}
    if isinstance(settings.units, int):
        policy = partial(size_based_auto_wrap_policy, min_num_params=settings.units)
        how["auto_wrap_policy"] = policy
        if settings.recompute == "all":
            how["auto_wrapper_callable"] = partial(_recomputed_unit, offload=settings.offload)
    return XlaFullyShardedDataParallel(model, **how)


def _each(
    settings: Settings, blocks: Iterable[nn.Module], options: Mapping[str, Any]
) -> Iterator[nn.Module]:
    for number, block in enumerate(blocks):
        every = settings.recompute == "all"
        if every or (isinstance(settings.recompute, int) and number < settings.recompute):
            block = checkpoint_module(block, offload=settings.offload)
        if settings.units == "blocks":
            how = {**_options(settings, number), **options}
            block = XlaFullyShardedDataParallel(block, **how)
        yield block


def _recomputed_unit(module: nn.Module, offload: bool, **options: Any) -> nn.Module:
    return XlaFullyShardedDataParallel(checkpoint_module(module, offload=offload), **options)


def _options(settings: Settings, number: int) -> dict[str, Any]:
    """Of the wrapper of block ``number``."""
    kept = number < settings.kept_blocks
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


def _require_so_many(settings: Settings, count: int) -> None:
    for name in ("kept_blocks", "recompute"):
        value = getattr(settings, name)
        if isinstance(value, int) and value > count:
            raise ValueError(f"{name}={value}: the model has {count} blocks; at most {count}")
