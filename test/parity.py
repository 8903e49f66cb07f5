"""Trains the same model sharded over ranks and unsharded in plain torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from zoo import Block, Zoo, batches, loss_of

# The first writes the optimizer's state, the second uses it, and in a third nothing would be new:
# what errors come of more steps is seen in `float64`.
STEPS = 2
CLIP = 0.5


@dataclass(frozen=True)
class Case:
    """One way to train; the defaults are the wrapper's."""

    wrapping: str = "nested"  # root, nested, auto, flat, dim0
    checkpoint: bool = False
    accumulation: str = "none"  # none, no_sync, plain
    optimizer: str = "sgd"  # sgd, adamw
    norm_type: float = 2.0
    dtype: torch.dtype = torch.float32  # of the parameters
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    as_on_tpu: bool = False  # traced like there
    one_program: bool = True  # else the first step, which makes the optimizer's state, is another

    @property
    def micro_batches(self) -> int:
        return 1 if self.accumulation == "none" else 2

    def __str__(self) -> str:
        options = [f"{k}={str(v).removeprefix('torch.')}" for k, v in self.options.items()]
        parts = [self.wrapping, "checkpoint" * self.checkpoint, self.accumulation, self.optimizer]
        dtype = str(self.dtype).removeprefix("torch.")
        tpu = "as_on_tpu" * self.as_on_tpu
        return "-".join(part for part in [*parts, dtype, tpu, *options] if part)


@dataclass
class Run:
    """What a training run leaves behind; losses and norms by step, tensors by parameter name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step
    weights: dict[str, torch.Tensor]


def build(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return Zoo().to(case.dtype)


def optimizer_for(case: Case, parameters) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    # A large epsilon: where a gradient is all rounding error, Adam would amplify it to a full step.
    # Decay would reach the unused parameters in a flat vector, which unsharded have no gradient.
    decay = 0.0 if case.wrapping == "flat" else 0.1
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=decay)


def add_state(optimizer: torch.optim.Optimizer) -> None:
    """What the first step would make."""
    for p in optimizer.param_groups[0]["params"]:
        one, other = (torch.zeros_like(p, device="cpu").to(p.device) for _ in range(2))
        optimizer.state[p] = (
            {"momentum_buffer": one}
            if isinstance(optimizer, torch.optim.SGD)
            else {"step": torch.tensor(0.0), "exp_avg": one, "exp_avg_sq": other}
        )


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, to be fetched after the step: a fetch here would compile a program of its own."""
    return {
        n: p.grad.clone() if p.grad is not None else torch.zeros_like(p)
        for n, p in model.named_parameters(remove_duplicate=False)
    }


def unsharded_case(case: Case) -> Case:
    """The one of all cases that train alike unsharded, whose result may be shared."""
    decay_differs = case.wrapping == "flat" and case.optimizer == "adamw"
    dtype = case.options.get("compute_dtype")
    return dataclasses.replace(
        case,
        wrapping="flat" if decay_differs else "root",
        checkpoint=False,
        accumulation="none" if case.accumulation == "none" else "plain",
        options={"compute_dtype": dtype} if dtype else {},
        as_on_tpu=False,
        one_program=False,
    )


def unsharded(case: Case, device: str | torch.device = "cpu") -> Run:
    """The whole batch in one process, on plain torch tensors."""
    model = build(case).to(device)
    model.tie()
    sync = _sync_of(device)
    optimizer = optimizer_for(case, model.parameters())
    run = Run([], [], {}, {})
    for tokens in batches(case.steps):
        losses = []
        for part in tokens.to(device).chunk(case.micro_batches):
            loss = loss_of(_computed(case, model, part), part)
            (loss / case.micro_batches).backward()
            losses.append(loss.detach())
        run.losses.append(losses)
        run.gradients = run.gradients or gradients_of(model)
        # torch refuses the maximum of an empty gradient.
        clipped = [p for p in model.parameters() if p.numel()]
        norm = nn.utils.clip_grad_norm_(clipped, CLIP, case.norm_type)
        run.norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
        sync()
        run.losses[-1] = sum(loss.item() for loss in losses) / len(losses)
        run.norms[-1] = norm.item()
    run.weights = {name: value.cpu() for name, value in model.state_dict().items()}
    run.gradients = {name: value.cpu() for name, value in run.gradients.items()}
    return run


