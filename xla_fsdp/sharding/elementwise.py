"""Optimizers whose steps are not made of the single elements: on shards they compute another thing.

Those of torch are known by their names. Of others the code says what it asks of tensors.
"""

from __future__ import annotations

import dis
import types
import warnings
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import Optimizer

from .sharded_tensor import homes_of

# Optimizers that compute with whole matrices or norms, by the names of their classes.
_NOT_ELEMENTWISE = frozenset(
    ["LBFGS", "Adafactor", "Muon", "LAMB", "Lamb", "LARS", "Lars", "Shampoo", "SOAP"]
)
# What is asked of a tensor by who computes with more than its single elements.
_OF_THE_WHOLE = frozenset(
    """norm vector_norm matrix_norm _foreach_norm sum mean var std median quantile prod amax amin
    argmax argmin topk sort cumsum logsumexp softmax mm bmm matmul addmm addmm_ einsum dot vdot
    outer svd qr eig eigh cholesky inverse pinv dim ndim""".split()
)


def check_elementwise(optimizer: Optimizer) -> None:
    """Warns if the step is not made of the single elements, and knows nothing of shards.

    Raises RuntimeError for LBFGS, where ranks would not even take the same way, and for what
    divides parameters over the ranks once more.
    """
    if getattr(optimizer, "knows_shards", False):  # xla_fsdp.optim, which lies above
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    home = next((home for home in homes_of(parameters) if home.divided), None)
    if home is None:
        return
    known = [c.__name__ for c in type(optimizer).__mro__ if c.__name__ in _NOT_ELEMENTWISE]
    if "LBFGS" in known:
        raise RuntimeError(
            "LBFGS decides by norms, here those of one rank's shards (such as that of "
            f"{home.key!r}), how often it calls the closure: ranks would wait for one "
            "another forever. Wrap with sharding_strategy=ShardingStrategy.NO_SHARD, "
            "where every rank has whole parameters, or take another optimizer"
        )
    if any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__):
        raise RuntimeError(
            "ZeroRedundancyOptimizer divides parameters, gradients and state over the ranks, and "
            f"here they are already, such as those of {home.key!r}: it would add up shards of "
            "different parameters. Make the optimizer that it was given, of model.parameters()"
        )
    remedy = "xla_fsdp.optim has optimizers that ask all ranks: see docs/optimizers.md"
    if known:
        warnings.warn(
            f"{known[0]} computes with whole matrices or norms; on shards, such as that of "
            f"{home.key!r}, it computes another thing. {remedy}",
            stacklevel=2,
        )
    elif asked := sorted(set(_asked_for(type(optimizer)))):
        warnings.warn(
            f"the code of {type(optimizer).__name__} asks tensors for {', '.join(asked)}, so it "
            "seems not to compute with their single elements; on shards, which have one dimension "
            f"and a part of the elements, such as that of {home.key!r}, it would compute another "
            f"thing. Wrap with sharding_strategy=ShardingStrategy.NO_SHARD if it does; {remedy}",
            stacklevel=2,
        )


def _asked_for(kind: type) -> Iterator[str]:
    """What of ``_OF_THE_WHOLE`` the methods of ``kind``, and functions beside it that they call,
    ask of anything. Not those of torch's own classes."""
    seen: set[types.CodeType] = set()
    for one in kind.__mro__:
        if one is not object and not one.__module__.startswith("torch.optim"):
            for method in vars(one).values():
                yield from _asked_by(method, one.__module__, seen)


def _asked_by(value: Any, module: str, seen: set[types.CodeType]) -> Iterator[str]:
    function = getattr(value, "__func__", value)
    while hasattr(function, "__wrapped__"):  # torch.no_grad and the like
        function = function.__wrapped__
    if isinstance(function, types.FunctionType) and function.__module__ == module:
        yield from _asked_in(function.__code__, function.__globals__, module, seen)


def _asked_in(
    code: types.CodeType, names: dict[str, Any], module: str, seen: set[types.CodeType]
) -> Iterator[str]:
    if code in seen:
        return
    seen.add(code)
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name in _OF_THE_WHOLE:
            yield name
        elif instruction.opname == "LOAD_GLOBAL":
            yield from _asked_by(names.get(name), module, seen)
        elif isinstance(name, types.CodeType):
            yield from _asked_in(name, names, module, seen)
