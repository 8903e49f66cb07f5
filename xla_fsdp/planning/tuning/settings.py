"""``ShardingSettings``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch_xla.runtime as xr
from torch import nn

from ...collectives.order import BackwardPrefetch
from ...collectives.routes import require_collective_routes
from ...compiler_options import limit_scoped_vmem
from ...deprecated import accept_old_names, rename_keys
from ...files import parse_record
from ...ranks.slices import slices_of_ranks
from ...remat import checkpoint_module
from ...scan.blocks import scan_blocks
from ...wrap import size_based_auto_wrap_policy
from ...wrapper import XlaFullyShardedDataParallel
from ..compiling.plan_cache import write_whole
from ..reporting.page import require_parent
from ..tracing.naming import plain_name
from .repeated_blocks import BlockRow, Blocks, find_blocks, list_of, replace_modules

FORMAT, VERSION = "xla_fsdp settings", 1
_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
PREFETCHES = tuple(_PREFETCH)
# Options that ShardingSettings determines.
_DECIDED = frozenset(
    "reshard_after_forward forward_prefetch backward_prefetch limit_all_gathers collective_routes"
    " device_mesh sharding_strategy sharding_groups sharding_rank sharding_world_size"
    " replication_groups auto_wrap_policy auto_wrapper_callable offload prefetch keep".split()
)

# A number N: the first N blocks. A tuple: numbers of blocks, from 0; or names of units by size.
Kept = int | tuple[int | str, ...]


def keeps(kept: Kept, number: int, name: str = "") -> bool:
    return 0 <= number < kept if isinstance(kept, int) else number in kept or name in kept


def _is_integer(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_kept(value: Any) -> bool:
    if not isinstance(value, tuple):
        return _is_integer(value, 0)
    numbers = all(_is_integer(one, 0) for one in value)
    names = all(isinstance(one, str) and one for one in value)
    return (numbers or names) and len(set(value)) == len(value)


# By setting: whether a value is allowed, and what is.
_ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType({
    **dict.fromkeys(
        ("batch", "shard_group_size", "scoped_vmem_kib"),
        (lambda value: value is None or _is_integer(value), "a number from 1 on, or None"),
    ),
    "units": (
        lambda value: value in ("blocks", "model") or _is_integer(value),
        '"blocks", "model" or a number of parameters from 1 on',
    ),
    **dict.fromkeys(
        ("scan", "scan_prefetch", "offload", "forward_prefetch", "limit_all_gathers"),
        (lambda value: isinstance(value, bool), "True or False"),
    ),
    "reshard_after_forward": (
        lambda value: isinstance(value, bool) or _is_integer(value, 2),
        "True, False or a number of ranks from 2 on",
    ),
    "kept_blocks": (
        _is_kept, "a number, or a tuple of numbers of blocks from 0 on or of names of units",
    ),
    "recompute": (
        lambda value: value in ("none", "all") or _is_integer(value),
        '"none", "all" or a number of blocks from 1 on',
    ),
    "keep": (
        lambda value: isinstance(value, tuple) and all(isinstance(one, str) for one in value),
        "a tuple of names",
    ),
    "backward_prefetch": (
        lambda value: value in PREFETCHES, " or ".join(f'"{one}"' for one in PREFETCHES),
    ),
})  # fmt: skip


def require_allowed(name: str, value: Any) -> None:
    if name == "collective_routes":
        require_collective_routes(value)
    elif not _ALLOWED[name][0](value):
        raise ValueError(f"{name} must be {_ALLOWED[name][1]}; got {value!r}")


@accept_old_names
@dataclass(frozen=True)
class ShardingSettings:
    """The settings that :func:`xla_fsdp.tune` finds and a script applies.

    The defaults are those of the wrapper. Raises ValueError if a value is not allowed, or if two
    values exclude each other.

    Attributes:
        batch: samples per device; ``None`` if the batch was not searched.
        units: ``"blocks"``: each repeated block is an FSDP unit, and the rest of the model is one.
            ``"model"``: one unit. A number: modules with at least this number of parameters.
        scan: run the blocks in one loop, which recomputes each (:func:`xla_fsdp.scan_blocks`).
        scan_prefetch: the loop gathers the next block's parameters while a block computes.
        kept_blocks: which units keep their full parameters until the backward (ZeRO-2), whatever
            ``reshard_after_forward`` is. A number N: the first N blocks. A tuple: block numbers,
            from 0; with units by size, dotted names of units.
        recompute: which blocks recompute their activations in the backward: ``"none"``, ``"all"``,
            or a number N: the first N blocks. With units by size it means units, not blocks.
        keep: values that are not recomputed, as in ``scan_blocks(keep=...)``.
        offload: store the inputs of recomputed blocks in host memory until the backward.
        shard_group_size: number of consecutive ranks that share one copy of the parameters (hybrid
            sharding); the copies average their gradients. ``None``: all ranks.
        backward_prefetch: as in the wrapper: ``"pre"``, ``"post"`` or ``"none"``.
        reshard_after_forward, forward_prefetch, limit_all_gathers, collective_routes: as in the
            wrapper.
        scoped_vmem_kib: KiB of VMEM for one operation; ``None``: the compiler's default.
    """

    batch: int | None = None
    units: str | int = "blocks"
    scan: bool = False
    scan_prefetch: bool = False
    reshard_after_forward: bool | int = True
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
        for name in (*_ALLOWED, "collective_routes"):
            require_allowed(name, getattr(self, name))
        scan, units, kept = self.scan, self.units, self.kept_blocks
        by_name = isinstance(kept, tuple) and any(isinstance(one, str) for one in kept)
        cannot_keep = "a loop cannot keep gathered parameters"
        of_the_loop = "it is an option of the loop; set scan=True"
        for wrong, one, other, why in (
            (scan and self.recompute != "all", "scan", "recompute",
             'a loop recomputes each block, recompute="all"'),
            (scan and units != "blocks", "scan", "units",
             'a loop gathers block by block, units="blocks"'),
            (scan and self.reshard_after_forward is False, "scan", "reshard_after_forward",
             cannot_keep),
            (scan and kept, "scan", "kept_blocks", cannot_keep),
            (self.scan_prefetch and not scan, "scan_prefetch", "scan", of_the_loop),
            (self.keep and not scan, "keep", "scan", of_the_loop),
            (self.offload and self.recompute == "none", "offload", "recompute",
             "only inputs of recomputed blocks are offloaded"),
            (kept and units == "model", "kept_blocks", "units",
             "the outermost unit keeps its parameters anyway"),
            (kept and by_name == (units == "blocks"), "kept_blocks", "units",
             "select blocks by numbers, units by size by names"),
            (isinstance(units, int) and isinstance(self.recompute, int), "recompute", "units",
             'with units by size it must be "all" or "none"'),
        ):  # fmt: skip
            if wrong:
                given = " and ".join(f"{name}={getattr(self, name)!r}" for name in (one, other))
                raise ValueError(f"{given} exclude each other: {why}")

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
            blocks: the dotted name of the ``nn.Sequential`` or ``nn.ModuleList`` that holds the
                blocks, or their classes. Default: among lists whose modules are all of one class
                (other than these two), the class with the most parameters.
            ignore: with ``scan``, the attributes in which blocks may differ.
            options: other options of the wrapper, such as ``compute_dtype``, for all units.

        Raises ValueError for an option that these settings determine; no such blocks; with
        ``scan``, blocks that are not all of one ``nn.Sequential``, or not equal.
        """
        _require_undecided(options)
        if isinstance(self.units, int):
            return self.wrap_root(model, **options)
        found = find_blocks(model, blocks)
        self._require_at_most(len(found))
        if self.scan:
            name = list_of(model, found) if found else None
            if name is None:
                raise ValueError(
                    "scan=True: the blocks are not all of one nn.Sequential, so no module runs all "
                    "of them. Build them with settings.join(...) and call the result: "
                    "x = self.blocks(x)"
                )
            kinds = ("forward_pre", "forward", "backward_pre", "backward")
            if any(getattr(model.get_submodule(name), f"_{kind}_hooks") for kind in kinds):
                raise ValueError(
                    f"{name!r} has hooks, which would be lost with scan: register them after "
                    "wrapping, on the module that replaces it"
                )
            model.set_submodule(name, self.join(found, ignore=ignore, **options))
        else:
            wrapped = zip(found, self._units(found, options), strict=True)
            replace_modules(model, {block: one for block, one in wrapped if one is not block})
        return self.wrap_root(model, **options)

    def join(
        self, blocks: Iterable[nn.Module], *, ignore: Collection[str] = (), **options: Any
    ) -> nn.Module:
        """Shard ``blocks``, one at a time, and return one module that runs them one after the
        other.

        ``ignore``: as in :meth:`wrap`. Call :meth:`wrap_root` on the model afterwards.
        """
        _require_undecided(options)
        if self.scan:
            return scan_blocks(
                blocks, offload=self.offload, prefetch=self.scan_prefetch, keep=self.keep,
                ignore=ignore, **self._options(), **options,
            )  # fmt: skip
        joined = BlockRow(*self._units(blocks, options))
        self._require_at_most(len(joined))
        return joined

    def wrap_root(self, model: nn.Module, **options: Any) -> nn.Module:
        """Shard the rest of a ``model`` whose blocks were built with :meth:`join`; return it."""
        _require_undecided(options)
        if not isinstance(self.units, int):
            return XlaFullyShardedDataParallel(model, **{**self._options(), **options})
        names = {module: plain_name(name) for name, module in model.named_modules()}
        units: list[str] = []

        def wrap(module: nn.Module, **options: Any) -> nn.Module:
            units.append(names[module])
            if keeps(self.kept_blocks, -1, names[module]):
                options["reshard_after_forward"] = False
            if self.recompute == "all":
                module = checkpoint_module(module, offload=self.offload)
            return XlaFullyShardedDataParallel(module, **options)

        policy = partial(size_based_auto_wrap_policy, min_num_params=self.units)
        how = {"auto_wrap_policy": policy, "auto_wrapper_callable": wrap}
        wrapped = XlaFullyShardedDataParallel(model, **{**self._options(), **options, **how})
        kept = self.kept_blocks if isinstance(self.kept_blocks, tuple) else ()
        if wrong := [name for name in kept if name not in units]:
            raise ValueError(
                f"kept_blocks={kept!r}: {wrong[0]!r} is no unit; with units={self.units} the units "
                f"are {', '.join(units) or 'only the model itself'}"
            )
        return wrapped

    def _units(
        self, blocks: Iterable[nn.Module], options: Mapping[str, Any]
    ) -> Iterator[nn.Module]:
        for number, block in enumerate(blocks):
            some = isinstance(self.recompute, int) and number < self.recompute
            if some or self.recompute == "all":
                block = checkpoint_module(block, offload=self.offload)
            if self.units == "blocks":
                how = {**self._options(keeps(self.kept_blocks, number)), **options}
                block = XlaFullyShardedDataParallel(block, **how)
            yield block

    def _options(self, kept: bool = False) -> dict[str, Any]:
        return {
            "reshard_after_forward": False if kept else self.reshard_after_forward,
            "forward_prefetch": self.forward_prefetch,
            "backward_prefetch": _PREFETCH[self.backward_prefetch],
            "limit_all_gathers": self.limit_all_gathers,
            "collective_routes": self.collective_routes,
            "device_mesh": _mesh(self.shard_group_size),
        }

    def _require_at_most(self, blocks: int) -> None:
        kept, recompute = self.kept_blocks, self.recompute
        if isinstance(kept, tuple):
            kept = max((one + 1 for one in kept if isinstance(one, int)), default=0)
        recompute = recompute if isinstance(recompute, int) else 0
        for name, most in (("kept_blocks", kept), ("recompute", recompute)):
            if most > blocks:
                given = getattr(self, name)
                raise ValueError(
                    f"{name}={given!r}: the model has {blocks} blocks; at most {blocks}"
                )

    @property
    def compiler_options(self) -> Mapping[str, str]:
        """For ``compiler_options.add_to_environment(...)`` before ``launch``, or for
        ``plan(compiler_options=...)``.
        """
        return limit_scoped_vmem(self.scoped_vmem_kib) if self.scoped_vmem_kib else {}

    def __str__(self) -> str:
        """The settings that differ from the defaults, as ``name=value``."""
        return describe_changes(self, ShardingSettings()) or "the defaults"

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "this text") -> ShardingSettings:
        """Read the settings that :meth:`to_json` wrote.

        Raises ValueError, which names ``source``, for other JSON, an unknown key, or a wrong value.
        """
        record = parse_record(
            text, source, FORMAT, VERSION, "expected what tune wrote; run it again"
        )
        del record["format"], record["version"]
        record = rename_keys("ShardingSettings", record)
        if record.pop("blocks_per_unit", 1) != 1:
            raise ValueError(
                f"{source} has blocks_per_unit, which was removed: it saved at most 2 % of a step. "
                "Run tune again, or remove it from the file: then each block is a unit"
            )
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(record) - set(known))
        if unknown:
            raise ValueError(
                f"{source} has {', '.join(map(repr, unknown))}, which are no settings; allowed "
                f"are {', '.join(known)}"
            )
        given: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as JSON, atomically; FileNotFoundError if there is no such folder."""
        write_whole(require_parent(path), f"{self.to_json()}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingSettings:
        """Read what :meth:`save` wrote; FileNotFoundError, or ValueError as :meth:`from_json`."""
        return cls.from_json(Path(path).read_bytes(), str(path))

    def changed(self, **values: Any) -> ShardingSettings:
        """Return a copy of these settings with other ``values``."""
        return replace(self, **rename_keys("ShardingSettings", values))


@dataclass(frozen=True)
class ShallowSettings(ShardingSettings):
    """Settings that leave out all blocks but the first ``depth``, to extrapolate from."""

    depth: int = 2

    @classmethod
    def of(cls, settings: ShardingSettings, depth: int) -> ShallowSettings:
        return cls(**asdict(settings), depth=depth)

    def wrap(self, model: nn.Module, blocks: Blocks = None, **options: Any) -> nn.Module:
        found = find_blocks(model, blocks)
        name = list_of(model, found, (nn.Sequential, nn.ModuleList))
        if name is None:
            raise ValueError("the blocks are not all of one list, so none can be left out")
        several: Any = model.get_submodule(name)
        del several[self.depth :]
        return super().wrap(model, name, **options)

    def join(self, blocks: Iterable[nn.Module], **options: Any) -> nn.Module:
        return super().join(islice(blocks, self.depth), **options)


def changes(settings: ShardingSettings, other: ShardingSettings) -> dict[str, Any]:
    """The settings that differ from those of ``other``, by name."""
    pairs = ((one.name, getattr(settings, one.name)) for one in fields(settings))
    return {name: value for name, value in pairs if value != getattr(other, name)}


def describe_changes(settings: ShardingSettings, other: ShardingSettings) -> str:
    found = changes(settings, other).items()
    return ", ".join(f"{name}={value_text(value)}" for name, value in found)


def value_text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _mesh(shared: int | None) -> list[int] | list[list[int]] | None:
    ranks = xr.world_size()
    if shared is None or shared == ranks:
        # On several slices None would mean a copy for each slice.
        return list(range(ranks)) if slices_of_ranks() else None
    if ranks % shared:
        allowed = [number for number in range(1, ranks + 1) if ranks % number == 0]
        raise ValueError(
            f"shard_group_size={shared} does not divide the {ranks} ranks. Allowed are {allowed} "
            "and None"
        )
    return torch.arange(ranks, device="cpu").view(-1, shared).tolist()


def _require_undecided(options: Mapping[str, Any]) -> None:
    wrong = sorted(_DECIDED.intersection(options))
    if wrong:
        raise ValueError(
            f"{', '.join(f'{name}={options[name]!r}' for name in wrong)}: the settings determine "
            "this; leave it out, or change the settings with settings.changed(...)"
        )
