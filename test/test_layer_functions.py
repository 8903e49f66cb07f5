"""Cross entropy in a loop over the vocabulary, einsum, softmax: values and gradients of torch."""

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank, raises, without_ranks
from small_models import Computes
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import plan
from xla_fsdp.layers import einsum, jax_call, linear_cross_entropy, softmax

TOKENS, WIDTH, WORDS = 12, 16, 50
# chunk, options; 50 is not a multiple of any chunk
CASES = [
    (8, {}),
    (7, {"label_smoothing": 0.1, "ignore_index": 3}),
    (64, {"reduction": "sum"}),
    (50, {"reduction": "none", "label_smoothing": 0.2}),
]


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, TOKENS // 3, WIDTH, generator=generator)
    weight = torch.randn(WORDS, WIDTH, generator=generator)
    labels = torch.randint(0, WORDS, (3, TOKENS // 3), generator=generator)
    labels[0, 0], labels[1, 1] = -100, 3
    labels[2, 2] = 3
    return hidden.to(dtype), weight.to(dtype), labels


def with_gradients(loss_of, hidden, weight, labels):
    hidden, weight = (t.clone().requires_grad_() for t in (hidden, weight))
    loss = loss_of(hidden, weight, labels)
    factor = torch.linspace(1, 2, TOKENS, device=loss.device).view(labels.shape)
    (loss * factor if loss.dim() else 3 * loss).sum().backward()
    return [loss.detach(), hidden.grad, weight.grad]


def whole(hidden, weight, labels, **options):
    loss = F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), labels.flatten(),
                           **options)  # fmt: skip
    return loss.view(labels.shape) if loss.dim() else loss


@on_each_rank(2, timeout=1500)
def test_losses_and_gradients_are_those_of_torch(rank):
    for chunk, options in CASES if rank == 0 else []:
        hidden, weight, labels = inputs()
        if options.get("ignore_index"):
            labels = labels.clamp_min(0)
        tensors = hidden, weight, labels
        found = with_gradients(
            lambda *t, c=chunk, o=options: linear_cross_entropy(*t, chunk=c, **o),
            *(t.to("xla") for t in tensors),
        )
        expected = with_gradients(lambda *t, o=options: whole(*t, **o), *tensors)
        torch.testing.assert_close([t.cpu() for t in found], expected, rtol=1e-5, atol=1e-6)
    # In bfloat16 logits keep float32, which torch rounds: as exact as the inputs.
    narrow = with_gradients(linear_cross_entropy, *(t.to("xla") for t in inputs(torch.bfloat16)))
    assert [t.dtype for t in narrow] == [torch.float32, torch.bfloat16, torch.bfloat16]
    hidden, weight, labels = inputs(torch.bfloat16)
    wide = with_gradients(whole, hidden.float(), weight.float(), labels)
    torch.testing.assert_close([t.float().cpu() for t in narrow], wide, rtol=2e-2, atol=2e-2)


@on_each_rank(2)
def test_ranks_share_what_is_lowered(rank):
    if rank == 0:
        jax_call._computation.cache_clear()
    xm.rendezvous("nothing is lowered")
    linear_cross_entropy(*(tensor.to("xla") for tensor in inputs()))
    xm.rendezvous("all is lowered")
    assert jax_call._computation.cache_info().misses == 1


@on_each_rank(1)
def test_labels_beyond_the_vocabulary_are_no_number(rank):
    """A device cannot raise as torch does on a CPU."""
    for wrong in (WORDS, -1, 2**32 + 1):
        hidden, weight, labels = inputs()
        labels[1, 2] = wrong
        options = {"reduction": "none", "chunk": 16, "label_smoothing": 0.1}
        tensors = [t.to("xla") for t in (hidden, weight, labels)]
        found = with_gradients(lambda *t, o=options: linear_cross_entropy(*t, **o), *tensors)
        losses, of_hidden, of_weight = (one.cpu() for one in found)
        where = torch.zeros(3, 4, dtype=torch.bool)
        where[1, 2] = True
        assert torch.equal(losses.isnan(), where)
        assert losses[0, 0] == 0  # ignored
        assert torch.equal(of_hidden.isnan().all(-1), where) and of_weight.isnan().all()


def test_refusals_and_other_devices():
    hidden, weight, labels = inputs()
    assert torch.equal(linear_cross_entropy(*inputs()), whole(hidden, weight, labels))
    assert torch.equal(softmax(weight, 0), torch.softmax(weight, 0))
    product = einsum("ab,cb->ac", weight, weight)
    assert torch.equal(product, torch.einsum("ab,cb->ac", weight, weight))
    given = {"hidden": hidden, "weight": weight, "labels": labels}
    for text, wrong in (
        ("full only in its wrapper's forward", {"weight": weight.flatten()}),
        ("labels must be integers of shape (3, 4)", {"labels": labels.flatten()}),
        ("chunk must be a positive integer", {"chunk": 0}),
        ("label_smoothing must be from 0 to 1", {"label_smoothing": 2.0}),
        ("reduction must be one of", {"reduction": "avg"}),
    ):
        raises(ValueError, re.escape(text), linear_cross_entropy, **given | wrong)