def _sync_of(device: str | torch.device) -> Callable[[], None]:
    if torch.device(device).type == "cpu":
        return lambda: None
    import torch_xla

    return torch_xla.sync


def unsharded_on_xla(rank: int, case: Case) -> Run:
    """The same on an XLA device, whose own way of computing a function is not at issue."""
    import torch_xla

    return unsharded(case, torch_xla.device())


def _computed(case: Case, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    dtype = case.options.get("compute_dtype")
    if dtype is None:
        return model(tokens)
    cast = {name: p.to(dtype) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, cast, (tokens,), tie_weights=True)


def wrap(case: Case, model: nn.Module) -> nn.Module:
    from xla_fsdp import (
        XlaFullyShardedDataParallel,
        checkpoint_module,
        transformer_auto_wrap_policy,
    )

    fsdp = functools.partial(XlaFullyShardedDataParallel, **case.options)
    if case.wrapping == "root":
        if case.checkpoint:
            for block in model.blocks:
                checkpoint_module(block)
        return fsdp(model)
    if case.wrapping == "auto":
        policy = functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Embedding}
        )

        def wrapper(module, *args, **kwargs):
            module = checkpoint_module(module) if case.checkpoint else module
            return XlaFullyShardedDataParallel(module, *args, **kwargs)

        return fsdp(model, auto_wrap_policy=policy, auto_wrapper_callable=wrapper)
    if case.wrapping == "flat":
        fsdp = functools.partial(fsdp, flatten_parameters=True)
    if case.wrapping == "dim0":
        fsdp = functools.partial(fsdp, shard_param_on_dim_0=True)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fsdp(checkpoint_module(block) if case.checkpoint else block)
    return fsdp(model)


def one_rank(rank: int, case: Case) -> dict[str, Any]:
    """Trains this rank's part of every batch; runs inside a launch."""
    import contextlib

    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp.ranks.rank import current_rank

    current_rank().as_on_tpu = case.as_on_tpu
    device = torch_xla.device()
    model = wrap(case, build(case))
    optimizer = optimizer_for(case, model.parameters())
    if case.one_program:
        add_state(optimizer)
    out: dict[str, Any] = {"losses": [], "norms": [], "metadata": model.get_shard_metadata()}
    for tokens in batches(case.steps):
        losses = []
        for number, part in enumerate(tokens.chunk(case.micro_batches)):
            mine = part.chunk(xr.world_size())[rank].to(device)
            hold = case.accumulation == "no_sync" and number == 0
            with model.no_sync() if hold else contextlib.nullcontext():
                loss = loss_of(model(mine), mine)
                (loss / case.micro_batches).backward()
            losses.append(loss.detach())
        if case.one_program or "gradients" not in out:
            gradients = gradients_of(model)
            out.setdefault("gradients", gradients)
        norm = model.clip_grad_norm_(CLIP, case.norm_type)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        out["losses"].append(sum(loss.item() for loss in losses) / len(losses))
        out["norms"].append(norm.item())
    out["gradients"] = {name: value.cpu() for name, value in out["gradients"].items()}
    out["weights"] = {name: value.cpu() for name, value in model.state_dict().items()}
    return out


def merge(ranks: list[dict[str, Any]]) -> Run:
    """What the ranks left behind, as one run."""
    from xla_fsdp.consolidate import consolidate_sharded_state_dicts

    metadata = ranks[0]["metadata"]

    def whole(key: str) -> dict[str, torch.Tensor]:
        return consolidate_sharded_state_dicts([rank[key] for rank in ranks], metadata)

    losses = [sum(step) / len(ranks) for step in zip(*(r["losses"] for r in ranks), strict=True)]
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
    return Run(losses, ranks[0]["norms"], whole("gradients"), whole("weights"))


def assert_equal(sharded: Run, reference: Run, rtol: float, atol: float) -> None:
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    close(torch.tensor(sharded.losses), torch.tensor(reference.losses))
    close(torch.tensor(sharded.norms), torch.tensor(reference.norms))
    for name in ("gradients", "weights"):
        ours, theirs = getattr(sharded, name), getattr(reference, name)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            close(ours[key], value, msg=lambda text, key=key, name=name: f"{name} {key}: {text}")
