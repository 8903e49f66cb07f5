"""Training steps for plans on the TPU compiler."""

import torch

from xla_fsdp.planning.program.hlo import leaves, messages, parse_module

EMPTY = "HloModule m\nENTRY main {\n  ROOT p = f32[] parameter(0)\n}"


def hlo(text, devices=1):
    """The HloModuleProto of the text of HLO."""
    import jaxlib._jax

    module = jaxlib._jax.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    run_by = messages()["HloModule"](device_assignment={"replica_count": devices})
    return module + run_by.SerializeToString()


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
    instructions = [
        f"{one.name} {one.opcode} {leaves(one.shape)}"
        for one in parse_module(program.hlo).instructions
    ]
    return program.arguments, dict(program.donated), instructions
