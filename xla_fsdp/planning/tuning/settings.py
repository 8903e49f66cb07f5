"""How a model is sharded and trained, as one value that is searched, kept and applied."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...collectives.routes import require_how
from ...tpu.compiler_options import operation_vmem
from ..compiling.cache import write_whole
from .kept import Kept, by_name, described, is_kept
from .wrapping import Blocks, join_blocks, wrap_model, wrap_root

FORMAT, VERSION = "xla_fsdp settings", 1
PREFETCHES = ("pre", "post", "none")


@dataclass(frozen=True)
class ShardingSettings:
    """What :func:`xla_fsdp.tune` finds, and a script applies. The defaults are the wrapper's.

    Attributes:
        batch: samples a device; ``None`` where that was not searched.
        units: what is gathered, freed and reduced together: ``"blocks"``, each of the repeated
            blocks by itself and the rest; ``"model"``, all at once; a number: what a size-based
            policy wraps that has at least so many parameters.
        scan: blocks in one loop of the program (:func:`xla_fsdp.scan_blocks`), each recomputed.
        scan_prefetch: the loop gathers the next block's parameters while a block computes.
        reshard_after_forward: that of the wrapper, for all units.
        blocks_per_unit: with units of blocks, so many of them are one, the last of fewer if need
            be. Only where one ``nn.Sequential`` (or :meth:`join`) runs them as a whole.
        kept_blocks: which units keep their full parameters for the backward (ZeRO-2), whatever
            ``reshard_after_forward``: the first so many blocks, or a tuple of their numbers from 0
            on; with units by size, of their dotted names.
        recompute: ``"none"``, ``"all"``, or a number: the first so many blocks recompute their
            activations in the backward. With units by size, of units instead of blocks.
        keep: with ``scan``, what is not computed again, by the names of ``scan_blocks(keep=...)``.
        offload: the inputs of blocks that are recomputed wait in the host's memory.
        shard_ranks: consecutive ranks that share one copy of the parameters, whose copies average
            their gradients (hybrid sharding); ``None``: all ranks.
        forward_prefetch, limit_all_gathers: those of the wrapper.
        backward_prefetch: that of the wrapper: ``"pre"``, ``"post"`` or ``"none"``.
        collective_routes: that of the wrapper.
        operation_vmem: KiB of VMEM that the compiler may give one operation; ``None``: what it
            gives by itself.

    Raises:
        ValueError: a value that is not allowed, or two that exclude each other.
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
    shard_ranks: int | None = None
    forward_prefetch: bool = True
    backward_prefetch: str = "pre"
    limit_all_gathers: bool = True
    collective_routes: str = "auto"
    operation_vmem: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "shard_ranks", "operation_vmem"):
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
        require_how(self.collective_routes)
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
                exclude("scan", "reshard_after_forward", "a loop can not hand on what it gathered")
            if self.kept_blocks:
                exclude("scan", "kept_blocks", "a loop can not hand on what it gathered")
        for option in ("scan_prefetch", "keep"):
            if getattr(self, option) and not self.scan:
                exclude(option, "scan", "it is an option of the loop")
        if self.offload and self.recompute == "none":
            exclude("offload", "recompute", "only inputs of what is recomputed wait on the host")
        if self.blocks_per_unit > 1:
            if self.units != "blocks":
                exclude("blocks_per_unit", "units", 'they are made of blocks with units="blocks"')
            if self.scan:
                exclude("scan", "blocks_per_unit", "a loop gathers block by block")
        if self.units == "model" and self.kept_blocks:
            exclude("kept_blocks", "units", "the outermost unit keeps its parameters anyway")
        if self.kept_blocks and by_name(self.kept_blocks) == (self.units == "blocks"):
            exclude("kept_blocks", "units", "blocks go by their numbers, units by size by names")
        if not isinstance(self.units, str) and not isinstance(self.recompute, str):
            exclude("recompute", "units", "units by size are recomputed all or none of them")

    # Applying them.

    def wrap(
        self,
        model: nn.Module,
        blocks: Blocks = None,
        *,
        ignore: Collection[str] = (),
        **options: Any,
    ) -> nn.Module:
        """``model``, sharded as these settings say.

        Args:
            blocks: which submodules are its blocks: the dotted name of the ``nn.Sequential`` or
                ``nn.ModuleList`` that holds them, or their classes. Default: the class of equal
                neighbours in such lists that holds the most parameters.
            ignore: with ``scan``, attributes in which blocks may differ: those of ``scan_blocks``.
                Without, each block keeps its own.
            options: further ones of the wrapper, such as ``compute_dtype``, for all units.

        Raises:
            ValueError: an option that these settings decide on; no such blocks; with ``scan``:
                blocks that are not all of one ``nn.Sequential``, or not equal.
        """
        return wrap_model(self, model, blocks, ignore, options)

    def join(
        self, blocks: Iterable[nn.Module], *, ignore: Collection[str] = (), **options: Any
    ) -> nn.Module:
        """One module that runs ``blocks`` one after the other, taken one by one and sharded: for
        models whose blocks never are on the host together. ``ignore``: as with :meth:`wrap`. The
        rest: :meth:`wrap_root`."""
        return join_blocks(self, blocks, ignore, options)

    def wrap_root(self, model: nn.Module, **options: Any) -> nn.Module:
        """``model``, whose blocks went through :meth:`join`."""
        return wrap_root(self, model, options)

    @property
    def compiler_options(self) -> Mapping[str, str]:
        """What the TPU compiler needs to be told: ``compiler_options.add_to_environment(...)``
        before ``launch``, or ``plan(compiler_options=...)``."""
        return operation_vmem(self.operation_vmem) if self.operation_vmem else {}

    # As text.

    def __str__(self) -> str:
        """What differs from the defaults, in a few words."""
        words = [] if self.batch is None else [f"batch {self.batch}"]
        named = {"blocks": "a unit a block", "model": "one unit"}
        if self.blocks_per_unit > 1:
            named["blocks"] = f"a unit for {self.blocks_per_unit} blocks"
        words.append(named.get(str(self.units), f"units from {self.units:,} parameters"
                               if isinstance(self.units, int) else ""))  # fmt: skip
        if self.scan:
            words.append("scanned, gathered ahead" if self.scan_prefetch else "scanned")
        elif self.recompute != "none":
            how_many = self.recompute if isinstance(self.recompute, int) else "all"
            words.append(f"{how_many} recomputed")
        if self.keep:
            words.append(f"{', '.join(self.keep)} kept")
        if self.offload:
            words.append("inputs on the host")
        reshard = self.reshard_after_forward
        if reshard is False:
            words.append("ZeRO-2")
        elif reshard is not True:
            words.append(f"kept among {reshard}")
        if self.kept_blocks:
            words.append(f"ZeRO-2 for {described(self.kept_blocks)}")
        if self.shard_ranks is not None:
            words.append(f"sharded over {self.shard_ranks}")
        if not self.forward_prefetch:
            words.append("no prefetch forward")
        if self.backward_prefetch != "pre":
            words.append(f"prefetch backward: {self.backward_prefetch}")
        if not self.limit_all_gathers:
            words.append("gathers not limited")
        if self.collective_routes != "auto":
            words.append(f"routes: {self.collective_routes}")
        if self.operation_vmem:
            words.append(f"{self.operation_vmem / 1024:g} MiB of VMEM for an operation")
        return ", ".join(words)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "this text") -> ShardingSettings:
        """The settings that :meth:`to_json` wrote.

        Raises:
            ValueError: ``text`` is something else, has a key that is none of the settings, or a
                value that is not allowed. ``source`` says in the message where it is from.
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
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(record) - set(known))
        if unknown:
            raise ValueError(
                f"{source} has {', '.join(map(repr, unknown))}, which are no settings; allowed "
                f"are {', '.join(known)}"
            )
        # JSON has lists for tuples.
        given: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes them as JSON. The file appears whole or not at all.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        write_whole(Path(path), f"{self.to_json()}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingSettings:
        """Reads what :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: as :meth:`from_json`.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"), str(path))

    def changed(self, **values: Any) -> ShardingSettings:
        """These settings with other ``values``."""
        return replace(self, **values)


def _counts(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}; got {value!r}")


def _either(words: Iterable[str]) -> str:
    return " or ".join(f'"{word}"' for word in words)
