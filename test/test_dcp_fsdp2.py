"""To torch's own FSDP and back: from ranks here to two processes there, where training goes on."""

import os

import pytest
import torch
import torch.multiprocessing
from torch import nn
from wrappings import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")


def build() -> nn.Sequential:
    """Rows that neither 2 nor 3 ranks divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 31), nn.GELU(), nn.Linear(31, 7), nn.LayerNorm(7))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def step(model, optimizer, seed, device="cpu"):
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed)).to(device)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def ours(rank, folder, writes):
    """Trains and writes, or reads in another wrapping; the full state."""
    import xla_fsdp
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    if writes:
        model = FSDP(nn.Sequential(*map(FSDP, build())))
    else:
        model = FSDP(build(), flatten_parameters=True)
    optimizer = adamw(model)
    if writes:
        step(model, optimizer, 1, "xla")
        xla_fsdp.to_dcp(folder, model, optimizer)
    else:
        xla_fsdp.from_dcp(folder, model, optimizer, allow_pickle=True)
    state = xla_fsdp.full_state_dict(model, rank0_only=False)
    return state, xla_fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]


def fsdp_of_torch(rank, folder):
    """Loads, says what it has loaded, trains, saves, says what it has saved."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # wherever the machine's name leads
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = build()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = adamw(model)

    def tell(name):
        options = states.StateDictOptions(full_state_dict=True)
        state, optim = states.get_state_dict(model, optimizer, options=options)
        if rank == 0:
            torch.save((state, optim["state"]), f"{folder}/{name}")

    state, optim = states.get_state_dict(model, optimizer)
    dcp.load({"model": state, "optim": optim}, checkpoint_id=f"{folder}/ours")
    states.set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)
    tell("loaded")
    step(model, optimizer, 2)
    state, optim = states.get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=f"{folder}/theirs")
    tell("saved")
    dist.destroy_process_group()


@pytest.mark.slow
def test_torch_goes_on_where_we_were_and_we_where_it_was(run_ranks, tmp_path):
    written = run_ranks(ours, 3, str(tmp_path / "ours"), True)[0]
    torch.multiprocessing.spawn(fsdp_of_torch, (str(tmp_path),), nprocs=2)
    for found, expected in (
        (torch.load(tmp_path / "loaded"), written),
        (run_ranks(ours, 3, str(tmp_path / "theirs"), False)[0], torch.load(tmp_path / "saved")),
    ):
        assert_equal(found[0], dict(expected[0]))
        assert found[1].keys() == expected[1].keys()
        for name, values in expected[1].items():
            assert_equal({key: found[1][name][key] for key in values}, values)
