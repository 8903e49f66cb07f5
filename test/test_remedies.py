"""What the engine's messages recommend, done: each case raises, and then follows the advice."""

import contextlib
import copy
import pickle

import pytest
import torch
from on_ranks import on_each_rank
from small_models import Computes
from torch import nn

import xla_fsdp

CASES = {}


def case(match):
    """A function whose first ``with wrong():`` raises as ``match`` says; what follows must run."""

    def add(function):
        @contextlib.contextmanager
        def wrong(match=match):
            with pytest.raises((RuntimeError, ValueError, TypeError, AttributeError), match=match):
                yield

        CASES[function.__name__] = lambda: function(wrong)
        return function

    return add


def wrap(module, **options):
    return xla_fsdp.XlaFullyShardedDataParallel(module, **options)


def x(*shape):
    return torch.ones(*(shape or (2, 4)), device="xla")


def trains(model, *inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*(inputs or (x(),))).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    optimizer.step()


def linears(count=2):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class Scaled(nn.Module):
    """Has tensors of its own, as models of torchtitan have, and ``init_weights``."""

    def __init__(self, with_reset=False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("turns", self.rotations(), persistent=False)
        if with_reset:
            self.reset_parameters = self.init_weights

    def rotations(self):
        return torch.polar(torch.ones(4), torch.arange(4.0))

    def init_weights(self):
        nn.init.trunc_normal_(self.linear.weight, std=0.5)
        nn.init.zeros_(self.linear.bias)
        nn.init.constant_(self.scale, 2.0)
        with torch.device(self.turns.device):
            self.turns = self.rotations()

    def forward(self, x):
        return self.linear(x) * self.scale * self.turns.real


def on_meta(*args):
    with torch.device("meta"):
        return Scaled(*args)


def require_initialized(model):
    full = xla_fsdp.full_state_dict(model, rank0_only=False)
    scale = next(value for name, value in full.items() if name.endswith("scale"))
    weight = next(value for name, value in full.items() if name.endswith("linear.weight"))
    assert scale.eq(2).all() and 0.1 < weight.std() < 1
    assert not torch.equal(weight[:2], weight[2:]), "each rank drew its shard, not the whole"
    trains(model)


@case(r"'0' \(Scaled\) .* has no reset_parameters\(\)")
def meta_without_reset(wrong):
    with wrong():
        wrap(nn.Sequential(on_meta()))

    class WithReset(Scaled):
        def reset_parameters(self):
            nn.init.constant_(self.scale, 2.0)
            self.turns = self.rotations().cpu()

    with torch.device("meta"):
        model = WithReset()
    require_initialized(wrap(nn.Sequential(model)))
    model = wrap(on_meta(), param_init_fn=xla_fsdp.defer_init)
    with model.summon_full_params(model):
        model.init_weights()
    require_initialized(model)

    def with_turns(module):
        xla_fsdp.defer_init(module)
        if isinstance(module, Scaled):
            module.turns = module.rotations()

    plain = Scaled(True)
    plain.init_weights()
    for init in (xla_fsdp.defer_init, with_turns):
        model = wrap(on_meta(), param_init_fn=init)
        xla_fsdp.load_full_state_dict(model, plain.state_dict())
        if init is xla_fsdp.defer_init:
            with wrong("before 'turns' had values.* no checkpoint contains"):
                model(x())
            with model.summon_full_params(model):
                model.module.turns.copy_(model.module.rotations())
        torch.testing.assert_close(model(x()).cpu(), plain(x().cpu()))


@case("the first forward was called before '0.scale', '0.turns'.* had values")
def torchtitans_way(wrong):
    def build():
        model = nn.Sequential(on_meta(), nn.Identity())
        xla_fsdp.fully_shard(model[0])
        return xla_fsdp.fully_shard(model)

    model = build()
    with wrong():
        model(x())
    model.to_empty(device="xla")
    with wrong("before '0.turns', '0.scale', '0.linear.weight', '0.linear.bias' had values"):
        model(x())
    with torch.no_grad():
        model[0].init_weights()
    require_initialized(model)
    model = build().to_empty(device="xla")
    with xla_fsdp.XlaFullyShardedDataParallel.summon_full_params(model):
        model[0].init_weights()
    require_initialized(model)
    with wrong("Pass device='xla'"):
        model.to_empty(device="cpu")
    with wrong("Leave recurse out"):
        model.to_empty(device="xla", recurse=False)


@case("Leave the call out")
def to_empty_of_a_wrapper(wrong):
    model = wrap(nn.Linear(4, 4))
    before = xla_fsdp.full_state_dict(model, rank0_only=False)
    with wrong():
        model.to_empty(device="xla")
    after = xla_fsdp.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(before[name], after[name]) for name in before)


