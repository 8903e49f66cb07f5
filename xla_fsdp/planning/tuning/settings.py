"""``ShardingSettings``: how a model is sharded and trained, as one value to search and store."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch_xla.runtime as xr
from torch import nn

from ...collectives.order import BackwardPrefetch
from ...collectives.routes import require_collective_routes
from ...deprecated import accept_old_names, rename_keys
from ...ranks.slices import slices_of_ranks
from ...remat import checkpoint_module
from ...scan.blocks import scan_blocks
from ...tpu.compiler_options import limit_scoped_vmem
from ...wrap import size_based_auto_wrap_policy
from ...wrapper import XlaFullyShardedDataParallel
from ..compiling.cache import write_whole
from ..tracing.naming import plain
from .blocks import (
    BlockRow,
    Blocks,
    GroupedBlocks,
    find_blocks,
    list_of,
    named_row,
    replace_modules,
)
from .kept import Kept, by_name, described, is_kept, keeps, numbers

FORMAT, VERSION = "xla_fsdp settings", 1
PREFETCHES = ("pre", "post", "none")

_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
# Options of the wrapper and of scan_blocks that ShardingSettings determines.
_DECIDED = frozenset(
    "reshard_after_forward forward_prefetch backward_prefetch limit_all_gathers collective_routes"
    " device_mesh sharding_strategy sharding_groups sharding_rank sharding_world_size"
    " replication_groups auto_wrap_policy auto_wrapper_callable offload prefetch keep".split()
)


@accept_old_names
@dataclass(frozen=True)
class ShardingSettings:
    """The settings that :func:`xla_fsdp.tune` finds and a script applies.

    The defaults are those of the wrapper.

    Attributes:
        batch: samples per device; ``None`` if the batch was not searched.
        units: how parameters are divided into FSDP units. ``"blocks"``: each repeated block is a
            unit, and the rest of the model is one. ``"model"``: one unit. A number: a size-based
            policy wraps modules that have at least this number of parameters.
        scan: run the blocks in one loop of the program (:func:`xla_fsdp.scan_blocks`), which
            recomputes each block.
        scan_prefetch: the loop gathers the next block's parameters while a block computes.
        reshard_after_forward: as in the wrapper, for all units.
        blocks_per_unit: with ``units="blocks"``, the number of blocks in a unit; the last unit may
            have fewer. Requires that one ``nn.Sequential`` (or :meth:`join`) runs all blocks.
        kept_blocks: which units keep their full parameters until the backward (ZeRO-2), whatever
            ``reshard_after_forward`` is. A number N: the first N blocks. A tuple: block numbers,
            from 0; with units by size, dotted names of units.
        recompute: which blocks recompute their activations in the backward: ``"none"``, ``"all"``,
            or a number N: the first N blocks. With units by size it means units, not blocks.
        keep: with ``scan``, values that are not recomputed, by the names of
            ``scan_blocks(keep=...)``.
        offload: store the inputs of recomputed blocks in host memory until the backward.
        shard_group_size: number of consecutive ranks that share one copy of the parameters (hybrid
            sharding); the copies average their gradients. ``None``: all ranks.
        forward_prefetch, limit_all_gathers: as in the wrapper.
        backward_prefetch: as in the wrapper: ``"pre"``, ``"post"`` or ``"none"``.
        collective_routes: as in the wrapper.
        scoped_vmem_kib: KiB of VMEM that the compiler may use for one operation; ``None``: the
            compiler's default.

    Raises:
        ValueError: a value is not allowed, or two values exclude each other.
    """

    batch: int | None = None
    units: str | int = "blocks"
    scan: bool = False
    scan_prefetch: bool = False
    reshard_after_forward: bool | int = True
    blocks_per_unit: int = 1
    kept_blocks: Kept = 0
    recompute: str | int = "none"
    keep: tuple[str, ...] = ()
    offload: bool = False
    shard_group_size: int | None = None
    forward_prefetch: bool = True
    backward_prefetch: str = "pre"
    limit_all_gathers: bool = True
    collective_routes: str = "auto"
    scoped_vmem_kib: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "shard_group_size", "scoped_vmem_kib"):
            _require(
                getattr(self, name) is None or _counts(getattr(self, name), 1),
                name, getattr(self, name), "a number from 1 on, or None",
            )  # fmt: skip
        units = self.units in ("blocks", "model") or _counts(self.units, 1)
        allowed = '"blocks", "model" or a number of parameters from 1 on'
        _require(units, "units", self.units, allowed)
        for name in ("scan", "scan_prefetch", "offload", "forward_prefetch", "limit_all_gathers"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")
        reshard = self.reshard_after_forward
        whole = isinstance(reshard, bool) or _counts(reshard, 2)
        _require(
            whole, "reshard_after_forward", reshard, "True, False or a number of ranks from 2 on"
        )
        grouped, allowed = self.blocks_per_unit, "a number of blocks from 1 on"
        _require(_counts(grouped, 1), "blocks_per_unit", grouped, allowed)
        allowed = "a number, or a tuple of numbers of blocks from 0 on or of names of units"
        _require(is_kept(self.kept_blocks), "kept_blocks", self.kept_blocks, allowed)
        recompute = self.recompute in ("none", "all") or _counts(self.recompute, 1)
        allowed = '"none", "all" or a number of blocks from 1 on'
        _require(recompute, "recompute", self.recompute, allowed)
        named = isinstance(self.keep, tuple) and all(isinstance(one, str) for one in self.keep)
        _require(named, "keep", self.keep, "a tuple of names")
        prefetch = self.backward_prefetch
        _require(prefetch in PREFETCHES, "backward_prefetch", prefetch, _either(PREFETCHES))
        require_collective_routes(self.collective_routes)
        self._require_possible()

    def _require_possible(self) -> None:
        def exclude(one: str, other: str, why: str) -> None:
            given = (f"{name}={getattr(self, name)!r}" for name in (one, other))
            raise ValueError(f"{' and '.join(given)} exclude each other: {why}")

        if self.scan:
            if self.recompute != "all":
                exclude("scan", "recompute", 'a loop recomputes each block, recompute="all"')
            if self.units != "blocks":
                exclude("scan", "units", 'a loop gathers block by block, units="blocks"')
            if self.reshard_after_forward is False:
                exclude("scan", "reshard_after_forward", "a loop cannot keep gathered parameters")
            if self.kept_blocks:
                exclude("scan", "kept_blocks", "a loop cannot keep gathered parameters")
        for option in ("scan_prefetch", "keep"):
            if getattr(self, option) and not self.scan:
                exclude(option, "scan", "it is an option of the loop; set scan=True")
        if self.offload and self.recompute == "none":
            exclude("offload", "recompute", "only inputs of recomputed blocks are offloaded")
        if self.blocks_per_unit > 1:
            if self.units != "blocks":
                exclude("blocks_per_unit", "units", 'it needs units="blocks"')
            if self.scan:
                exclude("scan", "blocks_per_unit", "a loop gathers block by block")
        if self.units == "model" and self.kept_blocks:
            exclude("kept_blocks", "units", "the outermost unit keeps its parameters anyway")
        if self.kept_blocks and by_name(self.kept_blocks) == (self.units == "blocks"):
            exclude("kept_blocks", "units", "select blocks by numbers, units by size by names")
        if not isinstance(self.units, str) and not isinstance(self.recompute, str):
            exclude("recompute", "units", 'with units by size it must be "all" or "none"')

    # Applying them.

    def wrap(
        self,
        model: nn.Module,
        blocks: Blocks = None,
        *,
        ignore: Collection[str] = (),
        **options: Any,
    ) -> nn.Module:
        """Shard ``model`` with these settings and return it.

        Args:
            blocks: which submodules are its blocks: the dotted name of the ``nn.Sequential`` or
                ``nn.ModuleList`` that holds them, or their classes. Default: among lists whose
                modules are all of one class, the class with the most parameters.
            ignore: with ``scan``, the attributes in which blocks may differ, as in
                ``scan_blocks``. No effect without ``scan``.
            options: other options of the wrapper, such as ``compute_dtype``, for all units.

        Raises:
            ValueError: an option that these settings determine; no such blocks; with ``scan``:
                blocks that are not all of one ``nn.Sequential``, or not equal.
        """
        return _wrap_model(self, model, blocks, ignore, options)

    def join(
        self, blocks: Iterable[nn.Module], *, ignore: Collection[str] = (), **options: Any
    ) -> nn.Module:
        """Shard ``blocks`` and return one module that runs them one after the other.

        It takes and shards one block at a time, for models that do not fit on the host.
        ``ignore``: as in :meth:`wrap`. Call :meth:`wrap_root` on the model afterwards.
        """
        return _join_blocks(self, blocks, ignore, options)

    def wrap_root(self, model: nn.Module, **options: Any) -> nn.Module:
        """Shard the rest of a ``model`` whose blocks were built with :meth:`join`; return it."""
        return _wrap_root(self, model, options)

    @property
    def compiler_options(self) -> Mapping[str, str]:
        """The compiler options of these settings: pass them to
        ``compiler_options.add_to_environment(...)`` before ``launch``, or to
        ``plan(compiler_options=...)``."""
        return limit_scoped_vmem(self.scoped_vmem_kib) if self.scoped_vmem_kib else {}

    # As text.

    def __str__(self) -> str:
        """The settings that differ from the defaults, as ``name=value``."""
        return differences(self, ShardingSettings()) or "the defaults"

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "this text") -> ShardingSettings:
        """Read the settings that :meth:`to_json` wrote.

        Raises:
            ValueError: ``text`` is not such JSON, has an unknown key, or a value that is not
                allowed. The message names ``source``, where the text comes from.
        """
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source} is not JSON: {error}") from error
        if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
            raise ValueError(f'{source} has no "format": "{FORMAT}": it is not what tune wrote')
        version = record.pop("version", None)
        if version != VERSION:
            raise ValueError(
                f"{source} has version {version!r}; this release of xla_fsdp reads {VERSION}"
            )
        record = rename_keys("ShardingSettings", record)
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(record) - set(known))
        if unknown:
            raise ValueError(
                f"{source} has {', '.join(map(repr, unknown))}, which are no settings; allowed "
                f"are {', '.join(known)}"
            )
        # JSON stores tuples as lists.
        given: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as JSON. The file is written completely or not at all.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        write_whole(Path(path), f"{self.to_json()}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingSettings:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: as :meth:`from_json`.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"), str(path))

    def changed(self, **values: Any) -> ShardingSettings:
        """Return a copy of these settings with other ``values``."""
        return replace(self, **rename_keys("ShardingSettings", values))


def differences(settings: ShardingSettings, other: ShardingSettings) -> str:
    """The settings whose values differ from those of ``other``, as ``name=value``."""
    pairs = ((one.name, getattr(settings, one.name)) for one in fields(settings))
    return ", ".join(
        f"{name}={described(value)}" for name, value in pairs if value != getattr(other, name)
    )


def _counts(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}; got {value!r}")


def _either(words: Iterable[str]) -> str:
    return " or ".join(f'"{word}"' for word in words)


def _wrap_model(
    settings: ShardingSettings,
    model: nn.Module,
    blocks: Blocks,
    ignore: Collection[str],
    options: Mapping[str, Any],
) -> nn.Module:
    """See ``ShardingSettings.wrap``."""
    _require_undecided(options)
    if isinstance(settings.units, int):
        return _wrap_root(settings, model, options)
    found = find_blocks(model, blocks)
    _require_so_many(settings, len(found))
    if settings.scan or (settings.blocks_per_unit > 1 and found):
        name = list_of(model, found) if found else None
        if name is None:
            what = "scan=True" if settings.scan else f"blocks_per_unit={settings.blocks_per_unit}"
            raise ValueError(
                f"{what}: the blocks are not all of one nn.Sequential, so no module runs all of "
                "them. Build them with settings.join(...) and call the result: x = self.blocks(x)"
            )
        path, _, attribute = name.rpartition(".")
        parent = model.get_submodule(path)
        _require_no_hooks(name, getattr(parent, attribute))
        setattr(parent, attribute, _join_blocks(settings, found, ignore, options))
        return _wrap_root(settings, model, options)
    wrapped = zip(found, _each(settings, found, options), strict=True)
    replace_modules(model, {block: one for block, one in wrapped if one is not block})
    return _wrap_root(settings, model, options)


def _join_blocks(
    settings: ShardingSettings,
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


def _wrap_root(
    settings: ShardingSettings, model: nn.Module, options: Mapping[str, Any]
) -> nn.Module:
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
    """Wraps the units that a size-based policy chooses."""

    def __init__(self, settings: ShardingSettings, model: nn.Module) -> None:
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
        """Raise ValueError if ``kept_blocks`` names a unit that does not exist."""
        kept = self._settings.kept_blocks
        names = kept if isinstance(kept, tuple) and by_name(kept) else ()
        wrong = [name for name in names if name not in self._seen]
        if wrong:
            raise ValueError(
                f"kept_blocks={kept!r}: {wrong[0]!r} is no unit; with units={self._settings.units} "
                f"the units are {', '.join(self._seen) or 'only the model itself'}"
            )


def _each(
    settings: ShardingSettings, blocks: Iterable[nn.Module], options: Mapping[str, Any]
) -> Iterator[nn.Module]:
    """Yield ``blocks``, recomputed and wrapped (each as a unit) as the settings say."""
    for number, block in enumerate(_recomputed(settings, blocks)):
        if settings.units == "blocks":
            how = {**_options(settings, keeps(settings.kept_blocks, number)), **options}
            block = XlaFullyShardedDataParallel(block, **how)
        yield block


def _groups(
    settings: ShardingSettings, blocks: Iterable[nn.Module], options: Mapping[str, Any]
) -> Iterator[nn.Module]:
    """Yield units of ``blocks_per_unit`` blocks, recomputed as the settings say."""
    if options.get("flatten_parameters"):
        raise ValueError(
            "flatten_parameters=True and blocks_per_unit exclude each other: a unit of several "
            "blocks has no name for its flat vector. Leave one of them out"
        )
    waiting = enumerate(_recomputed(settings, blocks))
    while group := dict(islice(waiting, settings.blocks_per_unit)):
        kept = {keeps(settings.kept_blocks, number) for number in group}
        if len(kept) > 1:
            together = ", ".join(map(str, group))
            raise ValueError(
                f"kept_blocks={settings.kept_blocks!r}: blocks {together} are one unit "
                f"(blocks_per_unit={settings.blocks_per_unit}): give all of them or none"
            )
        how = {**_options(settings, kept.pop()), **options}
        yield XlaFullyShardedDataParallel(named_row(group), **how)


def _recomputed(settings: ShardingSettings, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for number, block in enumerate(blocks):
        every = settings.recompute == "all"
        if every or (isinstance(settings.recompute, int) and number < settings.recompute):
            block = checkpoint_module(block, offload=settings.offload)
        yield block


def _options(settings: ShardingSettings, kept: bool) -> dict[str, Any]:
    """The wrapper options of a unit; ``kept``: its full parameters are kept until the backward."""
    return {
        "reshard_after_forward": False if kept else settings.reshard_after_forward,
        "forward_prefetch": settings.forward_prefetch,
        "backward_prefetch": _PREFETCH[settings.backward_prefetch],
        "limit_all_gathers": settings.limit_all_gathers,
        "collective_routes": settings.collective_routes,
        "device_mesh": _mesh(settings.shard_group_size),
    }


def _mesh(shared: int | None) -> list[int] | list[list[int]] | None:
    ranks = xr.world_size()
    if shared is None or shared == ranks:
        # On several slices None would mean that each slice has its own copy.
        return list(range(ranks)) if slices_of_ranks() else None
    if ranks % shared:
        allowed = [number for number in range(1, ranks + 1) if ranks % number == 0]
        raise ValueError(
            f"shard_group_size={shared} does not divide the {ranks} ranks. Allowed are {allowed} "
            "and None"
        )
    return torch.arange(ranks).view(-1, shared).tolist()


def _require_undecided(options: Mapping[str, Any]) -> None:
    wrong = sorted(_DECIDED.intersection(options))
    if wrong:
        raise ValueError(
            f"{', '.join(f'{name}={options[name]!r}' for name in wrong)}: the settings determine "
            "this; leave it out, or change the settings with settings.changed(...)"
        )


def _require_no_hooks(name: str, blocks: nn.Module) -> None:
    """Raise ValueError if a list of blocks that will be replaced has hooks."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    if any(getattr(blocks, kind) for kind in kinds):
        raise ValueError(
            f"{name!r} has hooks, which would be lost with scan or blocks_per_unit: register them "
            "after wrapping, on the module that replaces it"
        )


def _require_so_many(settings: ShardingSettings, count: int) -> None:
    most = {"kept_blocks": 1 + max(numbers(settings.kept_blocks), default=-1)}
    if isinstance(settings.recompute, int):
        most["recompute"] = settings.recompute
    for name, value in most.items():
        if value > count:
            given = getattr(settings, name)
            raise ValueError(f"{name}={given!r}: the model has {count} blocks; at most {count}")
