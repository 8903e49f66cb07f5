"""Combinations of the engine's settings train like plain torch in one process on the global batch.

A cell is a form of wrapping, when parameters are freed, how they are cut, and up to two uses.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.runtime as xr
from covering import covering, pairs_of
from on_ranks import finish_step, on_each_rank, raises
from small_models import WORDS, Block, Language, without_sync, wrapped
from torch import nn

import xla_fsdp
from xla_fsdp import CPUOffload, fully_shard, scan_blocks
from xla_fsdp import ShardingStrategy as S
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.checkpoint.inventory import make_inventory
from xla_fsdp.ranks.rank import current_rank

FORMS = ("wrapper", "fully_shard", "scanned")
FREEING = ("zero3", "zero2", "hpz")  # hpz: reshard_after_forward=2
CUTS = ("each", "dim0", "flat")
USES = ("hybrid", "no_sync", "offload", "bf16", "frozen", "shared")

Cell = tuple[str, ...]

# Two settings that are not possible together, and what the message has.
NOT_TOGETHER = {
    ("fully_shard", "flat"): "=True is not supported by fully_shard. Leave it out",
    ("scanned", "zero2"): "or pass a number of ranks >= 2, which stores a part of them",
    ("scanned", "flat"): "flatten_parameters=True is not supported in scan_blocks",
}

PRODUCT: list[Cell] = [
    (form, freeing, cut, *uses)
    for form, freeing, cut in itertools.product(FORMS, FREEING, CUTS)
    for uses in [("plain",), *((one,) for one in USES), *itertools.combinations(USES, 2)]
]


def shown_by(cell: Cell) -> set[Cell]:
    """The pairs whose errors ``cell`` shows. Rounding to bfloat16 hides small ones of others."""
    return {pair for pair in pairs_of(cell) if "bf16" in pair or "bf16" not in cell}


LEGAL = [cell for cell in PRODUCT if not pairs_of(cell) & NOT_TOGETHER.keys()]
# Every one of these with every use, with and without replicas.
FULL = [cell for cell in LEGAL if len(cell) == 4 or "hybrid" in cell]


COVERING = covering(LEGAL, shown_by)
# Every setting, not only where bfloat16 hides small errors.
SINGLY = covering(COVERING, lambda cell: {"bf16"} if "bf16" in cell else set(cell))


STEPS = 2
GLOBAL_BATCH = 16
RATE, CLIP = 0.5, 0.4
MESH = [[0, 1], [2, 3]]


def ranks_for(cell: Cell) -> int:
    """Replicas and ``reshard_after_forward=2`` need four ranks."""
    return 4 if "hybrid" in cell or "hpz" in cell else 2


def build(uses: Iterable[str]) -> Language:
    torch.manual_seed(3)
    model = Language()
    if "shared" in uses:  # inside a unit, and between two
        model.head.weight = model.embed.weight
        for block in model.blocks:
            block.gate.weight = block.up.weight
    if "frozen" in uses:  # a unit, and parts of others
        for one in (model.embed, *(block.down for block in model.blocks)):
            one.requires_grad_(False)
    return model


def batches(uses: Iterable[str]) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(WORDS, (STEPS, GLOBAL_BATCH, 3), generator=generator)
    return [step.chunk(4 if "no_sync" in uses else 1) for step in tokens]


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    # Without state, so that all steps are one program.
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)


@functools.cache
def expected(uses: tuple[str, ...]) -> dict[str, Any]:
    model = build(uses)
    optimizer = optimizer_for(model)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in batches(uses):
        total = 0.0
        for part in step:
            parameters = dict(model.named_parameters())
            if "bf16" in uses:
                parameters = {name: p.bfloat16() for name, p in parameters.items()}
            logits = torch.func.functional_call(model, parameters, (part,), tie_weights=True)
            loss = loss_of(logits, part) / len(step)
            loss.backward()
            total += loss.item()
        found["losses"].append(total)
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = model.state_dict()
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "zero2": {"reshard_after_forward": False},
    "hpz": {"reshard_after_forward": 2},
    "dim0": {"shard_param_on_dim_0": True},
    "flat": {"flatten_parameters": True},
    "hybrid": {"device_mesh": MESH},
    "bf16": {"compute_dtype": torch.bfloat16},
    "offload": {"cpu_offload": CPUOffload()},
}
BY_TORCHS_NAMES: dict[str, dict[str, Any]] = {
    "hybrid": {"mesh": MESH},
    "bf16": {"mp_policy": xla_fsdp.MixedPrecisionPolicy(torch.bfloat16)},
    "offload": {"offload_policy": xla_fsdp.CPUOffloadPolicy()},
}


def options_for(cell: Cell) -> dict[str, Any]:
    options = OPTIONS | BY_TORCHS_NAMES if "fully_shard" in cell else OPTIONS
    return {name: value for use in cell for name, value in options.get(use, {}).items()}


def sharded(cell: Cell) -> nn.Module:
    model, options = build(cell), options_for(cell)
    units = ["blocks.0", "blocks.1", "embed"]
    if "scanned" in cell:
        model.blocks = scan_blocks(list(model.blocks), **options)
        units = ["embed"]
    wrap = fully_shard if "fully_shard" in cell else FSDP
    return wrapped(model, *units, wrap=wrap, **options)


def train(rank: int, cell: Cell) -> dict[str, Any]:
    model = sharded(cell)
    optimizer = optimizer_for(model)
    parameters = list(model.parameters())
    assert {p.device.type for p in parameters} == {"cpu" if "offload" in cell else "xla"}
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in batches(cell):
        total, reduced = torch.zeros((), device="xla"), (0, len(step) - 1)
        for number, part in enumerate(step):
            mine = part.chunk(xr.world_size())[rank].to("xla")
            with contextlib.nullcontext() if number in reduced else without_sync(model):
                loss = loss_of(model(mine), mine) / len(step)
                loss.backward()
            total += loss.detach()
            if number == 1:  # stored gradients go from one program to another
                torch_xla.sync()
        assert all((p.grad is None) is not p.requires_grad for p in parameters)
        norm = model.clip_grad_norm_(CLIP)
        finish_step(optimizer)
        found["losses"].append(total.item())
        found["norms"].append(norm.item())
    found["weights"] = xla_fsdp.full_state_dict(model, rank0_only=False)
    return found


def train_cells(rank: int, cells: list[Cell]) -> list[dict[str, Any]]:
    current_rank().as_on_tpu = True  # what a TPU gets has more in it
    found = []
    for cell in cells:
        try:
            found.append(train(rank, cell))
        except Exception as error:
            raise RuntimeError(f"in the cell {cell}: {error}") from error
    return found


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, what: str) -> None:
    """The difference is small compared with ``wanted``, so that a wrong factor is none."""
    assert found.shape == wanted.shape, what
    difference, size = (found - wanted).norm().item(), wanted.norm().item()
    # Sums of what nearly cancels are as small as the rounding of what is added up.
    assert difference <= tolerance * (size + 0.02), f"{what}: {difference} off, {size} expected"


def assert_like_plain(cell: Cell, ranks: list[dict[str, Any]]) -> None:
    wanted, tolerance = expected(cell[3:]), 4e-2 if "bf16" in cell else 2e-5
    first = build(cell).state_dict()
    losses = torch.tensor([one["losses"] for one in ranks]).mean(0)
    assert_near(losses, torch.tensor(wanted["losses"]), tolerance, f"losses of {cell}")
    for one in ranks:
        norms = torch.tensor(one["norms"])
        assert norms.min() > CLIP  # so that it matters
        assert_near(norms, torch.tensor(wanted["norms"]), tolerance, f"norms of {cell}")
        assert one["weights"].keys() == wanted["weights"].keys()
        for name, value in wanted["weights"].items():  # how much they changed
            change, what = one["weights"][name] - first[name], f"weights {name} of {cell}"
            assert_near(change, value - first[name], tolerance, what)


def check(run_ranks, cells: list[Cell]) -> None:
    assert cells
    for number in (2, 4):
        some = [cell for cell in cells if ranks_for(cell) == number]
        found = run_ranks(train_cells, number, some, timeout=600)
        for cell, *ranks in zip(some, *found, strict=True):
            assert_like_plain(cell, ranks)


def test_every_setting_trains_like_plain_torch(run_ranks):
    check(run_ranks, SINGLY)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_pair_trains_like_plain_torch(run_ranks, form):
    check(run_ranks, [cell for cell in COVERING if form in cell and cell not in SINGLY])


@pytest.mark.full
@pytest.mark.parametrize("form, freeing, cut", sorted({cell[:3] for cell in LEGAL}))
def test_the_full_product_trains_like_plain_torch(run_ranks, form, freeing, cut):
    check(run_ranks, [cell for cell in FULL if cell[:3] == (form, freeing, cut)])


@on_each_rank(4)
def test_what_is_not_possible_together_raises(rank: int):
    for cell in PRODUCT:
        if refused := pairs_of(cell) & NOT_TOGETHER.keys():
            with pytest.raises(ValueError) as caught:
                sharded(cell)
            assert any(NOT_TOGETHER[pair] in str(caught.value) for pair in refused), cell


@on_each_rank(4)
def test_what_contradicts_itself_raises(rank: int):
    def scan(change=lambda one, other: None, **options):
        pair = [Block(), Block()]
        change(*pair)
        return scan_blocks(pair, **options)

    def share(one, other):
        other.up.weight = one.up.weight

    def tie(root, scan_first):
        model = build(())
        model.blocks[1].norm.weight = model.norm.weight
        if not scan_first:
            model.norm = root(model.norm)
        model.blocks = scan_blocks(model.blocks)
        return root(model)

    def keep(root):
        model = build(())
        model.kept = model.blocks[0].norm
        model.blocks = scan_blocks(model.blocks)
        return root(model)

    def offload_one(root, **options):
        model = build(("shared",))
        model.embed = root(model.embed, **options)
        return root(model)

    host, stream = {"cpu_offload": CPUOffload()}, {"cpu_offload": CPUOffload(stream=True)}
    narrow = xla_fsdp.MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    mesh = {"device_mesh": MESH}
    part = functools.partial
    wrapper, scanned, in_place = part(FSDP, Block()), scan, part(fully_shard, Block())
    no_zero2 = "reshard_after_forward=False is not supported in scan_blocks"
    divides = "reshard_after_forward as a number of ranks must divide the 2"
    for makes, options, text in [
        ([wrapper, scanned],
         {**mesh, "sharding_strategy": S.HYBRID_SHARD, "reshard_after_forward": False},
         "reshard_after_forward=False contradicts sharding_strategy=ShardingStrategy.HYBRID_SHARD"),
        ([wrapper, scanned],
         {"sharding_strategy": S.SHARD_GRAD_OP, "reshard_after_forward": 2},
         "reshard_after_forward=2 contradicts sharding_strategy=ShardingStrategy.SHARD_GRAD_OP"),
        ([wrapper, scanned], {**mesh, "sharding_strategy": S.FULL_SHARD},
         "sharding_strategy=ShardingStrategy.FULL_SHARD needs a 1-D device_mesh"),
        ([wrapper, scanned], {"sharding_strategy": S.HYBRID_SHARD},
         "sharding_strategy=ShardingStrategy.HYBRID_SHARD needs groups, but got"),
        ([wrapper, scanned], {**mesh, "reshard_after_forward": 4}, divides),
        ([in_place], {"mesh": MESH, "reshard_after_forward": 4}, divides),
        ([wrapper, scanned], {**host, "mixed_precision": narrow},
         "keep_low_precision_grads=True) is incompatible with cpu_offload"),
        ([wrapper], {**stream, "reshard_after_forward": False},
         "reshard_after_forward=False keeps parameters there"),
        ([wrapper], {**stream, "reshard_after_forward": 2},
         "reshard_after_forward=2 keeps parameters there"),
        ([wrapper], {**stream, "sharding_strategy": S.SHARD_GRAD_OP}, "as SHARD_GRAD_OP"),
        ([scanned], stream, "CPUOffload(stream=True) is not supported in scan_blocks"),
        ([scanned], {"reshard_after_forward": 1}, no_zero2),
        ([scanned], {"sharding_strategy": S.SHARD_GRAD_OP}, no_zero2),
        ([scanned], {**mesh, "sharding_strategy": S._HYBRID_SHARD_ZERO2}, no_zero2),
        ([part(scan, share)], {}, "block 1 shares the parameter up.weight with block 0"),
        ([part(tie, FSDP, True), part(tie, fully_shard, True)], {},
         "'norm.weight' of LayerNorm is tied either to a parameter of scanned blocks"),
        ([part(tie, FSDP, False), part(tie, fully_shard, False)], {},
         "block 1 shares the parameter norm.weight with a wrapped module"),
        ([part(keep, root) for root in (FSDP, fully_shard, make_inventory)], {},
         "module 'kept' is also in the first of the scanned blocks"),
        ([part(offload_one, FSDP)], host, "Pass the same cpu_offload to both"),
        ([part(offload_one, fully_shard)], {"offload_policy": xla_fsdp.CPUOffloadPolicy()},
         "Pass the same cpu_offload to both"),
    ]:  # fmt: skip
        for make in makes:
            raises((ValueError, RuntimeError), re.escape(text), make, **options)
