"""Parameters that come into a computation by another way than their wrapper: right, or refused."""

import copy

import pytest
import torch
from on_ranks import on_each_rank
from rank_warnings import every_rank_warns
from small_models import Computes, assert_same_gradients, here, whole, wrapped
from torch import nn

from xla_fsdp import scan_blocks
from xla_fsdp.optim import LAMB, LARS, Adafactor

WIDE = 128


class Model(nn.Module):
    """Vectors as long as a shard: of these, one rank has all and the other nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(WIDE)
        self.layer = nn.Linear(WIDE, 3)
        self.penalised = [self.layer.weight]

    def forward(self, x, penalty=False):
        y = self.layer(self.norm(x))
        return y.sum() + sum(p.square().sum() for p in self.penalised) if penalty else y


def layers_called_by_themselves(rank):
    x = torch.ones(2, WIDE).to("xla")
    kinds = {}, {"shard_param_on_dim_0": True}, {"flatten_parameters": True}
    for options in kinds:
        model = wrapped(Model(), **options)
        model(x)
        for call in (model.norm, model.layer, model.module):
            with pytest.raises(RuntimeError, match="(norm|layer).*is sharded here.*all the wrap"):
                call(x)
        assert torch.equal(model(x).cpu(), Model()(x.cpu()))

    def reads(self, x):
        return nn.functional.linear(x, self.layer.weight)

    layer = wrapped(nn.Linear(WIDE, 6), shard_param_on_dim_0=True)
    with pytest.raises(RuntimeError, match="'weight', which is sharded here"):
        Computes(reads, layer=layer)(x)  # which has no wrapper itself
    model = wrapped(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDE, 6))))
    with pytest.raises(RuntimeError, match="weight.original.', which is sharded here"):
        print(model[0].weight)


def objects_kept_from_before(rank):
    plain = Model()
    before = list(plain.parameters())
    model = wrapped(plain)
    text = "square needs .*'layer.weight' in its wrapper.* empty.* shards from model.parameters"
    with pytest.raises(RuntimeError, match=text):
        model(torch.ones(2, WIDE).to("xla"), penalty=True)
    text = "no effect.*'norm.bias' in its wrapper.*Freeze and unfreeze parameters of the wrapped"
    with pytest.raises(RuntimeError, match=text):
        before[1].requires_grad = False
    with pytest.raises(RuntimeError, match="to .data needs .*'norm.weight' in its wrapper"):
        before[0].data = torch.zeros(WIDE)
    before[0].requires_grad_()
    # What needs no values is answered. One that is tied to it finds its shards, if it can.
    assert before[0].dtype is torch.float32 and before[0].requires_grad and before[0].grad is None
    assert repr(before[0]) and before[0] in set(before) and isinstance(before[0], nn.Parameter)

    def holder():
        layer = nn.Linear(WIDE, 3, bias=False)
        layer.weight = before[2]
        return layer

    x = torch.ones(2, WIDE).to("xla")
    expected = wrapped(holder())(x)
    assert expected.shape == (2, 3)
    assert torch.equal(wrapped(holder().to("xla"))(x), expected)
    with pytest.raises(RuntimeError, match="'weight' of Linear is tied .* that was moved since"):
        wrapped(holder()._apply(lambda tensor: tensor.to("xla")))


def read_in_hooks(rank):
    """Around the wrapper, and in the backward, where no forward has gathered."""

    x = torch.ones(2, WIDE).to("xla")
    for register, hook in (
        ("register_forward_hook", lambda m, given, y: y * m.layer.weight.norm()),
        ("register_forward_pre_hook", lambda m, given: given[0] * m.layer.weight.norm()),
    ):
        model, plain = wrapped(Model()), Model()
        getattr(model, register)(hook)
        getattr(plain, register)(hook)
        given = torch.linspace(-1, 2, 2 * WIDE).view(2, WIDE)
        torch.testing.assert_close(model(given.to("xla")).cpu(), plain(given), rtol=1e-4, atol=1e-5)
    model, plain = wrapped(Model()), Model()
    for one in (model, plain):
        one.register_full_backward_pre_hook(lambda m, grads: (grads[0] * m.layer.weight.norm(),))
        one(x.to(next(one.parameters()).device)).sum().backward()
    assert_same_gradients(model, plain)
    # What is about the shard, or about no value, is answered.
    model = wrapped(Model())
    seen = []
    model.register_full_backward_pre_hook(lambda m, grads: seen.append(m.layer.weight.grad))
    for _ in range(2):
        model(x).sum().backward()
    assert seen[0] is None and seen[1] is model.module.layer.weight.grad


def a_layer_replaced_later(rank):
    model = wrapped(Model())
    x = torch.ones(2, WIDE).to("xla")
    model(x).sum().backward()
    model.layer = nn.Linear(WIDE, 3).to("xla")
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    match = r"parameter 2 of group 0 of this SGD, of shape \[3, 128\], is in no wrapper"
    with every_rank_warns(rank, match):
        optimizer.step()
    with every_rank_warns(rank, None):
        optimizer.step()


def penalised(penalty):
    torch.manual_seed(4)
    return Computes(
        lambda self, x: self.own(self.inside(x)).square().mean() + penalty(self),
        inside=nn.Linear(WIDE, WIDE),
        own=nn.Linear(WIDE, 3),
    )


def parameters_gone_through_in_a_forward(rank):
    """Norms are those of the full parameters. A vector of several has none of its own."""
    x = torch.ones(2, WIDE).to("xla")
    penalties = (
        lambda model: sum(p.norm() for p in model.parameters()),
        lambda model: sum(p.square().sum() for n, p in model.named_parameters() if "inside" in n),
        lambda model: sum(p.abs().sum() for p in model.inside.parameters()),
        lambda model: sum(
            p.norm() for m in model.modules() for p in m._parameters.values() if p is not None
        ),
    )
    for penalty in penalties:
        plain = penalised(penalty)
        plain(x.cpu()).backward()
        model = wrapped(penalised(penalty), "inside")
        model(x).backward()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            full = mine.grad.full_tensor().cpu()
            torch.testing.assert_close(full, its.grad, rtol=1e-4, atol=1e-4)
    model = wrapped(penalised(penalties[0]), "inside", flatten_parameters=True)
    with pytest.raises(RuntimeError, match="'inside.flat_param_0', which is .* contains several"):
        model(x)

    def looks(model):
        for parameter in model.parameters():
            assert parameter.dtype is torch.float32 and parameter.device.type == "xla"
            assert isinstance(parameter, nn.Parameter) or parameter.grad_fn is not None
        model.inside.requires_grad_(False)
        (model.inside.bias if trained else next(model.inside.parameters())).requires_grad_(True)
        torch.nn.utils.clip_grad_norm_(model.inside.parameters(), 1.0)
        return 0.0

    for trained in (True, False):
        model = wrapped(penalised(looks), "inside")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model(x)
        weight, bias = model.module.inside.sharded_params
        assert (weight.requires_grad, bias.requires_grad) == (not trained, trained)
        assert weight.grad.max().item() < 1
        copy.deepcopy(model)


class Negative(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return -found if func is nn.functional.linear else found


def what_hangs_on_parameters(rank):
    def hooked(register):
        layer = nn.Linear(6, 6)
        getattr(layer.weight, register)(lambda given: None)
        return layer

    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        for wrap in (wrapped, lambda layer: scan_blocks([layer])):
            with pytest.raises(RuntimeError, match="weight' has a hook from before .*Register it"):
                wrap(hooked(register))
    with pytest.raises(RuntimeError, match="'0.weight' has a hook from before"):
        wrapped(nn.Sequential(hooked("register_hook")), flatten_parameters=True)
    layer = nn.Linear(6, 6)
    layer.weight = Negative(layer.weight.detach())
    with pytest.raises(TypeError, match="'weight' is a Negative, which overrides operators"):
        wrapped(layer)
    assert wrapped(nn.Sequential(layer), ignored_modules=[layer])
    layer = nn.Linear(6, 6)
    layer.bias.grad = torch.zeros(6)
    with every_rank_warns(rank, "'bias' has a gradient from before the wrapping"):
        wrapped(layer)

    def keeps(self, x):
        self.__dict__["kept"] = self.layer.weight
        return self.layer(x)

    model = wrapped(Computes(keeps, layer=nn.Linear(6, 6)), disable_reshard_on_root=False)
    model(here(rank))
    assert model.module.kept.sum().isnan()  # was freed since


def options(rank):
    # Ranks with different shards would average the gradients of these.
    for groups in ([[0, 1]], [[0, 2], [1, 3]]):
        with pytest.raises(ValueError, match="replication_groups=.* must contain each rank of"):
            wrapped(nn.Linear(6, 6), replication_groups=groups)
    model = wrapped(nn.Linear(6, 6))
    with pytest.raises(ValueError, match="groups must contain each of the 2 ranks once"):
        model.clip_grad_norm_(1.0, groups=[[0]])


def padding_that_is_filled(rank):
    """What sets all elements of a shard sets those of its padding."""
    for make in (LAMB, LARS, Adafactor):
        plain, model = nn.Linear(6, 5), wrapped(nn.Linear(6, 5))
        for one in (plain, model):
            for parameter in one.parameters():
                nn.init.constant_(parameter, 0.5)
                parameter.grad = torch.zeros_like(parameter)
            x = torch.ones(2, 6, device=next(one.parameters()).device)
            one(x).square().sum().backward()
            make(one.parameters(), lr=0.1, weight_decay=0.1).step()
        found = whole(model, model.state_dict())
        torch.testing.assert_close(found, plain.state_dict(), rtol=1e-5, atol=1e-6)


@on_each_rank(2)
def test_each_is_right_or_refused(rank):
    layers_called_by_themselves(rank)
    parameters_gone_through_in_a_forward(rank)
    objects_kept_from_before(rank)
    read_in_hooks(rank)
    a_layer_replaced_later(rank)
    what_hangs_on_parameters(rank)
    options(rank)
    padding_that_is_filled(rank)