@case("'weight' of an ignored Linear is on the meta device.* ignored modules are not initialized")
def ignored_on_meta(wrong):
    model = linears()
    model[1].to("meta")
    with wrong():
        wrap(model, ignored_modules=[model[1]])
    model[1].to_empty(device="cpu").reset_parameters()
    model = wrap(model, ignored_modules=[model[1]])
    model(x()).sum().backward()


@case("is lazy and has no shape yet")
def lazy(wrong):
    with wrong():
        wrap(nn.LazyLinear(4))
    model = nn.LazyLinear(4)
    model(torch.ones(2, 4))
    trains(wrap(model))


@case("scanned blocks cannot be summoned")
def summoned_scanned(wrong):
    model = wrap(nn.Sequential(nn.Linear(4, 4), xla_fsdp.scan_blocks(linears())))
    with wrong(), model.summon_full_params(model):
        pass
    xla_fsdp.load_full_state_dict(model, xla_fsdp.full_state_dict(model, rank0_only=False))
    with model.summon_full_params(model, recurse=False):
        assert model.module[0].weight.shape == (4, 4)
    model = wrap(nn.Linear(4, 4))
    with wrong("writeback=True and rank0_only=True exclude each other"):
        model.summon_full_params(model, rank0_only=True).__enter__()
    with model.summon_full_params(model, rank0_only=True, writeback=False):
        pass
    with wrong("Read full parameters within FSDP.summon_full_params"):
        model.full_params  # noqa: B018
    with model.summon_full_params(model):
        assert model.full_params[0].shape == (4, 4)
        with wrong("Leave that context first"):
            model(x())
    model(x())


@case("wrap the module inside too")
def module_inside_of_another_unit(wrong):
    def reader():  # calls a module inside of its block, as diffusers' DiT does
        return Computes(lambda self, x: self.block(x) + self.block[0](x), block=linears())

    model = reader()
    model.block = wrap(model.block)
    with wrong():
        wrap(model)(x())
    model = reader()
    for module in (model.block[0], model.block, model):
        xla_fsdp.fully_shard(module)
    trains(model)


@case("max_norm=1.0")
def max_norm(wrong):
    with wrong():
        wrap(nn.Embedding(4, 4, max_norm=1.0))

    class Short(nn.Embedding):
        def forward(self, i):
            e = super().forward(i)
            return e * (1.0 / e.norm(dim=-1, keepdim=True)).clamp(max=1)

    trains(wrap(Short(4, 4)), torch.tensor([1, 2], device="xla"))


@case("scale_grad_by_freq=True")
def scaled_by_frequency(wrong):
    def build():
        return nn.Sequential(nn.Embedding(4, 4, scale_grad_by_freq=True), nn.Linear(4, 4))

    with wrong():
        wrap(build())
    ids = torch.tensor([1, 2], device="xla")
    model = build()
    model[0].scale_grad_by_freq = False
    trains(wrap(model), ids)
    model = build()
    wrap(model, ignored_modules=[model[0]])(ids).sum().backward()


@case("wrap the inner modules first")
def wrapped_twice(wrong):
    with wrong():
        wrap(wrap(nn.Linear(4, 4)))
    trains(wrap(nn.Sequential(wrap(nn.Linear(4, 4)))))


@case("has no forward.*Wrap its elements, or the module that calls them")
def list_of_modules(wrong):
    def calls(layer):
        return Computes(lambda self, x: self.layers[0](x), layers=nn.ModuleList([layer]))

    for layers in (nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleDict({"a": nn.Linear(4, 4)})):
        with wrong():
            wrap(layers)
    trains(wrap(calls(nn.Linear(4, 4))))
    trains(wrap(calls(wrap(nn.Linear(4, 4)))))


