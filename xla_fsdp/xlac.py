"""All private names of torch_xla that this package uses: ``python -m xla_fsdp.xlac`` checks them.

A declaration becomes torch_xla's function itself: a Python wrapper would add 0.1 microseconds to
every operator. ``@_replaceable`` is looked up at each call, because launches and plans replace it
temporarily. Devices are names, such as ``"xla:0"``.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import functools
import inspect
import mmap
import platform
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
import torch_xla

Tensors = list[torch.Tensor]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

# Path below torch_xla -> purpose, printed by the self-test.
_USES: dict[str, str] = {}


def _find(path: str) -> Any:
    return functools.reduce(getattr, filter(None, path.split(".")), torch_xla)


def _exists(path: str) -> bool:
    try:
        _find(path)
    except AttributeError:
        return False
    return True


def _declare(path: str, use: str | None) -> None:
    assert use is not None
    _USES[path] = inspect.cleandoc(use).partition("\n\n")[0].replace("\n", " ")


def _bound(path: str) -> Callable[[_T], _T]:
    def bind(declared: _T) -> _T:
        _declare(path, declared.__doc__)
        if isinstance(declared, type):
            for name, member in vars(declared).items():
                if isinstance(member, types.FunctionType) and name != "__init__":
                    _declare(f"{path}.{name}", member.__doc__)
        return _find(path) if _exists(path) else declared

    return bind


class PrivateAttribute:
    """An attribute of a torch_xla module, set temporarily by launches and plans."""

    def __init__(self, path: str, use: str) -> None:
        _declare(path, use)
        owner, _, self.name = path.rpartition(".")
        self.owner = _find(owner) if _exists(owner) else None

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.name)

    @value.setter
    def value(self, value: Any) -> None:
        setattr(self.owner, self.name, value)


class Replaceable(PrivateAttribute, Generic[_P, _R]):
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self.value(*args, **kwargs)


def _replaceable(path: str) -> Callable[[Callable[_P, _R]], Replaceable[_P, _R]]:
    return lambda declared: Replaceable(path, declared.__doc__ or "")


@_bound("_XLAC._xla_all_gather")
def all_gather(
    shard: torch.Tensor,
    dim: int,
    size: int,
    groups: list[list[int]],
    pin_layout: bool,
    channel: int | None,
    use_global_ids: bool | None,
    /,
) -> torch.Tensor:
    """Concatenates the shards of a group's ``size`` ranks: ``(d, ...)`` to ``(size*d, ...)``."""


@_bound("_XLAC._xla_reduce_scatter")
def reduce_scatter(
    kind: str,
    full: torch.Tensor,
    token: object,
    scale: float,
    dim: int,
    size: int,
    groups: list[list[int]],
    pin_layout: bool,
    channel: int | None,
    use_global_ids: bool | None,
    /,
) -> tuple[torch.Tensor, object]:
    """Reduces over groups: ``(size*d, ...)`` to this rank's ``(d, ...)``, and the next token."""


@_bound("_XLAC._get_all_reduce_token")
def collective_token(device: str, /) -> object:
    """The token that orders the next collective on a device."""


@_bound("_XLAC._set_all_reduce_token")
def set_collective_token(device: str, token: object, /) -> None:
    """Sets that token; ``None``: the next collective is not ordered."""


@_bound("_XLAC._xla_optimization_barrier_")
def optimization_barrier_(tensors: Tensors, /) -> None:
    """Replaces tensors, in place, by copies that exist only after all ``tensors`` do."""


@_bound("_XLAC._xla_user_computation")
def call_computation(name: str, operands: Tensors, computation: object, /) -> Tensors:
    """Calls an XLA computation as one operator, without gradient."""


@_bound("_XLAC._xla_custom_call")
def custom_call(
    operands: Tensors,
    target: str,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    has_side_effect: bool,
    backend_config: str,
    api_version: int,
    frontend_attributes: Mapping[str, str],
    /,
) -> Tensors:
    """Calls a function of the compiler or runtime by name."""


