"""Runs on TPUs with published speeds that can be planned.

``Run.assumed`` has the values that a source does not state; ``Run.differs`` has known differences
between the run and the plan. :data:`NOT_PLANNED` lists other runs, and why they are not planned.

A published step was measured on hardware and includes input, dispatch, stragglers and pauses
between steps. A plan models only the program, so a correct model gives a few percent less.

Steps are fully sharded by this package, whatever the source used, and blocks of decoders are
recomputed, as in most of the runs. So the same arithmetic on the same slice is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn

import xla_fsdp
from xla_fsdp.tpu.topology import resolve

from .decoder import Decoder, decoder_step

# Peak bfloat16 FLOP/s of a core of v3 that the source uses for its MFU.
_V3_CORE = 123e12 / 2


@dataclass(frozen=True)
class ResNet50:
    """ResNet-50 of torchvision: 224 x 224 images, ``batch`` per device, computed in ``dtype``."""

    batch: int
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Images of a device in a step."""
        return self.batch


def resnet_step(sizes: ResNet50) -> Callable[[], torch.Tensor]:
    """A training step: SGD with momentum; each of the four stages is a unit."""
    dtype = getattr(torch, sizes.dtype)

    def step() -> torch.Tensor:
        from torchvision.models import resnet50

        def wrap(module: nn.Module) -> nn.Module:
            return xla_fsdp.XlaFullyShardedDataParallel(module, compute_dtype=dtype)

        model = resnet50()
        for name in ("layer1", "layer2", "layer3", "layer4"):
            setattr(model, name, wrap(getattr(model, name)))
        model = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        images = torch.zeros(sizes.batch, 3, 224, 224).to("xla")
        labels = torch.zeros(sizes.batch, dtype=torch.long).to("xla")
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def step_of(sizes: Decoder | ResNet50, replicas: int = 1) -> Callable[[], torch.Tensor]:
    """A training step for :func:`xla_fsdp.plan`."""
    return resnet_step(sizes) if isinstance(sizes, ResNet50) else decoder_step(sizes, replicas)


@dataclass(frozen=True)
class Run:
    """One published run.

    ``seconds``: of a step, computed from ``published``, the figure of the source. ``replicas``: the
    number of groups of ranks that each have all parameters. ``kept``: modules whose outputs the run
    saved for the backward; the planned step recomputes them. ``bound``: ``seconds`` is an upper
    bound, since the published time includes more than steps. ``options``: compiler options that the
    source states and that change the program. ``libtpu``: the version that compiles the plan; "":
    that of this environment.
    """

    name: str
    slice: str
    sizes: Decoder | ResNet50
    seconds: float
    published: str
    source: str
    replicas: int = 1
    kept: tuple[str, ...] = ()
    assumed: str = ""
    differs: str = ""
    bound: bool = False
    options: dict[str, str] = field(default_factory=dict)
    libtpu: str = ""

    @property
    def chip(self) -> str:
        """Family of the chip, such as v5e."""
        return resolve(self.slice).chip.family


def _of_mfu(sizes: Decoder, percent: float, peak: float) -> float:
    """Seconds of a step with a published MFU that counts all of causal attention."""
    return sizes.flops() / (percent / 100 * peak)


def _of_rate(sizes: Decoder, tflops: float) -> float:
    """Seconds of a step with published TFLOP/s per device."""
    return sizes.flops() / (tflops * 1e12)


_LLAMA_8B = Decoder(
    layers=32, width=4096, heads=32, groups=8, dim=128, inner=14336, vocabulary=128256,
    length=8192, batch=3, fused=True,
)  # fmt: skip
MAXTEXT_16B = Decoder(
    layers=32, width=4096, heads=64, dim=128, inner=28672, vocabulary=32000, length=2048, batch=6
)
_MAXTEXT_32B = replace(MAXTEXT_16B, width=8192, batch=4)
_MAXTEXT_64B = replace(_MAXTEXT_32B, layers=64, batch=2)
_MAXTEXT_22B = Decoder(
    layers=48, width=6144, heads=24, dim=256, inner=24576, vocabulary=32000, length=2048,
    batch=13, gated=False,
)  # fmt: skip
_MAXTEXT_52B = replace(_MAXTEXT_22B, layers=32, width=12288, heads=32, inner=49152, batch=7)
_GPT_7B = Decoder(
    layers=32, width=4096, heads=32, dim=128, inner=16384, vocabulary=50277, length=2048,
    batch=4, gpt=True, kernel=False,
)  # fmt: skip
_GPT_13B = replace(_GPT_7B, layers=40, width=5120, heads=40, inner=20480)
_GPT_20B = replace(_GPT_7B, layers=44, width=6144, heads=64, dim=96, inner=24576)
_FUJI_7B = Decoder(
    layers=32, width=4096, heads=32, dim=128, inner=11008, vocabulary=32768, length=2048,
    batch=2, tied=True,
)  # fmt: skip

