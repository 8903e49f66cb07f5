"""timm's models, optimizer factory, schedule, EMA and clipping, against plain torch.

Only the wrapping and the device differ; see train.py of timm for the loop.
"""

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad

import xla_fsdp

RANKS, STEPS, BATCH = 2, 3, 8
NAMES = {
    "vit": dict(model_name="vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2),
    # Batch norm computes with the batch of a rank, as in timm without --sync-bn; so here is a
    # model with group norm.
    "resnet": dict(model_name="resnet18", norm_layer=lambda c, **_: torch.nn.GroupNorm(4, c)),
}
CLIPS = {"norm": 0.5, "value": 0.01}


def build(name: str, checkpointing: bool):
    torch.manual_seed(0)
    model = timm.create_model(num_classes=10, **NAMES[name])
    model.set_grad_checkpointing(checkpointing)
    return model


def train(model, mode: str, device: str, rank: int = 0, ranks: int = 1):
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1, eps=1e-4)
    decayed = [sum(1 for _ in g["params"]) for g in optimizer.param_groups if g["weight_decay"]]
    assert decayed and decayed[0] > 4  # weights decay, biases do not
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=STEPS, warmup_epochs=1)
    average = ModelEmaV3(model, decay=0.9)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 3, 32, 32, generator=generator).chunk(ranks)[rank].to(device)
        labels = torch.randint(10, (BATCH,), generator=generator).chunk(ranks)[rank].to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=CLIPS[mode], mode=mode)
        optimizer.step()
        scheduler.step(step + 1)
        average.update(model, step=step)
        losses.append(loss.item())
    return losses, average


def full(model) -> dict:
    return xla_fsdp.full_state_dict(model, rank0_only=False)


def main(rank: int, cells):
    found = []
    for name, mode, checkpointing in cells:
        model = build(name, checkpointing)
        for block in model.blocks if name == "vit" else (model.layer1, model.layer2):
            xla_fsdp.fully_shard(block)
        xla_fsdp.fully_shard(model)
        losses, average = train(model, mode, "xla", rank, RANKS)
        model(torch.ones(1, 3, 32, 32, device="xla")).sum().backward()
        try:  # adaptive clipping takes norms of rows
            dispatch_clip_grad(model.parameters(), value=0.02, mode="agc")
            raise AssertionError("adaptive clipping did not raise")
        except xla_fsdp.ShardedParameterError:
            model.zero_grad()
        found.append((losses, full(model), full(average.module)))
    return found


if __name__ == "__main__":
    cells = [("vit", "norm", False), ("vit", "value", True), ("resnet", "norm", False)]
    ranks = xla_fsdp.launch(main, (cells,), num_devices=RANKS)
    for number, cell in enumerate(cells):
        own = [rank[number] for rank in ranks]
        name, mode, checkpointing = cell
        plain = build(name, checkpointing)
        losses, average = train(plain, mode, "cpu")
        found = [sum(one) / RANKS for one in zip(*(rank[0] for rank in own), strict=True)]
        torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5, msg=f"losses of {cell}")
        for state, model in ((own[0][1], plain), (own[0][2], average.module)):
            for key, value in model.state_dict().items():
                torch.testing.assert_close(
                    state[key], value, rtol=1e-3, atol=1e-4, msg=f"{key} of {cell}"
                )