@_bound("_XLAC._xla_dot_general")
def dot_general(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    dimension_numbers: tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]],
    precision: str | None = None,
) -> torch.Tensor:
    """The matmul over any dimensions: ((contracted of lhs, of rhs), (batch of lhs, of rhs))."""


@_bound("_XLAC._replace_xla_tensor")
def replace_data(tensor: torch.Tensor, value: torch.Tensor, /) -> torch.Tensor:
    """Gives a tensor the data and shape of another, without a trace."""


@_bound("_XLAC._xla_get_tensor_id")
def tensor_id(tensor: torch.Tensor, /) -> int:
    """The id of a tensor's value, which changes after each computation."""


@_bound("_XLAC._get_xla_tensor_debug_info")
def debug_info(tensor: torch.Tensor, /) -> str:
    """Lines "name: value": TensorID, AliasID, and IR, the pending computation, or None."""


@_bound("_XLAC._check_tensor_need_materialization")
def are_pending(tensors: Tensors, /) -> list[bool]:
    """Whether each value is traced but not computed."""


@_bound("_XLAC._get_xla_tensors_text")
def graph_text(tensors: Tensors, /) -> str:
    """The pending graph of tensors, one operator a line."""


@_bound("_XLAC._get_tensors_handle")
def buffer_handles(tensors: Tensors, /) -> list[int]:
    """Ids of the device buffers of those tensors that have one."""


@_bound("_XLAC._get_tensors_xla_device_data_node")
def device_data_of(tensors: Tensors, /) -> tuple[list[int], Tensors]:
    """Ids and tensors of the device data that the pending graph reads."""


@_bound("_XLAC._get_seed_info_id")
def seed_id() -> int:
    """The id, in :func:`device_data_of`, of the seed of random operators."""


@_bound("_XLAC._get_base_seed_as_tensor")
def forget_draws(device: str, /) -> torch.Tensor:
    """Resets a device's random state to the seed of the step, which it returns."""


@_bound("_XLAC._clear_pending_irs")
def forget_pending(device: str, /) -> None:
    """Makes all pending tensors placeholders without a value."""


@_bound("_XLAC._xla_op_tensor_shape")
def shape_on_device(tensor: torch.Tensor, device: str, /) -> object:
    """The shape, with the device's type for the tensor's dtype."""


@_bound("_XLAC._xla_create_placeholder_tensor")
def placeholder(shape: object, /) -> torch.Tensor:
    """A tensor of such a shape without a value, for tracing."""


@_bound("_XLAC.lowering.LoweringContext")
class LoweringContext:
    """Lowers pending tensors to an HloModuleProto."""

    def __init__(self, name: str) -> None:
        """Names the module."""

    def build(self, outputs: Tensors) -> None:
        """Lowers the computation of the outputs."""

    def hlo(self) -> bytes:
        """The module, serialized."""

    def tensor_parameter_id(self, tensor: torch.Tensor) -> int:
        """The parameter number of a tensor, or -1."""

    def device_parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """Parameter numbers to the tensors with that device data."""


@_replaceable("_XLAC._xla_step_marker")
def sync_device(
    device: str = "", devices: Sequence[str] = (), wait: bool = True, reset_scope: bool = True
) -> None:
    """Compiles and starts all that is live on a device: ``torch_xla.sync()``."""


@_bound("_XLAC._xla_sync_live_tensors")
def sync_live_tensors(device: str, devices: Sequence[str], wait: bool) -> None:
    """:func:`sync_device` without the end of a step: tokens and random state stay."""


@_replaceable("_XLAC._xla_sync_multi")
def sync_tensors(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[str],
    wait: bool = True,
    sync_xla_data: bool = True,
) -> None:
    """Compiles and starts the pending graph of some tensors."""


@_replaceable("experimental.scan.value_and_grad_partitioned")
def capture_scan(*arguments: Any, **keywords: Any) -> Any:
    """Captures the graphs of the function of ``scan``, by AOTAutograd."""


_GRU_LOOP = PrivateAttribute("experimental.gru.scan", "The loop over time of ``nn.GRU``.")
_GRU_STEP = PrivateAttribute("experimental.gru._gru_step_fn", "One step of ``nn.GRU``.")


