"""diffusers' models, noise schedule, learning rate schedule and EMA, against plain torch.

Layers are recomputed by diffusers' own gradient checkpointing. Only the wrapping and the device
differ; see examples/unconditional_image_generation of diffusers for the loop.
"""

import sys

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

import xla_fsdp

RANKS, STEPS, BATCH, SIZE = 2, 3, 4, 8


def unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=SIZE, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def dit() -> DiTTransformer2DModel:
    return DiTTransformer2DModel(
        sample_size=SIZE, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2,
        attention_head_dim=8, norm_num_groups=4, num_embeds_ada_norm=10, dropout=0.0,
    )  # fmt: skip


MODELS = {"unet": unet, "dit": dit}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    if name == "dit":  # it replaces labels at random, for guidance
        for module in model.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
    model.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing
    return model


def layers(model: torch.nn.Module):
    if isinstance(model, DiTTransformer2DModel):
        # The model itself calls this part of its first block, after the last one.
        return [model.transformer_blocks[0].norm1.emb, *model.transformer_blocks]
    return [*model.down_blocks, model.mid_block, *model.up_blocks]


def train(model, name: str, device: str, rank: int = 0, ranks: int = 1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scheduler = get_scheduler(
        "cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=STEPS + 1
    )
    noises = DDPMScheduler(num_train_timesteps=100)
    average = EMAModel(model.parameters(), decay=0.9)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        shape = BATCH, 4, SIZE, SIZE
        images, noise = (torch.randn(shape, generator=generator) for _ in range(2))
        times = torch.randint(100, (BATCH,), generator=generator)
        labels = torch.randint(10, (BATCH,), generator=generator)
        images, noise, times, labels = (
            each.chunk(ranks)[rank].to(device) for each in (images, noise, times, labels)
        )
        noisy = noises.add_noise(images, noise, times)
        more = {"class_labels": labels} if name == "dit" else {}
        loss = torch.nn.functional.mse_loss(model(noisy, times, **more).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.item())
    return losses, average


def states(model, average):
    """The weights, and their average in the place of the weights."""
    trained = xla_fsdp.full_state_dict(model, rank0_only=False)
    average.copy_to(model.parameters())
    return trained, xla_fsdp.full_state_dict(model, rank0_only=False)


def main(rank: int, cells):
    found = []
    for name in cells:
        model = build(name)
        for layer in layers(model):
            xla_fsdp.fully_shard(layer)
        xla_fsdp.fully_shard(model)
        losses, average = train(model, name, "xla", rank, RANKS)
        found.append((losses, *states(model, average)))
    return found


if __name__ == "__main__":
    cells = sys.argv[1:] or list(MODELS)
    ranks = xla_fsdp.launch(main, (cells,), num_devices=RANKS)
    for number, name in enumerate(cells):
        (first, trained, averaged), (second, *_) = (rank[number] for rank in ranks)
        plain = build(name)
        losses, average = train(plain, name, "cpu")
        found = [sum(pair) / RANKS for pair in zip(first, second, strict=True)]
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
        expected = {key: value.clone() for key, value in plain.state_dict().items()}
        average.copy_to(plain.parameters())
        for state, right in ((trained, expected), (averaged, plain.state_dict())):
            assert state.keys() == right.keys()
            for key, value in right.items():
                torch.testing.assert_close(
                    state[key], value, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}"
                )
        print(f"{name}: losses {found}, expected {losses}")