@case("'0' is. Wrap either manually or by policy")
def hand_and_policy(wrong):
    model = linears()
    model[0] = wrap(model[0])
    with wrong():
        wrap(model, auto_wrap_policy=xla_fsdp.always_wrap_policy)
    trains(wrap(linears(), auto_wrap_policy=xla_fsdp.always_wrap_policy))
    trains(wrap(model))


@case("'weight' belongs to two FSDP units, that of '0' .* from the inside out")
def outside_in(wrong):
    model = linears()
    xla_fsdp.fully_shard(model)
    xla_fsdp.fully_shard(model[0])
    with wrong():
        model(x())
    model = linears()
    xla_fsdp.fully_shard(model[0])
    trains(xla_fsdp.fully_shard(model))


@case("'0.0.weight', which is sharded here .* wrap the module inside too, and call it")
def module_of_two_wrappers(wrong):
    def used_twice(shared, inner=wrap):
        return wrap(nn.Sequential(inner(nn.Sequential(shared, nn.Linear(4, 4))), shared))

    model = used_twice(nn.Linear(4, 4))
    with wrong():
        model(x())
    trains(used_twice(wrap(nn.Linear(4, 4))))
    trains(used_twice(nn.Linear(4, 4), inner=lambda layers: layers))


@case("Taken has an attribute 'unshard', which .* would hide. Rename it, or wrap the module")
def attribute_of_ours(wrong):
    class Taken(nn.Linear):
        def unshard(self):
            pass

    with wrong():
        xla_fsdp.fully_shard(Taken(4, 4))
    trains(wrap(Taken(4, 4)))


@case("Leave assign out")
def assigned_state(wrong):
    for model in (wrap(nn.Linear(4, 4)), xla_fsdp.fully_shard(nn.Linear(4, 4))):
        state = copy.deepcopy(model.state_dict())
        with wrong():
            model.load_state_dict(state, assign=True)
        model.load_state_dict(state)
    outer, bias = nn.ModuleDict({"inner": model, "head": nn.Linear(4, 4)}), torch.ones(4)
    outer.load_state_dict({"head.bias": bias}, strict=False, assign=True)
    assert outer["head"].bias.data_ptr() == bias.data_ptr()
    with wrong():
        outer.load_state_dict(outer.state_dict(), assign=True)


@case("cannot be pickled")
def pickled(wrong):
    for model in (wrap(nn.Linear(4, 4)), xla_fsdp.fully_shard(nn.Linear(4, 4))):
        with wrong():
            pickle.dumps(model)
        pickle.dumps({k: v.cpu() for k, v in model.state_dict().items()})
        pickle.dumps(model.get_shard_metadata())
        pickle.dumps(xla_fsdp.full_state_dict(model, rank0_only=False))


@case("Change parameters within")
def changed_while_unsharded(wrong):
    model = xla_fsdp.fully_shard(nn.Linear(4, 4))
    model.unshard()
    with torch.no_grad():
        model.weight.fill_(3.0)
    with wrong():
        model.reshard()
    with xla_fsdp.XlaFullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        model.weight.fill_(3.0)
    assert xla_fsdp.full_state_dict(model, rank0_only=False)["weight"].eq(3).all()


@case("'weight' in its wrapper.*after the optimizer was.*Make the optimizer after wrapping")
def optimizer_before_wrapping(wrong):
    plain = nn.Linear(4, 4)
    kept = list(plain.parameters())
    optimizer = torch.optim.SGD(kept, lr=0.1)
    model = wrap(plain)
    model(x()).sum().backward()
    with wrong():
        optimizer.step()
    with wrong("from model.parameters()"):
        nn.utils.clip_grad_norm_(kept, 1.0)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    trains(model)
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wrap(plain.to("xla"))(x()).sum().backward()
    with wrong(r"made before module.*shape \[4, 4\] on cpu"):
        optimizer.step()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # it has what to train