@pytest.mark.slow
@without_ranks
def test_plan():
    def step():
        def loss(self, hidden):
            labels = torch.zeros(1, 4096, dtype=torch.long, device="xla")
            return linear_cross_entropy(hidden, self.head.weight, labels, chunk=1024)

        head = Computes(loss, head=nn.Linear(128, 8192, bias=False))
        model = FSDP(head, compute_dtype=torch.bfloat16)
        model(torch.zeros(1, 4096, 128, device="xla", requires_grad=True)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    report = plan(step, "v5litepod-4", ranks=[0], cache=False, progress=False)
    # Logits are 128 MiB in float32; what is kept of them for the backward, in bfloat16, half of it.
    assert report.memory.peak < 32 * 2**20


CONTRACTIONS = [
    ("bsw,hdw->bhsd", (2, 3, 8), (2, 4, 8)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bhqk,bhkd->bqhd", (2, 3, 4, 6), (2, 3, 6, 5)),
    ("bhsd,whd->bsw", (2, 2, 3, 4), (8, 2, 4)),
    ("ab,cb->ca", (3, 4), (5, 4)),
    ("ab,ab->ba", (3, 4), (3, 4)),
    ("a,b->ba", (3,), (4,)),
    ("ab,ab->", (3, 4), (3, 4)),
    (" a b , b c -> a c ", (3, 4), (4, 5)),
    ("ab,bc->ac", (0, 4), (4, 5)),
]
# Those of torch: a letter alone, twice, none stated, any.
TORCHS = [
    ("ab,bc->c", (3, 4), (4, 5)),
    ("aab,bc->ac", (3, 3, 4), (4, 5)),
    ("ab,bc", (3, 4), (4, 5)),
    ("...b,bc->...c", (2, 3, 4), (4, 5)),
]


def differentiated(einsum, equation, x, y):
    x, y = x.requires_grad_(), y.requires_grad_()
    product = einsum(equation, x, y)
    if equation in (equation for equation, *_ in TORCHS):  # torch_xla's has one gradient
        return [product.detach(), *torch.autograd.grad(product.square().sum(), (x, y))]
    grads = torch.autograd.grad(product.square().sum(), (x, y), create_graph=True)
    (second,) = torch.autograd.grad(grads[0].square().sum(), (y,))
    return [one.detach() for one in (product, *grads, second)]


@on_each_rank(1)
def test_einsum_is_that_of_torch(rank):
    torch.manual_seed(1)
    for equation, *sizes in CONTRACTIONS + TORCHS:
        x, y = (torch.randn(size) for size in sizes)
        ours = differentiated(einsum, equation, x.to("xla"), y.to("xla"))
        torch_xla.sync()
        theirs = differentiated(torch.einsum, equation, x.clone(), y.clone())
        torch.testing.assert_close([one.cpu() for one in ours], theirs, rtol=1e-4, atol=1e-4)
    x, y = torch.ones(3, 4, device="xla"), torch.ones(5, 6, device="xla")
    for equation, contracted in (("ab,cd->abcd", True), ("ab,cd->ac", False), ("ab,cd", False)):
        made = einsum(equation, x.requires_grad_(), y)
        assert (type(made.grad_fn).__name__ == "ProductBackward") is contracted, equation
    for wrong in ("ab,bc->ac", "ab,bc->c", "abc,cbd->ad"):
        raises(ValueError, f"einsum.*{wrong}", einsum, wrong, x, y)


def as_on(kind):
    """As on chips of a kind; ``None``: as it is."""
    own = xm.xla_device_kind
    return mock.patch.object(xm, "xla_device_kind", lambda device: kind or own(device))


def first_and_second(softmax, x, dim):
    x = x.requires_grad_()
    weight = torch.linspace(-1, 1, x.numel()).view(x.shape).to(x)
    y = softmax(x, dim)
    (grad,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.float().square().sum(), x)
    return y.detach(), grad.detach(), second


@pytest.mark.parametrize("kind", [None, "TPU v5", "TPU v6 lite"])
@on_each_rank(1)
def test_softmax_is_that_of_torch(rank, kind):
    torch.manual_seed(3)
    # Gradients are differences of numbers up to 1. In bfloat16 those of gradients, torch's as well,
    # say nothing.
    close = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-14}
    for shape, dim in (((3, 5, 7), -1), ((3, 5, 7), 1), ((4,), 0), ((2, 0), 1)):
        for dtype, bound in close.items():
            x = 5 * torch.randn(shape, dtype=dtype)
            with as_on(kind):
                ours = first_and_second(softmax, x.to("xla"), dim)
                torch_xla.sync()
            theirs = first_and_second(torch.softmax, x.double(), dim)
            compared = slice(2 if dtype == torch.bfloat16 else None)
            for one, other in zip(ours[compared], theirs[compared], strict=True):
                assert one.dtype == dtype
                torch.testing.assert_close(one.cpu().double(), other, rtol=bound, atol=bound)
    with as_on(kind):
        hidden = softmax(torch.tensor([[0.0, -torch.inf], [-torch.inf] * 2]).to("xla"))
        torch_xla.sync()
        raises((IndexError, RuntimeError), "of range", softmax, torch.ones(2, 2, device="xla"), 2)
    expected = torch.tensor([[1.0, 0.0], [torch.nan] * 2])
    torch.testing.assert_close(hidden.cpu(), expected, equal_nan=True)


@on_each_rank(1)
def test_one_number_a_row_is_computed_once(rank):
    def text(kind):
        x = torch.ones(2, 3, 4, device="xla", requires_grad=True)
        with as_on(kind):
            y = softmax(x)
            (grad,) = torch.autograd.grad((y * y).sum(), x)
        return torch_xla._XLAC._get_xla_tensors_hlo([grad])

    texts = [text(kind) for kind in ("CPU", "TPU v5", "TPU v6 lite")]
    barriers = [re.findall(r"\S+ opt-barrier\(", text) for text in texts]
    assert [len(some) for some in barriers] == [0, 1, 1]
    assert all("f32[2,3,1]" in some[0] for some in barriers[1:])
