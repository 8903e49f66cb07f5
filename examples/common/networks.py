"""The networks of the examples in plain torch, made from what is written beside their weights.

The folder of a consolidated model has safetensors files in ``weights`` and beside them, in
``network.json``, what :func:`build` and ``test_images.of`` need: ``{"network": {"kind": ..., ...},
"images": {...}}``.
"""

from __future__ import annotations

import difflib
import json
import os
from typing import Any

import torch
from torch import nn

from .memory import require_for_building
from .script import Stop

DESCRIPTION, WEIGHTS = "network.json", "weights"


def build(kind: str, **arguments: Any) -> nn.Module:
    """The network with random weights: of ``kind`` ``mnist``, ``vit`` or ``torchvision``."""
    if kind == "mnist":
        from .mnist_network import MnistNetwork

        return MnistNetwork()
    if kind == "vit":
        from .vit import VisionTransformer

        return VisionTransformer(**arguments)
    if kind == "torchvision":
        return torchvision_model(**arguments)
    raise Stop(f"unknown kind of network {kind!r}; mnist, vit and torchvision are known", code=2)


def torchvision_model(model: str, num_classes: int) -> nn.Module:
    """One of torchvision's classifiers, which returns logits only, in training too.

    Raises:
        Stop: with code 2: no model of that name.
    """
    from torchvision import models

    require_torchvision(model)
    arguments: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if model in ("googlenet", "inception_v3"):
        # Their auxiliary classifiers would be further results. Drawing their truncated normals
        # takes minutes; the default is torch's own.
        arguments |= {"aux_logits": False, "init_weights": False}
    return models.get_model(model, **arguments)


def require_torchvision(model: str) -> None:
    """Refuses names that are none of torchvision's classifiers, with those that come close."""
    from torchvision import models

    known = models.list_models(module=models)
    if model not in known:
        close = difflib.get_close_matches(model, known, n=3) or ["resnet50", "vit_b_16"]
        raise Stop(
            f"no model {model!r} among torchvision's {len(known)} classifiers, such as "
            f"{', '.join(close)}; torchvision.models.list_models(torchvision.models) lists them",
            code=2,
        )


def try_out(model: str, num_classes: int, batch_size: int, image_size: int) -> int:
    """Refuses what ``torchvision_model`` can not be trained on. Computes nothing.

    Returns:
        How many parameters it has; of RegNet at least so many.

    Raises:
        Stop: with code 2: too small or not of the one size that it takes; a batch too small for
            batch norm; no model of that name; more classes than there is memory for.
    """
    try:
        with torch.device("meta"):
            network = torchvision_model(model, num_classes)
            network(torch.empty(batch_size, 3, image_size, image_size))
        parameters = sum(parameter.numel() for parameter in network.parameters())
    except NotImplementedError:
        # RegNet can not be built like this; it takes any size. Its last layer alone has these.
        parameters = num_classes
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Stop(
            f"{model} can not train on batches of {batch_size} images of --image_size="
            f"{image_size} with --num_classes={num_classes}: {reason}",
            code=2,
        ) from error
    require_for_building(parameters)
    return parameters


def describe(folder: str, network: dict[str, Any], images: dict[str, Any] | None) -> None:
    """Makes ``folder`` with what :func:`load` needs beside the weights."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, DESCRIPTION), "w", encoding="utf-8") as file:
        json.dump({"network": network, "images": images}, file, indent=1)


def load(folder: str) -> tuple[nn.Module, dict[str, Any]]:
    """The network with its weights, and how its images are to be read.

    Raises:
        Stop: with code 2: not a folder with a consolidated model of an example.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with open(os.path.join(folder, DESCRIPTION), encoding="utf-8") as file:
            described = json.load(file)
        network, images = described["network"], described["images"]
        model = build(**network)
        weights, place = {}, os.path.join(folder, WEIGHTS)
        for name in sorted(os.listdir(place)):
            if name.endswith(".safetensors"):
                weights |= load_file(os.path.join(place, name))
        model.load_state_dict(weights)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise Stop(f"{folder} has no consolidated model of an example: {reason}", code=2) from error
    return model, images
