"""Reading and saving change no state: the next dropout mask is what it is without them."""

import os
import random

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from checkpoint_runs import saves_and_loads
from on_ranks import on_each_rank, slow
from small_models import wrapped
from torch import nn
from wrappings import assert_equal

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import fully_shard
from xla_fsdp.collectives.random_state import DeviceRandomState
from xla_fsdp.integrations.full_weights import save_whole

WIDTH = 6


def build(form):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        for _ in range(2)
    ]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 3))
    return wrapped(model, "0", "1", wrap=FSDP if form == "class" else fully_shard)


class Run:
    def __init__(self, form="class"):
        DeviceRandomState(7).restore()
        self.model = build(form)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        torch.manual_seed(5 + xr.global_ordinal())

    def forward(self):
        """A batch by torch's generator; noise and dropout by that of the device."""
        x = torch.randn(4, WIDTH).to("xla")
        return self.model(x + 0.1 * torch.rand_like(x)).square().mean()

    def step(self, within=lambda: None):
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        within()
        torch_xla.sync()
        return loss.item()


def states():
    kind, keys, *rest = np.random.get_state()
    plain = random.getstate(), (kind, keys.tolist(), *rest)
    return DeviceRandomState.read(), torch.get_rng_state().tolist(), *plain


def summons(model, **options):
    with FSDP.summon_full_params(model, **options):
        pass


def changed_while_summoned(model):
    with FSDP.summon_full_params(model), torch.no_grad():
        model.get_parameter("2.bias").mul_(1.0)


def looks_for_divergence(run):
    with xla_fsdp.detect_divergence(run.model) as divergence:
        divergence.step(torch.ones(()), norm=1.0)


def reads(run, folder):
    """Everything that only reads or saves, and what loads, by name."""
    model = run.model
    saves, loads = saves_and_loads(model, run.optimizer, folder)
    return {
        "state_dict": lambda: model.state_dict(),
        "summon": lambda: summons(model),
        "summon, to read": lambda: summons(model, writeback=False, rank0_only=True),
        "summon, on the host": lambda: summons(model, offload_to_cpu=True),
        "summon, with gradients": lambda: summons(model, with_grads=True),
        "summon, and write": lambda: changed_while_summoned(model),
        "save_pretrained": lambda: save_whole(lambda m, d, state_dict=None: None, model, "x"),
        "detect_divergence": lambda: looks_for_divergence(run),
        "clip_grad_norm_": lambda: model.clip_grad_norm_(1e9),
        **saves,
    }, loads


@pytest.mark.parametrize("form", ["class", slow("in place")])
@on_each_rank(2, timeout=900)
def test_reading_and_saving_move_no_generator(rank, form, tmp_path):
    moved = []
    run = Run(form)
    run.step()
    only_read, loads = reads(run, tmp_path)
    for name, read in (only_read | loads).items():
        for moment in ("between two steps", "in a step"):
            if moment == "in a step":
                run.forward()
            before = states()
            read()
            if states() != before:
                moved.append((name, moment))
            torch_xla.sync()
    assert moved == []


@on_each_rank(2, timeout=900)
def test_a_run_that_reads_trains_as_one_that_does_not(rank, tmp_path):
    def train(read):
        run = Run()
        os.makedirs(f"{tmp_path}/{read}", exist_ok=True)
        every, _ = reads(run, f"{tmp_path}/{read}")
        found = [run.step(), run.step(every["full_state_dict"]) if read else run.step()]
        if read:
            for one in every.values():
                one()
        return [*found, run.step(), run.step()]

    assert train(False) == train(True)


@pytest.mark.parametrize("form, in_a_step", [("class", False), ("class", True), ("in place", True)])
@on_each_rank(2)
def test_a_run_that_resumes_ends_as_one_that_never_stopped(rank, form, in_a_step, tmp_path):
    def save():
        xla_fsdp.save_checkpoint(tmp_path, run.model, run.optimizer, step=2)

    def rest(run):
        losses = [run.step(), run.step()]
        full = xla_fsdp.full_state_dict(run.model, rank0_only=False)
        state = xla_fsdp.full_optim_state_dict(run.model, run.optimizer, rank0_only=False)["state"]
        return losses, full, state, states()

    run = Run(form)
    run.step()
    run.step(save) if in_a_step else (run.step(), save())
    expected = rest(run)
    run = Run(form)
    run.step()
    xla_fsdp.load_checkpoint(tmp_path, run.model, run.optimizer)
    if in_a_step:
        torch_xla.sync()  # as the first run after its save
    assert_equal(rest(run), expected)
