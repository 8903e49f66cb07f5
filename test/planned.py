"""Training steps for plans on the TPU compiler."""

import torch

from xla_fsdp.planning.protobuf import message_classes

_MESSAGES = {
    "Module": ["computations Computation* 3"],
    "Computation": ["instructions Instruction* 2"],
    "Instruction": ["name bytes 1", "opcode bytes 2", "shape bytes 3"],
}


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


def described(program):
    """What a traced program reads and computes, for the difference that a failed test shows."""
    module = message_classes("xla_fsdp.described", _MESSAGES)["Module"].FromString(program.hlo)
    instructions = [
        f"{one.name.decode()} {one.opcode.decode()} {one.shape.hex()}"
        for computation in module.computations
        for one in computation.instructions
    ]
    return program.arguments, dict(program.donated), instructions
