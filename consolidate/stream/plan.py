"""Assigns the tensors of a source to the files of the result, without reading values.

Resharding splits parameters as ``xla_fsdp.sharding.layout`` does, so that a loading rank mostly
reads one file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from ..errors import OptionsError, UnsupportedValueError
from ..format import manifest, values
from ..format.digests import chunk_bytes, digest
from ..format.dtypes import DTYPES
from ..format.manifest import (
    Manifest,
    Optimizer,
    ShardingRule,
    buffer_key,
    file_name,
    parameter_key,
    state_key,
)
from ..format.rank_file import FileRecord, FileTensor
from ..format.strict import write_json
from .options import SAFETENSORS, Options
from .result_file import ResultFile, SafetensorsFile, TorchFile
from .sources import Source

RECORD = "consolidated.json"
INDEX = "model.safetensors.index.json"
OPTIMIZER_JSON = "optimizer.json"
_LANES = 128


@dataclass(frozen=True)
class WritePlan:
    """The files of a result.

    Attributes:
        files: files with tensors. If ``is_folder`` is False, the result is the only one.
        texts: content of small files, by name. ``make_texts`` adds more, from the digests of
            ``files``.
        identity: equal only for the same save with the same options.
    """

    files: Sequence[ResultFile]
    texts: dict[str, bytes]
    identity: str
    is_folder: bool = True
    make_texts: Callable[[list[str]], dict[str, bytes]] = lambda digests: {}


def make_write_plan(
    source: Source,
    options: Options,
    name: str | None,
    state_dict: Mapping[str, Any] | None = None,
) -> WritePlan:
    """Plans the files of the result. Raises OptionsError, UnsupportedValueError.

    Args:
        name: name of the file, None for a folder.
        state_dict: the full model for a torch file, if it is in memory.
    """
    about = {
        "format": manifest.FORMAT,
        "version": manifest.VERSION,
        "save_id": source.save_id,
        "step": source.step,
        "world_size": source.world_size,
        "options": vars(options),
    }
    identity = digest(write_json(about))
    files: list[ResultFile] = []
    texts: dict[str, bytes] = {}
    if options.optimizer and source.optimizer is None:
        raise OptionsError(f"{source.label}: has no optimizer. Remove --optimizer.")
    optimizer = source.optimizer if options.optimizer else None
    if options.format == SAFETENSORS:
        said = write_json(about).decode()
        files, texts = _safetensors(source, options, said, name)
        if optimizer is not None:
            state = [
                _state_tensor(source, key, of, dtype)
                for of, each in optimizer.state.items()
                for key, dtype in each.sharded.items()
            ]
            metadata = {"consolidated": said}
            files.append(SafetensorsFile("optimizer.safetensors", state.copy, metadata))
            described = asdict(optimizer)
            single = {key: one["single"] for key, one in described.pop("state").items()}
            texts[OPTIMIZER_JSON] = write_json({**described, "single": single}) + b"\n"
    else:
        model = _tree(source, options) if state_dict is None else state_dict
        content = {"model": model, "consolidated": about}
        files = [TorchFile(name or "model.pth", content, identity)]
        if optimizer is not None:
            state_dict = _torch_optimizer(source, optimizer)
            files.append(TorchFile("optimizer.pth", state_dict, identity))
    if name is None:
        listed = [file.name for file in files] + list(texts)
        texts[RECORD] = write_json({**about, "files": listed}) + b"\n"
    return WritePlan(files, texts, identity, is_folder=name is None)


def _safetensors(
    source: Source, options: Options, about: str, name: str | None
) -> tuple[list[ResultFile], dict[str, bytes]]:
    tied = {alias: first for alias, first in source.order if alias != first}
    metadata = {"format": "pt", "consolidated": about}
    if tied:
        metadata["tied"] = write_json(tied).decode()
    if source.extra_state:
        encoded = values.encode(dict(source.extra_state), f"{source.label}: extra state")
        metadata["extra_state"] = write_json(encoded).decode()
    tensors = list(_model_tensors(source, options))
    if any(tensor.name == "__metadata__" for tensor in tensors):
        raise UnsupportedValueError(
            f"{source.label}: a tensor called __metadata__ cannot be stored in a safetensors file: "
            "use --format pth"
        )
    shards = _shards(tensors, options.max_shard_size)
    files: list[ResultFile] = []
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        each = name or "model.safetensors"
        if len(shards) > 1:
            each = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(SafetensorsFile(each, shard.copy, metadata))
        where |= {tensor.name: each for tensor in shard}
    if len(shards) == 1:
        return files, {}
    total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index = {"metadata": {**total, "tied": tied} if tied else total, "weight_map": where}
    return files, {INDEX: write_json(index) + b"\n"}


def _tree(source: Source, options: Options) -> OrderedDict[str, Any]:
    """The state_dict, with a ``FileTensor`` for every tensor."""
    by_name = {tensor.name: tensor for tensor in _model_tensors(source, options)}
    extra_state = source.extra_state
    model: OrderedDict[str, Any] = OrderedDict()
    for alias, first in source.order:
        model[alias] = by_name[first] if first in by_name else extra_state[first]
    for key, value in extra_state.items():
        model.setdefault(key, value)
    return model


def _model_tensors(source: Source, options: Options) -> Iterator[FileTensor]:
    """Parameters and buffers, each once, in the order of the state_dict."""
    for name in dict.fromkeys(first for _, first in source.order):
        if name in source.parameters:
            tensor, read = source.parameters[name], partial(source.read, name)
            dtype = origin = DTYPES[tensor.dtype]
            if options.dtype is not None and origin.is_floating_point:
                dtype = DTYPES[options.dtype]
        elif name in source.buffers:
            tensor, read = source.buffers[name], partial(source.read_buffer, name)
            dtype, origin = DTYPES[tensor.restore or tensor.dtype], DTYPES[tensor.dtype]
        else:
            continue
        yield FileTensor(name, dtype, tensor.shape, read, origin)


def _shards(tensors: list[FileTensor], limit: int | None) -> list[list[FileTensor]]:
    """Splits the tensors into lists of at most ``limit`` bytes. A larger one is alone."""
    shards: list[list[FileTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if limit is not None and shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _state_tensor(source: Source, key: str, name: str, dtype: str) -> FileTensor:
    read = partial(source.read, name, state=key)
    return FileTensor(f"{key}/{name}", DTYPES[dtype], source.parameters[name].shape, read)


def _torch_optimizer(source: Source, optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for name, each in optimizer.state.items():
        state[name] = {}
        for key, encoded in each.single.items():
            where = f"{source.label}: state {key!r:.80} of {name!r:.120}"
            state[name][key] = values.decode(encoded["value"], where)
        for key, dtype in each.sharded.items():
            state[name][key] = _state_tensor(source, key, name, dtype)
    groups = []
    for group in optimizer.groups:
        options = {k: values.decode(v, source.label) for k, v in group.options.items()}
        groups.append({**options, "params": list(group.parameters)})
    return {"state": state, "param_groups": groups}


def make_reshard_plan(source: Source, world_size: int, tied: Mapping[str, str]) -> WritePlan:
    about = {"save_id": source.save_id, "reshard": world_size, "tied": dict(tied)}
    identity = digest(write_json(about))
    described = _make_manifest(source, world_size, identity)
    files = []
    for rank in range(world_size):
        ranges = _ranges(described, rank)
        begins = {name: begin for name, (begin, end) in ranges.items() if begin < end}
        metadata = {**described.identity(rank), "begins": write_json(begins).decode()}
        tensors = partial(_rank_tensors, source, described, rank)
        files.append(SafetensorsFile(file_name(rank, world_size), tensors, metadata))

    def make_texts(digests: list[str]) -> dict[str, bytes]:
        records = [
            FileRecord(file.name, file.size, chunk_bytes(file.size), found)
            for file, found in zip(files, digests, strict=True)
        ]
        return {manifest.NAME: manifest.dump_manifest(replace(described, files=tuple(records)))}

    listed = [*(file.name for file in files), manifest.NAME]
    texts = {RECORD: write_json({**about, "files": listed}) + b"\n"}
    return WritePlan(files, texts, identity, make_texts=make_texts)


def _make_manifest(source: Source, world_size: int, identity: str) -> Manifest:
    rules = {}
    for name, tensor in source.parameters.items():
        chunk = -(-tensor.numel // (world_size * _LANES)) * _LANES
        rules[name] = ShardingRule(0, 1, max(chunk, 1), 0)
    return replace(
        source.manifest, save_id=identity, world_size=world_size, files=(), sharding_rules=rules
    )


def _ranges(described: Manifest, rank: int) -> dict[str, tuple[int, int]]:
    assert described.sharding_rules is not None
    return {
        name: rule.range_of_rank(rank, described.parameters[name].numel)
        for name, rule in described.sharding_rules.items()
    }


def _rank_tensors(source: Source, described: Manifest, rank: int) -> Iterator[FileTensor]:
    state = described.optimizer.state if described.optimizer is not None else {}
    for name, (begin, end) in _ranges(described, rank).items():
        tensor = described.parameters[name]
        if begin == end:
            continue
        read: Callable[[int, int], torch.Tensor] = partial(source.read, name)
        yield _tensor_of_range(parameter_key(name), tensor.dtype, begin, end, read)
        for key, dtype in state[name].sharded.items() if name in state else ():
            read = partial(source.read, name, state=key)
            yield _tensor_of_range(state_key(key, name), dtype, begin, end, read)
    for name, tensor in described.buffers.items():
        read = partial(source.read_buffer, name, rank=rank)
        yield FileTensor(buffer_key(name), DTYPES[tensor.dtype], tensor.shape, read)


def _tensor_of_range(
    key: str, dtype: str, begin: int, end: int, read: Callable[[int, int], torch.Tensor]
) -> FileTensor:
    def read_part(low: int, high: int) -> torch.Tensor:
        return read(begin + low, begin + high)

    return FileTensor(key, DTYPES[dtype], (end - begin,), read_part)
