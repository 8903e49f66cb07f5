"""torch.compile and torch.func around a wrapped model and inside: as plain torch, or refused."""

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from on_ranks import on_each_rank
from test_special_uses import WIDTH, assert_same_backward, inputs, mlp, wrapped
from torch import nn

from xla_fsdp import scan_blocks


@on_each_rank(1)
def test_torch_compile_is_refused(rank):
    x = inputs(rank).to("xla")
    for backend in ("eager", "aot_eager", "openxla"):
        model = wrapped(mlp(), "1")
        around = torch.compile(model, backend=backend)
        with pytest.raises(RuntimeError, match="Sequential, which is wrapped, .* leave torch.comp"):
            around(x)
        model(x).sum().backward()  # the remedy

        inside = wrapped(mlp(), "1")
        inside.module[1] = torch.compile(inside.module[1], backend=backend)
        with pytest.raises(RuntimeError, match="'1' in a wrapper is compiled by torch.compile"):
            inside(x)
        method = mlp()
        method[2].compile(backend=backend)
        with pytest.raises(RuntimeError, match="'2' in a wrapper is compiled by torch.compile"):
            wrapped(method)(x)
    parent = nn.Sequential(nn.Tanh(), wrapped(mlp(), "1"))
    with pytest.raises(RuntimeError, match="was called inside torch.compile"):
        torch.compile(parent, backend="eager")(x)
    itself = wrapped(mlp())
    itself.compile(backend="eager")
    with pytest.raises(RuntimeError, match="torch.compile"):
        itself(x)
    blocks = scan_blocks([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    with pytest.raises(RuntimeError, match="ScannedBlocks, which is wrapped, .* torch.compile"):
        torch.compile(blocks, backend="eager")(x)
    torch_xla.sync()


@pytest.mark.parametrize("ranks", [1, 2])
@on_each_rank()
def test_torch_func_is_refused(rank):
    model, plain = wrapped(mlp(), "1"), mlp()
    x = inputs(rank).to("xla")
    own = dict(model.named_parameters())

    def loss(one):
        return model(one).square().mean()

    # What torch knows of forward-mode is the process's, and ranks are its threads.
    alone = xr.world_size() == 1
    forward_mode = (
        lambda: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
        lambda: torch.func.hessian(loss)(x),
    )
    for call in (
        *(forward_mode if alone else ()),
        lambda: torch.func.grad(loss)(x),
        lambda: torch.func.vmap(model)(x),
        lambda: torch.func.vjp(model, x),
        lambda: torch.func.jacrev(loss)(x),
        lambda: torch.func.grad(
            lambda p: torch.func.functional_call(model, p, (x,)).square().mean()
        )(own),
    ):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                with pytest.raises(RuntimeError, match="transformation of torch.func .* backward"):
                    call()
    blocks = scan_blocks([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    with pytest.raises(RuntimeError, match="transformation of torch.func"):
        torch.func.grad(lambda one: blocks(one).sum())(x)

    # The remedies that the message names, and what is no transformation of Python.
    def of_inputs(one, device):
        given = inputs(rank).to(device).requires_grad_()
        (grad,) = torch.autograd.grad(one(given).square().mean(), given, create_graph=True)
        jacobian = torch.autograd.functional.jacobian(one, given.detach())
        scaled = torch.func.vmap(lambda row: row * 2)(one(given))
        return [tensor.detach().cpu() for tensor in (grad, jacobian, scaled)]

    found, expected = of_inputs(model, "xla"), of_inputs(plain, "cpu")
    torch_xla.sync()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert_same_backward(model, plain, rank)

    if not alone:
        return

    def directional(one, device):
        with torch.autograd.forward_ad.dual_level():
            given = inputs(rank).to(device)
            dual = torch.autograd.forward_ad.make_dual(given, torch.ones_like(given))
            return torch.autograd.forward_ad.unpack_dual(one(dual)).tangent.cpu()

    torch.testing.assert_close(directional(model, "xla"), directional(plain, "cpu"))