@functools.cache
def _gru_step(
    needs_gradient: bool, device: torch.device, cast: torch.dtype | None
) -> Callable[..., Any]:
    def step(carry: Any, x: torch.Tensor) -> Any:
        return _GRU_STEP.value(carry, x)

    return step


def _correct_gradients_of_gru() -> None:
    """Traces loops whose input needs a gradient apart from others, and each device's, autocast's.

    torch_xla caches a traced loop by its function and shapes. If the first input needs no gradient,
    later ones get none either: the next layer's, or an embedding's after an evaluation. Casts of
    autocast are traced with their device, and crash with tensors of another rank.
    """
    loop = _GRU_LOOP.value

    def run_loop(fn: Any, init: Any, xs: torch.Tensor, **options: Any) -> Any:
        assert fn is _GRU_STEP.value
        casts = torch.is_autocast_enabled("xla")
        cast = torch.get_autocast_dtype("xla") if casts else None
        return loop(_gru_step(xs.requires_grad, xs.device, cast), init, xs, **options)

    _GRU_LOOP.value = run_loop


@_replaceable("core.xla_model._fetch_gradients")
def gradients_to_average(optimizer: torch.optim.Optimizer) -> Tensors:
    """The gradients that ``xm.reduce_gradients`` and Accelerate average."""


@_replaceable("_XLAC._xla_get_cpu_tensors")
def copy_to_host(tensors: Sequence[torch.Tensor], /) -> Tensors:
    """CPU copies of tensors; runs their pending computations, and waits."""


@_bound("_XLAC._get_use_eager_mode")
def is_eager() -> bool:
    """Whether every operator runs immediately."""


@_bound("_XLAC._xla_runtime_is_initialized")
def runtime_has_started() -> bool:
    """Whether this process has started the XLA runtime, which owns the devices."""


@_bound("_XLAC._xla_computation_cache_is_initialized")
def compilation_cache_exists() -> bool:
    """Whether torch_xla has created its cache, and read the folder's name."""


@_bound("_XLAC._xla_get_default_device")
def default_device() -> str:
    """The device on which this thread traces."""


@_bound("_XLAC._xla_set_default_device")
def set_default_device(device: str, /) -> str:
    """Changes it; returns the previous one."""


@_bound("_XLAC._xla_set_replication_devices")
def set_replication_devices(devices: Sequence[str], /) -> None:
    """Devices ("CPU:0", ...) whose ranks run one program together; empty: each runs alone."""


def start_program(device: torch.device) -> None:
    """``torch_xla.sync()`` for ``device``: autograd's threads have another default device."""
    sync_device(str(device), [], wait=False)


def start_tensors(tensors: Sequence[torch.Tensor]) -> None:
    sync_tensors(tensors, [], wait=False)


@_bound("_XLAC._get_ir_debug")
def has_scopes() -> bool:
    """Whether traced operators get the names of :func:`scope`."""


@_bound("_XLAC._set_ir_debug")
def set_has_scopes(enabled: bool, /) -> None:
    """Turns these names on or off."""


@_bound("_XLAC.profiler.scope_pusher")
def scope(name: str, /) -> object:
    """Names what this thread traces until the result is dropped."""


@_bound("_XLAC.profiler.TraceMe")
class TraceEvent:
    """A host event in a recorded profile."""

    def __init__(self, name: str, **fields: int) -> None:
        """Fields: ``step_num``, ``_r=1`` (the root of a step)."""

    def __enter__(self) -> object:
        """Begins the event."""

    def __exit__(self, *exception: object) -> None:
        """Ends it."""


WORLD_SIZE = PrivateAttribute(
    "runtime._WORLD_SIZE", "The cached xr.world_size() of the process, or None."
)
ORDINAL = PrivateAttribute(
    "runtime._ORDINAL", "The cached xr.global_ordinal() of the process, or None."
)
_STEP_CLOSURES = PrivateAttribute(
    "core.xla_model._DEVICE_CONTEXTS", "Functions to call after the next sync, by device."
)
_EXIT_HANDLER = PrivateAttribute(
    "_prepare_to_exit", "Waits for programs at the end of the process."
)


