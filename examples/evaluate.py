"""Evaluates what an example has consolidated, in plain torch, without torch_xla.

    python examples/evaluate.py runs/mnist/ckpt_consolidated [--datadir DIR] [--batch_size 256]

The folder says which network it is and how its images are read; --datadir reads them from somewhere
else. Prints one line of JSON.
"""

import json
import sys
from types import SimpleNamespace

import torch
from absl import flags
from common import networks, script, test_images
from torch.utils.data import DataLoader

flags.DEFINE_string("datadir", None, "folder of the images; default: that of the training")
script.require("datadir", bool, "is empty; name a folder")
flags.DEFINE_integer("batch_size", 256, "images at a time", lower_bound=1)
flags.DEFINE_integer("num_workers", 0, "processes that read images", lower_bound=0)


def main(options: SimpleNamespace) -> None:
    if len(options.arguments) != 1:
        raise script.Stop("name one folder with a consolidated model", code=2)
    model, images = networks.load(options.arguments[0])
    data = test_images.of_network(images, options.datadir)
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch, labels in DataLoader(data, options.batch_size, num_workers=options.num_workers):
            correct += int((model(batch).argmax(dim=1) == labels).sum())
    assert "torch_xla" not in sys.modules
    accuracy = correct / len(data)
    print(json.dumps({"correct": correct, "images": len(data), "accuracy": accuracy}))


if __name__ == "__main__":
    script.run(main, arguments=True)
