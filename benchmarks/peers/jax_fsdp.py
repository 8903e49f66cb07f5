"""Workload S in plain JAX, fully sharded with ``jit`` and ``NamedSharding`` as usual in JAX.

``python -m benchmarks.peers.jax_fsdp FOLDER``: see ``child.py``.

Every parameter (float32) and both moments of AdamW are sharded on their first dimension over the
one axis of the mesh, and so is the batch. A parameter is cast, then gathered, so bfloat16 is sent,
also for gradients, which are cotangents of the cast. Parameters and state are donated. Names are
those of the torch model; a ``weight`` of two dimensions is (in, out), as in JAX.

Queries, keys and values are projected separately, into (b, h, s, d), where both matmuls of
attention have their batch dimensions first. On v5e:2x4 this takes 37.2 million cycles; one matmul
for all three takes 39.2, and one matmul to (b, s, 3 w) with a transposed result takes 43.2.

``way`` of a request. ``kept``: gathered weights are kept for the backward, as ``jit`` does by
default. ``again`` (ZeRO-3): weights are gathered again, and nothing else is recomputed.
``rematerialised``: every block is recomputed, including its gathers. ``scanned``: the same with
``lax.scan`` over the stacked blocks.

Without the constraint that gathers, the compiler makes rings of permutes and matmuls instead: on
v5e:2x4 with libtpu 0.0.21, 271 MiB sent instead of 175, 54.9 million cycles instead of 43.1, and
1788 MiB of temporaries instead of 1341. Without the barrier it gathers before the cast on v3-128:
625 MB instead of 417. The barrier costs 0.3 % of the cycles on v5e:2x4.

Shapes: b batch, s sequence, w width, h heads, d = w / h.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .child import Request, write_answer
from .sizes import AGAIN, HEADS, KEPT, REMATERIALISED, SCANNED

Parameters = Mapping[str, jax.Array]  # by dotted name
Gather = Callable[[jax.Array], jax.Array]
AXIS = "fsdp"
# Primitives that gather an array, and that take parts of a full one. Their results are not saved
# for the backward. A name for the full array is not enough: the same value is saved without its
# name.
_GATHERING = ("optimization_barrier", "sharding_constraint", "slice", "reshape")
RATE, DECAY, BETA1, BETA2, EPSILON = 1e-3, 1e-2, 0.9, 0.999, 1e-8  # torch.optim.AdamW's own


def shapes(blocks: int, width: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter."""
    linears = {"first": (width, width), "last": (width, width)}
    norms = []
    for number in range(blocks):
        block = f"blocks.{number}"
        norms += [f"{block}.norm1", f"{block}.norm2"]
        for name, sides in (("qkv", (1, 3)), ("out", (1, 1)), ("up", (1, 4)), ("down", (4, 1))):
            linears[f"{block}.{name}"] = (sides[0] * width, sides[1] * width)
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in linears.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[1:]}
    for name in norms:
        found |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return found


def forward(parameters: Parameters, x, dtype, way: str, gather: Gather):
    """The network in ``dtype`` on x (b, s, w); parameters are cast and gathered at each use."""

    def gathered(own: Parameters) -> Parameters:
        return {name: gather(value.astype(dtype)) for name, value in own.items()}

    def linear(own: Parameters, x):
        own = gathered(own)
        return x @ own["weight"] + own["bias"]

    def block(own: Parameters, x):
        return _block(gathered(own), x)

    if way == AGAIN:
        linear, block = (jax.checkpoint(f, policy=_all_but_gathered) for f in (linear, block))
    elif way == REMATERIALISED:  # recompute the gathers as well
        block = jax.checkpoint(block)
    x = linear(_under(parameters, "first."), x.astype(dtype))
    if way == SCANNED:
        again = jax.checkpoint(block, prevent_cse=False)  # a loop's two bodies are not merged
        stacked = _under(parameters, "blocks.")
        x, _ = jax.lax.scan(lambda x, own: (again(own, x), None), x, stacked)
    number = 0
    while own := _under(parameters, f"blocks.{number}."):
        x = block(own, x)
        number += 1
    return linear(_under(parameters, "last."), x)


def _all_but_gathered(primitive, *_, **__) -> bool:
    return primitive.name not in _GATHERING


def _under(parameters: Parameters, prefix: str) -> dict[str, jax.Array]:
    found = {name: value for name, value in parameters.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): value for name, value in found.items()}