def drop_step_closures(device: str) -> None:
    _STEP_CLOSURES.value.pop(device, None)


def skip_exit_handler() -> None:
    atexit.unregister(_EXIT_HANDLER.value)


@_bound("core.xla_model._maybe_convert_to_cpu")
def tree_to_host(data: Any) -> Any:
    """``data``, with the XLA tensors in its lists, dicts and objects as CPU tensors."""


@_replaceable("_internal.tpu.num_available_chips")
def chips_of_host() -> int:
    """The number of TPU chips of this host; does not start the runtime."""


@_replaceable("_internal.tpu.num_available_devices")
def host_device_count() -> int:
    """The number of TPU devices of this host that a process of this kind can use."""


@_replaceable("_internal.tpu.num_expected_global_devices")
def slice_device_count() -> int:
    """The number of TPU devices of the slice; does not start the runtime."""


@_replaceable("_internal.tpu.get_worker_ips")
def addresses_of_hosts() -> list[str]:
    """Network addresses of the hosts of the slice, by number."""


@_replaceable("_internal.tpu.worker_id")
def number_of_host() -> int:
    """The number of this host in the slice."""


@_replaceable("_internal.tpu.get_tpu_env")
def host_metadata() -> Mapping[str, Any]:
    """Variables of this host's metadata server; raises if there is none."""


@_replaceable("_internal.tpu.configure_topology")
def configure_process(local_rank: int, *args: Any, **kwargs: Any) -> Any:
    """Assigns chips and ports to a process of a host."""


_SETUP = PrivateAttribute(
    "_setup_default_env", "Sets the environment at the import, on a TPU host."
)
_SETUP_CALLS = (
    PrivateAttribute("_set_missing_flags", "Adds flags that are not set yet."),
    PrivateAttribute("_setup_libtpu_flags", "Adds torch_xla's flags to LIBTPU_INIT_ARGS."),
    _SETUP,
)


def environment_after_import(environ: Mapping[str, str], generation: int) -> dict[str, str]:
    """``environ`` after ``import torch_xla`` on a host with TPU chips, v2 being 2.

    Runs torch_xla's functions on a copy of the environment.
    """
    changed = dict(environ)
    names = {
        **vars(torch_xla),
        "os": types.SimpleNamespace(environ=changed),
        "tpu": types.SimpleNamespace(version=lambda: generation, num_available_chips=lambda: 1),
    }
    for place in _SETUP_CALLS:
        function = place.value
        names[place.name] = types.FunctionType(
            function.__code__, names, place.name, function.__defaults__
        )
    names[_SETUP.name]()
    return changed


@_replaceable("_internal.jax_workarounds.jax_import_guard")
def _take_devices_before_jax() -> None:
    """Starts torch_xla's runtime: if JAX started first, it would lock the TPU."""


@_replaceable("_internal.jax_workarounds.jax_env_context")
def _jax_alone() -> contextlib.AbstractContextManager[None]:
    """Within, JAX does not try to join several slices, which would hang."""


@contextlib.contextmanager
def jax_may_start() -> Iterator[None]:
    """Within, JAX can export functions without torch_xla's devices."""
    _take_devices_before_jax()
    with _jax_alone():
        yield


# Symbols that the library does not export. A mangled name contains a function's argument types.

GET_FFI_API = "_ZN3xla3ffi12GetXlaFfiApiEv"
_SERIALIZED = "ESt17basic_string_viewIcSt11char_traitsIcEESt8optionalINS_14CompileOptionsEE"
DESERIALIZE = "_ZN3xla10PjRtClient21DeserializeExecutable" + _SERIALIZED
LOAD = (
    "_ZN3xla10PjRtClient4LoadESt10unique_ptrINS_14PjRtExecutableE"
    "St14default_deleteIS2_EERKNS_11LoadOptionsE"
)


class ClientSymbols(NamedTuple):
    """Symbols of an XLA client class; ``table``: its virtual functions."""

    name: str
    table: str
    load_serialized: str


def _client(name: str) -> ClientSymbols:
    mangled = f"{len(name)}{name}"
    load = f"_ZN3xla{mangled}24LoadSerializedExecutable{_SERIALIZED}RKNS_11LoadOptionsE"
    return ClientSymbols(name, f"_ZTVN3xla{mangled}E", load)


