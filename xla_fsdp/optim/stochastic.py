"""bfloat16 parameters without a float32 copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..sharding.sharded_parameter import on_local_parts
from .base import require_range
from .in_float32 import InFloat32
from .parts import Parts

_LOW = 0xFFFF


class StochasticRounding(InFloat32):
    """Steps in float32 on parameters in bfloat16, and rounds them at random.

    The probability of rounding up is proportional to the distance from the lower bfloat16 value, so
    small steps add up. Gupta et al., 2015 (arXiv 1502.02551). ::

        model = FSDP(model.bfloat16())
        optimizer = StochasticRounding(model.parameters(), torch.optim.AdamW, seed=1, lr=3e-4)

    The random bits depend on ``seed``, the step, the parameter's number and the element's: N ranks
    round like one, and a resumed run like an uninterrupted one.

    Args:
        params: in bfloat16, or float32, which is not rounded.
        optimizer_class: the class of the optimizer that steps; its state is float32.
        seed: an int >= 0 and < 2**31.
        options: those of ``optimizer_class``.

    Raises:
        TypeError: ``optimizer_class`` does not make an optimizer, or a parameter is float16.
        ValueError: ``seed`` is out of range.
    """

    _own_key = "roundings"
    _copied = InFloat32._copied | {"_seed", "_numbers", "_counts"}

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        *,
        seed: int = 0,
        **options: Any,
    ):
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed must be an int, got {seed!r}")
        require_range("seed", seed, 0, 1 << 31)
        self._seed = seed
        self._counts: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._numbers: dict[torch.nn.Parameter, int] = {}
        super().__init__(params, optimizer_class, options, {"seed": seed})
        self._drop(*self._wide.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._inner is not None:
            self._drop(*(self._wide[p] for p in param_group["params"] if p in self._wide))

    def _widened(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter.dtype is torch.float16:
            raise TypeError(
                f"StochasticRounding supports bfloat16, but {Parts(parameter).name} is float16. "
                "Use MasterWeights, or bfloat16"
            )
        if parameter.dtype is torch.bfloat16:
            self._numbers[parameter] = len(self._numbers)
        return super()._widened(parameter)

    @staticmethod
    def _drop(*wide: torch.nn.Parameter) -> None:
        for one in wide:
            with on_local_parts():
                one.data = one.detach().new_zeros(0)

    def _begin(
        self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter, own: torch.Tensor | None
    ) -> None:
        wide.data = parameter.float()
        if own is None:
            own = torch.zeros((), dtype=torch.int32, device=parameter.device)
        self._counts[parameter] = own.to(torch.int32) + 1

    def _finish(self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter) -> torch.Tensor:
        count = self._counts.pop(parameter)
        number = _signed(self._seed * 0x9E3779B9 + self._numbers[parameter])
        number = int(_mixed(torch.tensor(number, dtype=torch.int32, device="cpu")))
        key = _mixed(count + number)
        bits = random_bits(elements_of(parameter), key)
        parameter.copy_(rounded(wide.detach(), bits))
        self._drop(wide)
        return count


def elements_of(parameter: torch.Tensor) -> torch.Tensor:
    """The number of each element in the full tensor: int32, in the parameter's shape."""
    part = Parts(parameter)
    at = part.positions(parameter).to(torch.int32)
    if part.depth > 1:
        blocks = torch.arange(part.depth, dtype=torch.int32, device=parameter.device)
        at = at[None] + blocks[:, None] * 0x632BE5A7  # different bits in every block; wraps
    return at.reshape(parameter.shape)


def random_bits(elements: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """32 random bits for each number in ``elements``, int32; ``key``: one int32.

    Wellons, "Hash Function Prospector", 2018 (lowbias32), twice.
    """
    return _mixed(_mixed(elements + key) ^ (key * 0x27D4EB2F))


def rounded(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float32 ``value`` as bfloat16: one of its two neighbors, the nearer one more likely.

    ``bits``: int32, of which the lowest 16 decide exactly. Infinity, NaN and values within a factor
    of 2**18 of overflow are rounded to the nearest.
    """
    nearest = _nearest(value)
    rest = value - nearest
    outwards = (rest > 0) == (nearest > 0)
    # From 0.6 to 1.3 times the distance to the neighbor, at any place between two powers of two.
    step = nearest * (1.25 * 2.0**-8)
    other = _nearest(torch.where(outwards, nearest + step, nearest - step))
    share = (bits & _LOW).to(torch.float32) * 2.0**-16
    found = torch.where(share * (other - nearest).abs() < rest.abs(), other, nearest)
    return torch.where(value.abs() < 2.0**110, found, value).to(torch.bfloat16)


def _nearest(value: torch.Tensor) -> torch.Tensor:
    """float32 rounded to bfloat16's 8 digits: Veltkamp's splitting. Compilers may remove casts."""
    scaled = value * (2.0**16 + 1)
    return scaled - (scaled - value)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 16)) * 0x7FEB352D
    x = (x ^ _shifted(x, 15)) * _signed(0x846CA68B)
    return x ^ _shifted(x, 16)


def _shifted(x: torch.Tensor, places: int) -> torch.Tensor:
    """Logical right shift of int32. torch_xla makes ``>>`` a division, and a number an int64."""
    low = (1 << (32 - places)) - 1
    return torch.bitwise_right_shift(x, torch.full_like(x, places)) & low


def _signed(x: int) -> int:
    """The int32 with the lowest 32 bits of ``x``."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)