def _block(p: Parameters, x):
    (_, _, w), heads = x.shape, HEADS
    d = w // heads
    y = _norm(x, p, "norm1")

    def heads_of(n: int):  # (b, h, s, d) of queries, keys or values
        weight, bias = (p[f"qkv.{name}"][..., n * w : (n + 1) * w] for name in ("weight", "bias"))
        return jnp.einsum("bsw,whd->bhsd", y, weight.reshape(w, heads, d)) + bias.reshape(
            heads, 1, d
        )

    q, k, v = heads_of(0), heads_of(1), heads_of(2)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * d**-0.5
    mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
    out = jnp.einsum("bhsd,hdw->bsw", mixed, p["out.weight"].reshape(heads, d, w))
    x = x + out + p["out.bias"]
    up = jax.nn.gelu(_norm(x, p, "norm2") @ p["up.weight"] + p["up.bias"], approximate=False)
    return x + up @ p["down.weight"] + p["down.bias"]


def _norm(x, p: Parameters, name: str):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def loss_of(parameters: Parameters, x, dtype, way: str, gather: Gather):
    """The mean of the squares of the network's output, in float32."""
    output = forward(parameters, x, dtype, way, gather)
    return jnp.square(output.astype(jnp.float32)).mean()


def adamw(parameters: Parameters, gradients: Parameters, state: Mapping):
    """torch.optim.AdamW with its defaults: the new parameters and state."""
    step = state["step"] + 1
    scale1, scale2 = (1 - beta ** step.astype(jnp.float32) for beta in (BETA1, BETA2))
    new, exp_avg, exp_avg_sq = {}, {}, {}
    for name, gradient in gradients.items():
        first = BETA1 * state["exp_avg"][name] + (1 - BETA1) * gradient
        second = BETA2 * state["exp_avg_sq"][name] + (1 - BETA2) * jnp.square(gradient)
        change = first / scale1 / (jnp.sqrt(second / scale2) + EPSILON)
        new[name] = parameters[name] * (1 - RATE * DECAY) - RATE * change
        exp_avg[name], exp_avg_sq[name] = first, second
    return new, {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _as_is(value: jax.Array) -> jax.Array:
    return value


def train_step(
    parameters: Parameters, state: Mapping, x, dtype=jnp.bfloat16, way=KEPT, gather=_as_is
):
    """New parameters, new state and the loss. ``gather`` gathers a sharded array."""
    loss, gradients = jax.value_and_grad(loss_of)(parameters, x, dtype, way, gather)
    return *adamw(parameters, gradients, state), loss


def lowered(request: Request) -> tuple[jax.stages.Lowered, list[str], dict[int, int]]:
    """The lowered step over ``request.devices``, names of its arguments, and the donated ones.

    No device is needed.
    """
    sizes, mesh = request.sizes, AbstractMesh((request.devices,), (AXIS,))
    sharded, stacked, whole = (
        NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((AXIS,), (None, AXIS), ())
    )

    def of(shape: tuple[int, ...], sharding=sharded, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    known = shapes(sizes.blocks, sizes.width)
    if request.way == SCANNED:  # one array for all blocks
        parameters = {name: of(shape) for name, shape in known.items() if "blocks" not in name}
        for name, shape in _under(known, "blocks.0.").items():
            parameters[f"blocks.{name}"] = of((sizes.blocks, *shape), stacked)
    else:
        parameters = {name: of(shape) for name, shape in known.items()}
    state = {
        "step": of((), whole, jnp.int32),
        "exp_avg": parameters,
        "exp_avg_sq": parameters,
    }
    batch = of((sizes.batch * request.devices, sizes.sequence, sizes.width))
    step = functools.partial(
        train_step,
        way=request.way,
        gather=lambda value: jax.lax.with_sharding_constraint(
            jax.lax.optimization_barrier(value), whole
        ),
    )
    shardings = jax.tree.map(lambda one: one.sharding, (parameters, state))
    jitted = jax.jit(step, out_shardings=(*shardings, whole), donate_argnums=(0, 1))
    program = jitted.trace(parameters, state, batch).lower(lowering_platforms=("tpu",))
    names = [_name(path) for path, _ in jax.tree.leaves_with_path((parameters, state))] + ["x"]
    # Parameters and state are the first outputs too, in the same order.
    return program, names, {number: number for number in range(len(names) - 1)}


def _name(path: tuple) -> str:
    """The name that plans use for the argument at ``path`` of (parameters, state)."""
    keys = [key.key for key in path[1:]]
    return f"{keys[0]} of {keys[1]}" if len(keys) > 1 else keys[0]


def main(folder: Path) -> None:
    program, names, donated = lowered(Request.read(folder))
    write_answer(folder, program.compiler_ir(), True, names, donated)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