CLIENTS = {"CPU": _client("PjRtCpuClient"), "TPU": _client("PjRtCApiClient")}

SYMBOLS: Mapping[str, str] = {
    GET_FFI_API: "Lets programs of CPU ranks wait for each other before they start.",
    DESERIALIZE: "Reports that a compiled program cannot be loaded; replaced.",
    LOAD: "The second step of loading; replaced.",
    **{one.table: f"Contains both functions, for {on} programs." for on, one in CLIENTS.items()},
    **{one.load_serialized: f"Loads compiled {on} programs." for on, one in CLIENTS.items()},
}

# Its address gives the addresses of the others.
_EXPORTED = "PyInit__XLAC"
_SYMBOL_TABLE = 2  # sh_type of the section with the symbols
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2")]
    + [("value", "<u8"), ("size", "<u8")]
)


class Symbol(NamedTuple):
    address: int
    size: int


def symbols_of(names: Iterable[str]) -> dict[str, Symbol]:
    """Raises NotImplementedError for another platform, or if the library lacks a symbol."""
    machine = f"{sys.platform} {platform.machine()}"
    if machine != "linux x86_64":
        raise NotImplementedError(f"this is {machine}, but only linux x86_64 is supported")
    path: str = _find("_XLAC").__file__
    offsets = _offsets(path, [*names, _EXPORTED])
    exported = getattr(ctypes.CDLL(path), _EXPORTED)
    start = ctypes.cast(exported, ctypes.c_void_p).value
    assert start is not None
    base = start - offsets.pop(_EXPORTED)[0]
    return {name: Symbol(base + offset, size) for name, (offset, size) in offsets.items()}


def _offsets(path: str, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Offset and size of each symbol, from the symbol table of a 64-bit ELF file."""
    found = {}
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = struct.unpack_from("<Q", data, 0x28)[0]
        size, count = struct.unpack_from("<HH", data, 0x3A)
        # name, type, flags, address, offset, size, link, ...
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", data, start + place * size) for place in range(count)
        ]
        table = next((one for one in sections if one[1] == _SYMBOL_TABLE), None)
        if table is None:
            raise NotImplementedError(f"{path} was stripped of its symbols")
        strings = sections[table[6]]
        first, last = strings[4], strings[4] + strings[5]
        symbols = np.frombuffer(data[table[4] : table[4] + table[5]], _SYMBOL)
        for name in names:
            place = data.find(b"\0" + name.encode() + b"\0", first, last) + 1
            rows = symbols[symbols["name"] == place - first] if place else symbols[:0]
            if len(rows) != 1:
                raise NotImplementedError(f"{path} has {len(rows)} symbols {name}, expected one")
            found[name] = (int(rows["value"][0]), int(rows["size"][0]))
    return found


def missing() -> dict[str, str]:
    lacking = {f"torch_xla.{path}": use for path, use in _USES.items() if not _exists(path)}
    for name, use in SYMBOLS.items():
        try:
            symbols_of([name])
        except NotImplementedError as error:
            lacking[name] = f"{use} ({error})"
    return lacking


def _report() -> int:
    lacking = missing()
    count = len(_USES) + len(SYMBOLS)
    print(f"torch_xla {version('torch_xla')} has {count - len(lacking)} of {count} private names")
    for name, use in lacking.items():
        print(f"missing: {name}: {use}")
    return 1 if lacking else 0


def _require_names() -> None:
    """Raises ImportError if a name is missing. Symbols are looked up later, at their use."""
    if lacking := [f"torch_xla.{path}" for path in _USES if not _exists(path)]:
        raise ImportError(
            f"torch_xla {version('torch_xla')} lacks {', '.join(lacking)}, which xla_fsdp needs. "
            "Install torch_xla 2.9; python -m xla_fsdp.xlac lists what each name is for"
        )


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m xla_fsdp.xlac",
        description="Lists the private names of torch_xla that the installed release lacks.",
    ).parse_args()
    sys.exit(_report())
_require_names()
_correct_gradients_of_gru()
