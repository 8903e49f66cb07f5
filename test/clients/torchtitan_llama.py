"""torchtitan's LLaMA, parallelized, trained and clipped by its own code, against plain torch."""

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.llama3.infra import parallelize
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

import xla_fsdp

RANKS, STEPS, VOCABULARY, SEQUENCE = 2, 3, 32, 8
# The import line: what torchtitan takes from torch.distributed.fsdp.
parallelize.fully_shard = xla_fsdp.fully_shard
parallelize.MixedPrecisionPolicy = xla_fsdp.MixedPrecisionPolicy

# The device line: torchtitan finds no accelerator, and its mesh is of CPUs.
parallel_dims.device_type = "cpu"


def dims() -> ParallelDims:
    return ParallelDims(
        dp_replicate=1, dp_shard=RANKS, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=RANKS
    )


def job() -> JobConfig:
    config = JobConfig()
    config.training.seq_len = SEQUENCE
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "full"
    return config


def on_meta() -> Transformer:
    arguments = TransformerModelArgs(
        dim=16, n_layers=2, n_heads=2, vocab_size=VOCABULARY, multiple_of=8, max_seq_len=SEQUENCE
    )
    with torch.device("meta"):
        return Transformer(arguments)


def train(model: Transformer, device: str, rank: int = 0, ranks: int = 1):
    optimizers = build_optimizers([model], JobConfig().optimizer, dims())
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(VOCABULARY, (4, SEQUENCE + 1), generator=generator)
        batch = batch.chunk(ranks)[rank].to(device)
        optimizers.zero_grad()
        loss = cross_entropy_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        norm = clip_grad_norm_([*model.parameters()], 1.0)
        optimizers.step()
        found.append((loss.item(), norm.item()))
    return found


def main(rank: int, config: JobConfig):
    model = parallelize.parallelize_llama(on_meta(), dims(), config)
    model.to_empty(device="xla")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    before = xla_fsdp.full_state_dict(model, rank0_only=False)
    return before, train(model, "xla", rank, RANKS), xla_fsdp.full_state_dict(model)


if __name__ == "__main__":
    # For the mesh. CPU ranks are threads, which share one process group of torch.
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    results = xla_fsdp.launch(main, (job(),), num_devices=RANKS)
    before, _, after = results[0]
    plain = on_meta().to_empty(device="cpu")
    with torch.no_grad():
        plain.init_weights()
    assert before.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():  # drawn from the same distribution
        torch.testing.assert_close(before[name].std(), value.std(), rtol=0.3, atol=1e-6)
        torch.testing.assert_close(before[name].mean(), value.mean(), rtol=0.1, atol=0.1)
    plain.load_state_dict(before)
    for step, (loss, norm) in enumerate(train(plain, "cpu")):
        found = [result[1][step] for result in results]
        torch.testing.assert_close(sum(one[0] for one in found) / RANKS, loss, rtol=1e-5, atol=0)
        assert all(abs(one[1] - norm) < 1e-5 * norm for one in found), (found, norm)
    torch.testing.assert_close(after, plain.state_dict(), rtol=1e-3, atol=1e-4)