_LLAMA_70B = replace(_LLAMA_8B, layers=80, width=8192, heads=64, inner=28672, batch=2)
_LLAMA_405B = replace(_LLAMA_8B, layers=126, width=16384, heads=128, inner=53248, batch=3)
_PRIME_8B = replace(_LLAMA_8B, batch=2, weights="bfloat16")
_PRIME_FLASH = replace(_PRIME_8B, repeated=True)
# Recomputed in a plan, where the runs of 2026 on v6e had them on the host with the inputs.
_V6E_70B = replace(_LLAMA_70B, offload=True)

_QKV = ("q", "k", "v")
_QKVO = ("q", "k", "v", "out")
_FLAX = "flax examples/imagenet README: 125,100 steps of 1,024 images in 4.4 h"
_RECIPES = "tpu-recipes training/trillium/Llama3.1-8B-MaxText"
# MaxText's DENSE_VMEM_LIMIT_FLAG: VMEM for one operation, instead of for prefetching the next.
_VMEM = {"xla_tpu_scoped_vmem_limit_kib": "98304"}
# The options of tpu-recipes' training/ironwood that are not the default of libtpu 0.0.51.
_IRONWOOD = {
    "xla_tpu_scoped_vmem_limit_kib": "61440", "xla_tpu_bf16_emission_mode": "NATIVE_EMISSION",
}  # fmt: skip
_NEWER = "0.0.51"  # knows TPU7x
_ON_HOST = "the run kept its inputs and the outputs of q, k, v and out on the host"
_FUSED = "logits are computed twice here"
_PRIME = "torchprime issue 16"
_FLASH = "the run's older attention kernel had a slow backward (torchprime PR 214); " + _FUSED
_2026 = "tpu-recipes training/trillium (2026-08)"
_QKV_ON_HOST = f"the run also kept q, k and v on the host; {_FUSED}"
_7X = "tpu-recipes training/ironwood (2026-08)"
_BLOCKS_7X = f"the run's attention had blocks of 2048; {_FUSED}"
_BOUNDS = "torchprime e2e_testing/step_time_bounds.yaml, about 427 runs each (2025-06)"
_4_CHIPS = "v6e; weights in bfloat16, every layer recomputed"
_ADAFACTOR = f"the run's optimizer was Adafactor; {_FUSED}"
_FLASH_2026 = f"flash attention, its keys and values copied for each query head; {_ADAFACTOR}"
_UNROLLED = "; the run's layers were no loop"
_V4_CONFIG = "MaxText configs/v4/22b.sh, README"
_22B = (
    "head dimension 256 and two matrices around ReLU (which give 22 B, base.yml of 2023), "
    "sequence 2048, attention by a kernel"
)
_V5E_CONFIG = "MaxText configs/v5e, README"
_16B = "sizes by MaxText's rule for global_parameter_scale, of a base with gated MLP"
_LEVANTER = "Levanter 1.0 release notes, config/gpt2_*.yaml"
_GPT = "4 sequences a device (a batch of 1,024), attention written out"
_FUJI = "AXLearn experiments/text/gpt/fuji.py"

