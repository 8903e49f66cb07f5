"""fully_shard: a script for torch's FSDP2 trains the same with it as plain torch does."""

import pytest
import torch
from in_place import Layer, Model, assert_like_plain, build, sharded, train


def every_case(rank, size):
    from xla_fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method

    plain = build()
    expected = train(plain)
    names = [name for name, _ in plain.named_parameters()]
    mesh = torch.arange(size).view(2, -1)
    cases = [
        {"mesh": list(range(size)), "reshard_after_forward": False},
        {"mesh": mesh, "reshard_after_forward": True, "offload_policy": CPUOffloadPolicy()},
    ]
    if size == 4:
        cases.append({"reshard_after_forward": 2})
    for options in cases:
        model = sharded(**options)
        assert isinstance(model, Model) and isinstance(model, FSDPModule)
        assert isinstance(model.layers[0], Layer) and type(model.layers[0]) is type(model.layers[1])
        assert [name for name, _ in model.named_parameters()] == names
        assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert list(model.state_dict()) == list(plain.state_dict())
        assert_like_plain(model, train(model, rank, size), expected, plain)

    plain = build()
    expected = train(plain, micro_batches=2)
    model = sharded(mesh=mesh)
    model.set_requires_all_reduce(True)
    model.set_reshard_after_backward(False)
    assert_like_plain(model, train(model, rank, size, micro_batches=2), expected, plain)

    # Frozen modules, tied ones in units of their own, a method other than forward, a list.
    plain, model = build(), build()
    for one in (plain, model):
        one.norm.requires_grad_(False)
        one.layers[0].requires_grad_(False)
    fully_shard([*model.layers, model.head])
    ignored = set(model.norm.parameters())
    fully_shard(model, ignored_params=ignored)
    assert ignored == set(model.norm.parameters())
    register_fsdp_forward_method(model, "encode")
    found = train(model, rank, size, method="encode")
    assert_like_plain(model, found, train(plain, method="encode"), plain)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_trains_like_plain_torch(run_ranks, ranks):
    run_ranks(every_case, ranks, ranks, timeout=1500)
