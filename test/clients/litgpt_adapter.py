"""litgpt's adapters, finetuned and sampled with Lightning Fabric, against plain torch.

The scripts in the folder extensions/xla of litgpt are in none of its packages. So this one makes
their calls: it loads and wraps one block at a time, trains and saves adapters, and generates with a
cache.
"""

import tempfile
from functools import partial
from pathlib import Path

import lightning
import torch
import torch_xla.core.xla_model as xm
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.utilities import ThroughputMonitor
from litgpt.adapter import (
    GPT,
    Block,
    CausalSelfAttention,
    Config,
    adapter_filter,
    mark_only_adapter_as_trainable,
)
from litgpt.generate.base import generate, next_token
from litgpt.utils import chunked_cross_entropy, lazy_load

import xla_fsdp.integrations.lightning

# The first changed line. The second is the number of devices, where the scripts count TPUs.
xla_fsdp.integrations.lightning.install_drop_in()
from lightning.fabric.strategies import XLAFSDPStrategy  # noqa: E402
from lightning.fabric.strategies.xla_fsdp import (  # noqa: E402
    _activation_checkpointing_auto_wrapper,
)

RANKS = 2
STEPS, MICRO, BATCH, LENGTH, WARMUP = 3, 2, 2, 9, 2
CONFIG = Config(
    block_size=32, vocab_size=30, padded_vocab_size=32, n_layer=2, n_head=4, n_embd=32,
    n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, bias=False,
    norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=48,
    adapter_prompt_length=3, adapter_start_layer=0,
)  # fmt: skip
PROMPT, ANSWER = torch.tensor([3, 1, 4, 1, 5]), 6


def materialize(model: torch.nn.Module, device) -> None:
    """Creates the tensors that are still on the meta device."""
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()


def load_by_block(fabric, path: Path) -> GPT:
    """Only the first rank reads the file, and no rank has more than one full block."""
    with fabric.init_module(empty_init=False), torch.device("meta"):
        model = GPT(CONFIG)
    first = fabric.local_rank == 0
    state = torch.load(path, map_location="cpu" if first else "meta", mmap=False)
    options = fabric.strategy._parse_fsdp_kwargs()
    by_hand = partial(_activation_checkpointing_auto_wrapper, set())
    wrap = options.pop("auto_wrapper_callable", by_hand)
    options.pop("auto_wrap_policy", None)

    def from_first_rank(names) -> dict:
        values = {name: state.pop(name) for name in names}
        here = {n: torch.empty_like(v, device="cpu") if v.is_meta else v for n, v in values.items()}
        return fabric.broadcast(here)

    for number, block in enumerate(model.transformer.h):
        prefix = f"transformer.h.{number}."
        values = from_first_rank([name for name in state if name.startswith(prefix)])
        values = {name.removeprefix(prefix): value for name, value in values.items()}
        assert not block.load_state_dict(values, strict=False, assign=True).unexpected_keys
        materialize(block, "cpu")
        model.transformer.h[number] = wrap(block.to(torch.float32), **options)
    for name in list(state):
        value = from_first_rank([name])[name].to(device=fabric.device, dtype=torch.float32)
        found = model.load_state_dict({name: value}, strict=False, assign=True)
        assert not found.unexpected_keys
    materialize(model, fabric.device)
    return model


