"""AdamW with moments of a byte each."""

import pytest
import torch
from test_optim import gradients, plain, train_plain, weights

from xla_fsdp.optim import AdamW8bit, adam8bit

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1}
STEPS = range(1, 5)


def published_values(signed: bool) -> torch.Tensor:
    """By the papers: in each decade the means between evenly spaced limits; 0 and 1."""
    found = [0.0, 1.0]
    for decade in range(7):
        limits = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        means = (limits[1:] + limits[:-1]) / 2 * 10.0 ** (decade - 6)
        found += means.tolist() + (-means).tolist() * signed
    return torch.tensor(sorted(found), dtype=torch.float64)


@pytest.mark.parametrize("signed", [True, False])
def test_an_element_becomes_the_nearest_published_value(signed):
    assert len(published_values(signed)) == 256
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator) * 10 ** (-8 * torch.rand(5000, generator=generator))
    x = x if signed else x.abs()
    x[2048:4096] *= 1e-3  # a block of another scale
    numbers, scales = adam8bit.encode(x, signed)
    assert numbers.dtype is torch.uint8 and numbers.shape == x.shape and scales.shape == (3,)
    found = adam8bit.decode(numbers, scales, signed)
    for number, block in enumerate(x.split(2048)):
        known = published_values(signed) * block.abs().max().double()
        least = (block.double()[:, None] - known).abs().amin(1)
        error = (found[2048 * number :][: len(block)].double() - block.double()).abs()
        torch.testing.assert_close(error, least, rtol=1e-5, atol=1e-7 * block.abs().max().item())
    zeros = adam8bit.decode(*adam8bit.encode(torch.zeros(3, 5), signed), signed)
    assert torch.equal(zeros, torch.zeros(3, 5))


def nearest(x, signed):
    """What is left of ``x`` after encoding, by looking up."""
    known = published_values(signed)
    blocks = [
        known[(b[:, None] / b.abs().max().clamp(min=1e-45) - known).abs().argmin(1)] * b.abs().max()
        for b in x.double().reshape(-1).split(adam8bit.BLOCK)
    ]
    return torch.cat(blocks).view(x.shape).float()


def reference(encoded: bool) -> dict[str, torch.Tensor]:
    """AdamW; with ``encoded``, the moments as 8 bits leave them."""
    model, states = plain(), {}
    (beta1, beta2), lr = OPTIONS["betas"], OPTIONS["lr"]
    for t in STEPS:
        for name, g in gradients(model, t).items():
            w, (m, v) = model.get_parameter(name), states.get(name, (0, 0))
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            states[name] = (nearest(m, True), nearest(v, False)) if encoded else (m, v)
            update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
            with torch.no_grad():
                w.mul_(1 - lr * OPTIONS["weight_decay"]).sub_(lr * update)
    return weights(model)


def test_on_plain_parameters():
    for size, encoded in ((0, True), (4096, False)):
        model = plain()
        optimizer = AdamW8bit(model.parameters(), min_8bit_size=size, **OPTIONS)
        found = train_plain(model, optimizer, STEPS)
        torch.testing.assert_close(found, reference(encoded), rtol=1e-4, atol=1e-4)
    model = plain()
    found = train_plain(model, torch.optim.AdamW(model.parameters(), **OPTIONS), STEPS)
    torch.testing.assert_close(found, reference(False), rtol=1e-5, atol=1e-6)
