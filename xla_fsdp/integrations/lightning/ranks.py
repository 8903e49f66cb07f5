"""The ranks for Lightning: its environment, its accelerator, and ``rank_zero_only``."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import Accelerator

from ... import xlac
from ...ranks.rank import current_rank

# The default number of CPU ranks of ``launch``.
_CPU_RANKS = 4


def in_rank() -> bool:
    """Whether this thread or process is one of the ranks.

    It does not use the runtime, which must not start in a process that will start ranks.
    """
    if current_rank() is not None or xenv.PJRT_LOCAL_PROCESS_RANK in os.environ:
        return True
    return dist.is_torchelastic_launched() and dist.is_initialized()


def on_cpu() -> bool:
    """Whether ranks are (or would be) threads of one process."""
    return os.environ.get("PJRT_DEVICE", "").startswith("CPU") or not xlac.chips_of_host()


def ranks_of_this_host() -> int:
    """The number of ranks of this host, running or to be started."""
    context = current_rank()
    if context is not None:
        return context.size
    if in_rank():
        return xr.local_device_count()
    if on_cpu():
        return int(os.environ.get("CPU_NUM_DEVICES", _CPU_RANKS))
    return xlac.devices_of_host()


class RanksEnvironment(ClusterEnvironment):
    """The ranks of this package's or torch_xla's launch; outside of a launch, rank 0."""

    @property
    def creates_processes_externally(self) -> bool:
        return False

    @property
    def main_address(self) -> str:
        raise NotImplementedError("XLA ranks have no main address")

    @property
    def main_port(self) -> int:
        raise NotImplementedError("XLA ranks have no main port")

    @staticmethod
    def detect() -> bool:
        return in_rank()

    def world_size(self) -> int:
        return xr.world_size() if in_rank() else 1

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return xr.global_ordinal() if in_rank() else 0

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return xr.local_ordinal() if in_rank() else 0

    def node_rank(self) -> int:
        return xr.host_index() if in_rank() and not on_cpu() else 0


class RanksAccelerator(Accelerator):
    """The XLA devices of the ranks, also before the ranks have started."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {} if on_cpu() else dict(xm.get_memory_info(device))

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """The number of devices of this host that ``devices`` selects.

        Raises:
            ValueError: this number of devices is not possible.
        """
        number = devices
        if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
            number = int(devices)
        found = ranks_of_this_host()
        if number in (-1, "auto"):
            return found
        if isinstance(number, (list, tuple)) and list(number) == list(range(found)):
            return found
        if isinstance(number, int) and not isinstance(number, bool):
            if number == found or (in_rank() and number == xr.world_size()):
                return found
            if not in_rank() and on_cpu() and 1 <= number <= 8:
                return number
        if in_rank():
            raise ValueError(
                f"devices={devices!r}, but {found} ranks are running already, and all must take "
                "part. Leave devices out, or start another number of ranks"
            )
        allowed = "1 to 8" if on_cpu() else f"{found}, all of this host"
        raise ValueError(f"devices must be 'auto' or {allowed}, got {devices!r}")

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("xla", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return ranks_of_this_host()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "xla_ranks"


def root_device() -> torch.device:
    """This rank's device.

    Raises:
        RuntimeError: this is outside of the ranks.
    """
    if not in_rank():
        raise RuntimeError(
            "there is no XLA device outside of the ranks, which Trainer.fit and Fabric.launch "
            "start. Use the device inside of the ranks"
        )
    return torch_xla.device()


class CurrentRankNumber:
    """The value of ``rank_zero_only.rank``: the number of the rank that reads it.

    In Lightning it is one number for a process, but here ranks may be threads. It behaves like an
    integer in comparisons, printing and arithmetic.
    """

    def __init__(self, outside: int) -> None:
        self.outside = outside

    def __index__(self) -> int:
        return xr.global_ordinal() if in_rank() else self.outside

    __int__ = __hash__ = __index__

    def __bool__(self) -> bool:
        return bool(int(self))

    def __str__(self) -> str:
        return str(int(self))

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _binary(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Any, Any], Any]:
    def call(self: Any, other: Any) -> Any:
        own, other = int(self), int(other) if isinstance(other, CurrentRankNumber) else other
        return function(other, own) if swapped else function(own, other)

    return call


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(CurrentRankNumber, f"__{_name}__", _binary(getattr(operator, _name), False))
for _name in ("add", "sub", "mul", "mod", "floordiv", "and_", "or_", "xor", "lshift", "rshift"):
    _plain = _name.rstrip("_")
    setattr(CurrentRankNumber, f"__{_plain}__", _binary(getattr(operator, _name), False))
    setattr(CurrentRankNumber, f"__r{_plain}__", _binary(getattr(operator, _name), True))


def patch_rank_zero_only() -> Callable[[], None]:
    """Makes ``rank_zero_only`` work with ranks; returns a function that undoes it."""
    before: Any = vars(rank_zero_only).get("rank", 0)
    vars(rank_zero_only)["rank"] = CurrentRankNumber(int(before or 0))

    def undo() -> None:
        vars(rank_zero_only)["rank"] = before

    return undo