RUNS = {
    run.name: run
    for run in (
        Run(
            "ResNet-50, v3-8", "v3-8", ResNet50(128), 1024 / 8087, "8,087 images/s (derived)",
            _FLAX, assumed="bfloat16", bound=True,
            differs="evaluation is in the published time; sharded, where the run was not",
        ),
        Run(
            "ResNet-50, v4-8", "v4-8", ResNet50(128, "float32"), 128 / 1775,
            "1,775 images/s a chip", "torch_xla PR 6053 (and 5720, 6904: 1,447, 1,762)",
            assumed="batch 128, float32 (the script's defaults)",
        ),
        *(
            Run(
                f"Llama 3.1 8B, {where}", where, _LLAMA_8B, seconds, f"{seconds} s", _RECIPES,
                kept=_QKVO, differs=f"{_ON_HOST}; {_FUSED}", options=_VMEM,
            )
            for where, seconds in (("v6e-8", 3.443), ("v6e-16", 3.393), ("v6e-32", 3.495))
        ),
        *(
            Run(
                f"Llama 3 8B, v6e-256, batch {batch}", "v6e-256", replace(_LLAMA_8B, batch=batch),
                seconds, f"{seconds} s", _PRIME, assumed="all rematerialised", differs=_FLASH,
            )
            for batch, seconds in ((1, 1.625), (2, 2.991))
        ),
        *(
            Run(
                f"{name}, v5litepod-256", "v5litepod-256", sizes, _of_rate(sizes, rate),
                f"{rate} TFLOP/s, {mfu} %", _V5E_CONFIG, assumed=_16B,
            )
            for name, sizes, rate, mfu in (
                ("16B", MAXTEXT_16B, 120, 61.1),
                ("32B", _MAXTEXT_32B, 132, 66.9),
                ("64B", _MAXTEXT_64B, 118, 59.9),
            )
        ),
        Run(
            "16B, 4 x v5litepod-256", "4xv5litepod-256", MAXTEXT_16B,
            _of_rate(MAXTEXT_16B, 117), "117 TFLOP/s, 59.1 %", _V5E_CONFIG, 4, assumed=_16B,
        ),
        Run(
            "GPT-2 6.7B, v3-256", "v3-256", _GPT_7B, _of_mfu(_GPT_7B, 47.3, _V3_CORE), "47.3 %",
            _LEVANTER, assumed=_GPT, differs="some keys are masked at random (fcm_prob)",
        ),
        Run(
            "GPT-2 13B, v3-256", "v3-256", _GPT_13B, _of_mfu(_GPT_13B, 54.4, _V3_CORE), "54.4 %",
            _LEVANTER, assumed=f"{_GPT}; 40 layers of width 5120, 40 heads (GPT-3's 13B)",
        ),
        Run(
            "GPT-2 20B, v3-256", "v3-256", _GPT_20B, _of_mfu(_GPT_20B, 50.9, _V3_CORE), "50.9 %",
            _LEVANTER, assumed=_GPT, differs="no biases in the run; it counts 1.06 hardware FLOPs "
            "a model FLOP, so that it cannot have rematerialised all",
        ),
        Run(
            "22B, v4-128", "v4-128", _MAXTEXT_22B, _of_rate(_MAXTEXT_22B, 156),
            "156 TFLOP/s, 56.7 %", _V4_CONFIG, assumed=_22B,
        ),
        Run(
            "22B, 4 x v4-128", "4xv4-128", _MAXTEXT_22B, _of_rate(_MAXTEXT_22B, 149),
            "149 TFLOP/s, 54.3 %", _V4_CONFIG, 4, assumed=_22B,
        ),
        Run(
            "52B, v4-384", "v4-384", _MAXTEXT_52B, _of_rate(_MAXTEXT_52B, 154),
            "154 TFLOP/s, 56.0 %", _V4_CONFIG, assumed=_22B.replace("22 B", "52 B"),
        ),
        Run(
            "Fuji 7B, 4 x v5litepod-256", "4xv5litepod-256", _FUJI_7B, 2.44, "2.44 s", _FUJI, 4,
            ("q", "k", "v", "out", "gate", "up", "down"),
            differs="the run (as configured today) kept all products",
        ),
        Run(
            "Fuji 7B, v5p-512", "v5p-512", replace(_FUJI_7B, batch=8), 2.85, "2.85 s", _FUJI, 32,
            _QKVO, assumed="q, k, v and out kept (AXLearn's default)",
        ),
        Run(
            "Fuji 7B, v4-1024", "v4-1024", replace(_FUJI_7B, batch=4), 3.03, "3.03 s", _FUJI, 32,
            _QKVO, assumed="q, k, v and out kept (AXLearn's default)",
        ),
        # Published in 2026. MFU: of half of causal attention.
        Run(
            "Llama 3.1 70B, v6e-32", "v6e-32", replace(_V6E_70B, weights="bfloat16"), 17.79,
            "17.79 s, 45.1 %", _2026, kept=_QKV, differs=_QKV_ON_HOST, options=_VMEM,
        ),
        *(
            Run(
                f"Llama 3.1 70B, {where}", where, replace(_V6E_70B, batch=batch), seconds,
                f"{seconds} s, {mfu} %", _2026, kept=_QKV, differs=_QKV_ON_HOST, options=_VMEM,
            )
            for where, batch, seconds, mfu in (
                ("v6e-64", 2, 18.69, "42.9"),
                ("v6e-128", 4, 34.79, "46.1"),
                ("v6e-256", 5, 42.66, "47.0"),
            )
        ),
        Run(
            "Llama 3.1 405B, 2 x v6e-256", "2xv6e-256",
            replace(_LLAMA_405B, batch=1, offload=True), 54.80, "54.80 s, 41.1 %", _2026,
            kept=_QKV, assumed="inputs, q, k and v on the host, as in the 70B",
            differs=_FUSED, options=_VMEM,
        ),
        Run(
            "Llama 3 8B, v6e-4, flash", "v6e-4", _PRIME_FLASH, 2.735, "2.735 s, 33.6 %", _BOUNDS,
            assumed=_4_CHIPS, differs=_FLASH_2026 + _UNROLLED, options=_VMEM,
        ),
        Run(
            "Llama 3 8B, v6e-4, splash", "v6e-4", _PRIME_8B, 2.407, "2.407 s, 38.2 %", _BOUNDS,
            assumed=_4_CHIPS, differs=_ADAFACTOR + _UNROLLED, options=_VMEM,
        ),
        Run(
            "Llama 3 8B, v6e-4, flash, scanned, on the host", "v6e-4",
            replace(_PRIME_FLASH, offload=True), 2.801, "2.801 s, 32.8 %", _BOUNDS,
            assumed=_4_CHIPS, differs=_FLASH_2026, options=_VMEM,
        ),
        Run(
            "Llama 3 8B, 2 x v6e-4, flash", "2xv6e-4", _PRIME_FLASH, 3.959, "3.959 s, 23.2 %",
            _BOUNDS, assumed=_4_CHIPS, differs=_FLASH_2026 + _UNROLLED, options=_VMEM,
        ),
        *(
            Run(
                f"Llama 3.1 70B, {where}", where, replace(_LLAMA_70B, keep=("attention", *_QKV)),
                seconds, f"{seconds:.2f} s, {mfu} %", _7X, options=_IRONWOOD, libtpu=_NEWER,
                differs=f"Adam's mean was in bfloat16; {_BLOCKS_7X}",
            )
            for where, seconds, mfu in (("tpu7x-128", 12.20, 52.3), ("tpu7x-512", 12.27, "52.0"))
        ),
        Run(
            "Llama 3.1 405B, tpu7x-512", "tpu7x-512",
            replace(_LLAMA_405B, offload=True, keep=("k", "v")), 98.34, "98.34 s, 54.7 %", _7X,
            differs=f"the output of down was on the host too; {_BLOCKS_7X}",
            options=_IRONWOOD, libtpu=_NEWER,
        ),
    )
}  # fmt: skip

