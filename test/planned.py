"""Training steps for plans on the TPU compiler."""

import torch


def training_step(make, *shape):
    """Builds a model and trains it once on values of this shape."""

    def step():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.randn(*shape).to("xla")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
