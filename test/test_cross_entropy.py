"""The cross entropy that goes over the vocabulary in a loop: equal to torch's on whole logits."""

import re

import pytest
import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
from on_ranks import finish_step, on_each_rank, without_ranks
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import plan
from xla_fsdp.layers import jax_call, linear_cross_entropy

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


class Head(nn.Module):
    def __init__(self, fused=True, width=WIDTH, words=WORDS, chunk=16):
        super().__init__()
        torch.manual_seed(2)
        self.fused, self.chunk = fused, chunk
        self.below = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, hidden, labels):
        hidden = self.below(hidden)
        if self.fused:
            return linear_cross_entropy(hidden, self.head.weight, labels, chunk=self.chunk)
        return whole(hidden, self.head.weight, labels)


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


def trained(model, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hidden, _, labels = inputs()
    losses = []
    for _ in range(2):
        loss = model(hidden.to(device), labels.to(device))
        loss.backward()
        finish_step(optimizer)
        losses.append(loss.item())
    return losses


@on_each_rank(2)
def test_a_wrapped_head_trains_as_in_plain_torch(rank):
    expected = trained(Head(fused=False), "cpu")
    assert trained(FSDP(Head()), "xla") == pytest.approx(expected, rel=1e-5)


@on_each_rank(2)
def test_ranks_share_what_is_lowered(rank):
    """Each its own would be a program each, whose collectives may come in different orders."""
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
    given = {"hidden": hidden, "weight": weight, "labels": labels}
    for text, wrong in (
        ("full only in its wrapper's forward", {"weight": weight.flatten()}),
        ("labels must be integers of shape (3, 4)", {"labels": labels.flatten()}),
        ("chunk must be a positive integer", {"chunk": 0}),
        ("label_smoothing must be from 0 to 1", {"label_smoothing": 2.0}),
        ("reduction must be one of", {"reduction": "avg"}),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            linear_cross_entropy(**given | wrong)


@pytest.mark.slow
@without_ranks
def test_plan():
    def step():
        model = FSDP(Head(width=128, words=8192, chunk=1024), compute_dtype=torch.bfloat16)
        hidden = torch.zeros(1, 4096, 128, device="xla")
        model(hidden, torch.zeros(1, 4096, dtype=torch.long, device="xla")).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    report = plan(step, "v5litepod-4", ranks=[0], cache=False, progress=False)
    # Logits are 128 MiB in float32; what is kept of them for the backward, in bfloat16, half of it.
    assert report.memory.peak < 32 * 2**20