# Published runs that are not in RUNS, and why.
NOT_PLANNED = {
    "GPT-2 345M to 1.4B, 65B on v3-256": "batch, and the 65B's sizes, not published",
    "32B on v5p-128, 128B on v5litepod-256": "tensor parallel inside, which this package is not",
    "8, 16 and 32 slices of v4-128 and v5litepod-256": "the same as 4, with more of them",
    "Llama 3.1 8B and 70B on v6e-256 (MaxText tiers)": "batch and rematerialisation not published",
    "Llama 3.1 8B on v6e-64": "sizes published, a step time is not",
    "Llama 3 70B on v6e-256 (torchprime)": "how it was rematerialised is not published",
    "Fuji 70B on 4 x v5litepod-256": "activations on the host took no time in the model then",
    "Llama 3.1 70B in fp8 on TPU7x": "matmuls in fp8, which this package does not have",
    "Llama 2 on v4 (PyTorch/XLA SPMD)": "batch and mesh of each figure not published",
}


def halves(names: list[str]) -> tuple[set[str], set[str]]:
    """Names of the runs that may be used to correct the model, and of the held-out runs.

    The rule was chosen before the first plan: of the runs of each chip, in the order of
    :data:`RUNS`, the first, third, ... are for corrections; the second, fourth, ... are held out.
    """
    fit: set[str] = set()
    seen: dict[str, int] = {}
    for name in RUNS:
        chip = RUNS[name].chip
        seen[chip] = seen.get(chip, 0) + 1
        if seen[chip] % 2:
            fit.add(name)
    return fit & set(names), set(names) - fit