def batch_of(number: int, rank: int, ranks: int, device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(CONFIG.vocab_size, (RANKS * BATCH, LENGTH), generator=generator)
    return rows.chunk(ranks)[rank].to(device)


def train(model, optimizer, device, rank=0, ranks=1, fabric=None) -> list[float]:
    losses = []
    monitor = fabric and ThroughputMonitor(fabric, window_size=2)
    for number in range(STEPS * MICRO):
        for group in optimizer.param_groups:
            group["lr"] = 0.3 * min(1, (1 + number // MICRO) / WARMUP)
        tokens = batch_of(number, rank, ranks, device)
        accumulating = (number + 1) % MICRO != 0

        def forward_backward(tokens=tokens):
            logits = model(tokens, lm_head_chunk_size=4)
            logits[-1] = logits[-1][..., :-1, :]
            # The last chunk has one position, which predicts nothing.
            logits = [chunk for chunk in logits if chunk.size(1)]
            loss = chunked_cross_entropy(logits, tokens[..., 1:])
            fabric.backward(loss / MICRO) if fabric else (loss / MICRO).backward()
            return loss.detach()

        if fabric:
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = forward_backward()
            xm.mark_step()
        else:
            loss = forward_backward()
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if fabric:
            done = number + 1
            lengths = done * BATCH * LENGTH
            monitor.update(time=done, batches=done, samples=done * BATCH, lengths=lengths, flops=9)
            monitor.compute_and_log(step=done)
    return losses


def adapters(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def finetune(fabric, folder: Path):
    model = fabric.setup_module(load_by_block(fabric, folder / "lit_model.pth"))
    mark_only_adapter_as_trainable(model)
    model.max_seq_length = LENGTH
    before = xla_fsdp.full_state_dict(model._forward_module, rank0_only=False)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(adapters(model), lr=0.0))
    losses = train(
        model, optimizer, fabric.device, fabric.global_rank, fabric.world_size, fabric=fabric
    )
    fabric.save(folder / "adapter.pth", {"model": model}, filter={"model": adapter_filter})
    return before, fabric.all_reduce(torch.tensor(losses, device=fabric.device)).cpu().tolist()


def sample(fabric, folder: Path):
    with fabric.init_module(empty_init=True):
        model = GPT(CONFIG)
    state = lazy_load(folder / "lit_model.pth")
    state.update(lazy_load(folder / "adapter.pth")["model"])
    model.load_state_dict(state)
    model = fabric.setup_module(model.eval())
    total = len(PROMPT) + ANSWER
    with fabric.init_tensor():
        model.max_seq_length = total
        model.set_kv_cache(batch_size=1)
    tokens, found = PROMPT.to(fabric.device), [PROMPT]
    positions = torch.arange(len(PROMPT), device=fabric.device)
    for at in range(len(PROMPT), total):
        with torch.no_grad():
            tokens = next_token(model, positions, tokens.view(1, -1), top_k=1)
        xm.mark_step()
        found.append(tokens.cpu())
        positions = torch.tensor([at], device=fabric.device)
    return torch.cat(found)


def launched(function, *arguments, **options):
    strategy = XLAFSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full", **options)
    logger = CSVLogger(arguments[0], "log")
    fabric = lightning.Fabric(devices=RANKS, strategy=strategy, precision="32-true", loggers=logger)
    return fabric.launch(function, *arguments)


def against_plain_torch(folder: Path) -> None:
    # litgpt keeps the adapters' keys and values of its first step, so later ones would not train
    # the adapters. Here every step computes them.
    CausalSelfAttention.adapter_kv_cache = property(lambda self: None, lambda self, value: None)
    options = {"activation_checkpointing_policy": {Block}, "sequential_save": True}
    before, found = launched(finetune, folder, **options)
    plain = GPT(CONFIG)
    plain.load_state_dict(before)
    mark_only_adapter_as_trainable(plain)
    losses = train(plain, torch.optim.SGD(adapters(plain), lr=0.0), "cpu")
    del CausalSelfAttention.adapter_kv_cache
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    saved = torch.load(folder / "adapter.pth")["model"]
    expected = {n: v for n, v in plain.state_dict().items() if adapter_filter(n, v)}
    assert len(expected) == 2 * CONFIG.n_layer
    assert not any(torch.equal(expected[name], before[name]) for name in expected)
    torch.testing.assert_close(saved, expected, rtol=1e-4, atol=1e-6)
    answer = launched(sample, folder)
    plain = GPT(CONFIG).eval()
    plain.load_state_dict(torch.load(folder / "lit_model.pth") | expected)
    plain.set_kv_cache(batch_size=1)
    expected = generate(plain, PROMPT, len(PROMPT) + ANSWER, top_k=1)
    assert answer.tolist() == expected.tolist(), (answer, expected)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        state = GPT(CONFIG).state_dict()
        base = {name: value for name, value in state.items() if not adapter_filter(name, value)}
        torch.save(base, Path(folder) / "lit_model.pth")
        against_plain_torch(Path(folder))
