"""Assigns the tensors of a source to the files of the result, without reading values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import InvalidMetadataError, OptionsError, UnsupportedValueError
from ..format import values
from ..format.digests import digest
from ..format.dtypes import DTYPES
from ..format.manifest import FORMAT, VERSION, Optimizer, dump_groups
from ..format.strict import write_json
from ..source import Source
from .options import SAFETENSORS, Options
from .result_file import SafetensorsFile, TorchFile
from .tensors import ResultTensor, all_of

RECORD = "consolidated.json"
INDEX = "model.safetensors.index.json"
OPTIMIZER_JSON = "optimizer.json"


@dataclass(frozen=True)
class WritePlan:
    """The files of a result.

    Attributes:
        files: files with tensors. If there is one, and ``texts`` is empty, the result is that file;
            otherwise the result is a folder.
        texts: content of small files, by name.
        identity: 16 hexadecimal digits, equal only for the same save with the same options.
    """

    files: tuple[SafetensorsFile | TorchFile, ...]
    texts: dict[str, bytes]
    identity: str

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def make_write_plan(
    source: Source,
    options: Options,
    name: str | None,
    state_dict: Mapping[str, Any] | None = None,
) -> WritePlan:
    """Plans the files of the result.

    Args:
        name: name of the file if the result is one file, None for a folder.
        state_dict: the full model for a torch file, if it is in memory.

    Raises:
        OptionsError: the options request an optimizer, but the source has none.
        UnsupportedValueError: a tensor or value cannot be stored in a safetensors file.
    """
    about = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": source.origin.save_id,
        "step": source.origin.step,
        "world_size": source.origin.world_size,
        "options": options.described(),
    }
    identity = digest(write_json(about))
    files: Sequence[SafetensorsFile | TorchFile]
    texts: dict[str, bytes] = {}
    if options.format == SAFETENSORS:
        files, texts = _safetensors(source, options, about, name)
    else:
        model = _tree(source, options) if state_dict is None else state_dict
        content = {"model": model, "consolidated": about}
        files = [TorchFile(name or "model.pth", content, identity)]
        if options.optimizer:
            state = _torch_optimizer(source, _optimizer(source))
            files = [*files, TorchFile("optimizer.pth", state, identity)]
    if name is None:
        listed = [file.name for file in files] + list(texts)
        texts[RECORD] = write_json({**about, "files": listed}) + b"\n"
    return WritePlan(tuple(files), texts, identity)


def _safetensors(
    source: Source, options: Options, about: Mapping[str, Any], name: str | None
) -> tuple[list[SafetensorsFile], dict[str, bytes]]:
    tied = {alias: first for alias, first in source.order if alias != first}
    metadata = {"format": "pt", "consolidated": write_json(about).decode()}
    if tied:
        metadata["tied"] = write_json(tied).decode()
    if source.extra_state:
        encoded = values.encode(dict(source.extra_state), f"{source.label}: extra state")
        metadata["extra_state"] = write_json(encoded).decode()
    tensors = list(_model(source, options))
    if any(tensor.name == "__metadata__" for tensor in tensors):
        raise UnsupportedValueError(
            f"{source.label}: a tensor called __metadata__ cannot be stored in a safetensors file: "
            "use --format pth"
        )
    shards = _shards(tensors, options.max_shard_size)
    names = [
        "model.safetensors"
        if len(shards) == 1
        else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        for n in range(1, len(shards) + 1)
    ]
    if name is not None:
        names = [name]
    files = [
        SafetensorsFile(name, tuple(shard), metadata)
        for name, shard in zip(names, shards, strict=True)
    ]
    texts = {}
    if len(shards) > 1:
        where = {tensor.name: file.name for file in files for tensor in file.tensors}
        total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
        index = {"metadata": {**total, "tied": tied} if tied else total, "weight_map": where}
        texts[INDEX] = write_json(index) + b"\n"
    if options.optimizer:
        optimizer = _optimizer(source)
        state = [
            _state(source, key, of, dtype)
            for of, each in optimizer.state.items()
            for key, dtype in each.sharded.items()
        ]
        about_it = {"consolidated": metadata["consolidated"]}
        files.append(SafetensorsFile("optimizer.safetensors", tuple(state), about_it))
        texts[OPTIMIZER_JSON] = _optimizer_json(optimizer)
    return files, texts


def _tree(source: Source, options: Options) -> OrderedDict[str, Any]:
    """The state_dict, with a ``ResultTensor`` for every tensor."""
    by_name = {tensor.name: tensor for tensor in _model(source, options)}
    extra_state = source.extra_state
    model: OrderedDict[str, Any] = OrderedDict()
    for alias, first in source.order:
        model[alias] = by_name[first] if first in by_name else extra_state[first]
    for key, value in extra_state.items():
        model.setdefault(key, value)
    return model


def _model(source: Source, options: Options) -> Iterator[ResultTensor]:
    """Parameters and buffers, each once, in the order of the state_dict."""
    for name in dict.fromkeys(first for _, first in source.order):
        if name in source.parameters:
            tensor = source.parameters[name]
            dtype = origin = DTYPES[tensor.dtype]
            if options.dtype is not None and origin.is_floating_point:
                dtype = DTYPES[options.dtype]
            yield ResultTensor(
                name, dtype, tensor.shape, partial(source.read_parameter, name), origin
            )
        elif name in source.buffers:
            tensor = source.buffers[name]
            dtype = DTYPES[tensor.restore or tensor.dtype]
            yield all_of(name, dtype, tensor.shape, partial(source.read_buffer, name))


def _shards(tensors: list[ResultTensor], limit: int | None) -> list[list[ResultTensor]]:
    """Splits the tensors, in order, into lists of at most ``limit`` bytes. A larger tensor gets a
    separate list."""
    shards: list[list[ResultTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if limit is not None and shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _optimizer(source: Source) -> Optimizer:
    if source.optimizer is None:
        raise OptionsError(f"{source.label}: has no optimizer. Remove --optimizer.")
    return source.optimizer


def _state(source: Source, key: str, name: str, dtype: str) -> ResultTensor:
    read = partial(source.read_state, key, name)
    return ResultTensor(f"{key}/{name}", DTYPES[dtype], source.parameters[name].shape, read)


def _torch_optimizer(source: Source, optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for name, each in optimizer.state.items():
        state[name] = {}
        for key, encoded in each.single.items():
            where = f"{source.label}: state {key!r:.80} of {name!r:.120}"
            if not isinstance(encoded, dict) or "value" not in encoded:
                raise InvalidMetadataError(
                    f"{where}: is {encoded!r:.80}, expected an object with 'value'"
                )
            state[name][key] = values.decode(encoded["value"], where)
        for key, dtype in each.sharded.items():
            state[name][key] = _state(source, key, name, dtype)
    groups = []
    for group in optimizer.groups:
        options = {k: values.decode(v, source.label) for k, v in group.options.items()}
        groups.append({**options, "params": list(group.parameters)})
    return {"state": state, "param_groups": groups}


def _optimizer_json(optimizer: Optimizer) -> bytes:
    """The groups and single values of the optimizer, encoded as in the manifest."""
    single = {name: dict(each.single) for name, each in optimizer.state.items()}
    return write_json({**dump_groups(optimizer), "single": single}) + b"\n"