@case("Adam has state of the shape of the full parameter '0.weight'.*load_full_optim_state_dict")
def full_optimizer_state(wrong):
    plain = linears()
    theirs = torch.optim.Adam(plain.parameters())
    plain(torch.ones(2, 4)).sum().backward()
    theirs.step()
    model = wrap(linears())
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(theirs.state_dict())
    model(x()).sum().backward()
    with wrong():
        optimizer.step()
    xla_fsdp.load_full_optim_state_dict(model, optimizer, theirs.state_dict())
    optimizer.step()


def scanned(compute):
    """Two equal blocks that compute this with the output of a linear layer."""
    blocks = [Computes(lambda self, x: compute(self.linear(x))) for _ in range(2)]
    for block in blocks:
        block.linear = nn.Linear(4, 4)
    return xla_fsdp.scan_blocks(blocks)


@case("Computes draws random numbers on the host.*choose by torch.where")
def drawn_on_the_host(wrong):
    with wrong():
        scanned(lambda y: y * torch.rand(()).to(y.device))(x())
    trains(scanned(lambda y: torch.where(torch.rand((), device=y.device) < 0.5, -y, y)))


@case("Computes reads values on the host.*torch.where instead of if")
def read_in_a_block(wrong):
    def selects(y):
        return torch.where(y.sum() > 0, y, -y)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.max().item()

    bag = nn.EmbeddingBag(4, 4, device="xla").requires_grad_(False)

    with wrong():
        scanned(lambda y: y if y.sum() > 0 else -y)(x())
    with wrong("backward of Computes calls aten._local_scalar_dense"):
        scanned(Scaled.apply)(x()).sum().backward()
    for hook, does in (
        (lambda state, bucket: bucket.reduce() * bucket.buffer().norm().item(), "reads values"),
        (lambda state, bucket: bucket.reduce(bucket.buffer() * torch.rand(()).item()), "draws"),
        (lambda state, bucket: bucket.reduce(torch.hypot(*[bucket.buffer()] * 2)), "calls aten"),
    ):
        blocks = scanned(selects)
        blocks.register_comm_hook(None, hook)
        with wrong(f"communication hook of Computes {does}"):
            blocks(x()).sum().backward()
    with wrong(r"reads values on the host \(_weight_norm\)"):
        block = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
        xla_fsdp.scan_blocks([block])(x())
    orthogonal = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)))
    # torch_xla has a kernel for the last ones, which computes on the host.
    for blocks, operator in (
        (xla_fsdp.scan_blocks([orthogonal]), "linalg_matrix_exp"),
        (scanned(lambda y: torch.hypot(y, y)), "hypot"),
        (scanned(lambda y: nn.functional.glu(torch.cat([y, y], -1))), "glu_backward"),
        (scanned(lambda y: nn.functional.rrelu(y, training=True)), "rrelu_with_noise"),
        (scanned(lambda y: torch.poisson(y)), "poisson"),
        (scanned(lambda y: torch.polar(y, y).abs()), "polar"),
        (scanned(lambda y: bag(y.long().clamp(0, 3))), "_embedding_bag"),
        (scanned(lambda y: y.masked_scatter(y > 0, y)), "masked_scatter_backward"),
    ):
        with wrong(f"calls aten.{operator}.*, which torch_xla computes"):
            blocks(x()).sum().backward()
    trains(scanned(selects))


@case("hooks.*remove it, or wrap each block separately")
def hook_on_a_block(wrong):
    blocks = list(linears())
    hook = blocks[1].register_forward_hook(lambda *args: None)
    with wrong():
        xla_fsdp.scan_blocks(blocks)
    hook.remove()
    trains(xla_fsdp.scan_blocks(blocks))


@case("Call all of them, x = blocks")
def blocks_one_by_one(wrong):
    blocks = xla_fsdp.scan_blocks(linears())
    with wrong():
        for block in blocks:
            block(x())
    trains(blocks)


@pytest.mark.parametrize("part", range(4))
@on_each_rank(2)
def test_advice_works(rank, part):
    for name in list(CASES)[part::4]:
        torch.manual_seed(0)
        try:
            CASES[name]()
        except BaseException as error:
            raise AssertionError(f"{name}: {error}") from error
