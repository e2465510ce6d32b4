"""The networks that clients train: a few from the papers, and any of the user's own."""

from __future__ import annotations

from polytempo.models.adapters import trained_parts
from polytempo.models.factory import Model, automatic, build
from polytempo.models.feedforward import CNN64, MLP, LeNet, Linear
from polytempo.models.pretrained import HuggingFace, tokenizer
from polytempo.models.recurrent import GRU
from polytempo.models.resnet import ResNet18
from polytempo.models.spec import MODELS, Inputs, ModelSpec
from polytempo.models.textcnn import TextCNN

__all__ = [
    "CNN64",
    "GRU",
    "MLP",
    "MODELS",
    "HuggingFace",
    "Inputs",
    "LeNet",
    "Linear",
    "Model",
    "ModelSpec",
    "ResNet18",
    "TextCNN",
    "automatic",
    "build",
    "tokenizer",
    "trained_parts",
]
