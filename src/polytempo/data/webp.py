"""Images stored as WebP strips: up to 500 images one above the other in each picture."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.data.partition import Array


def decode(archive: Mapping[str, Any], split: str) -> Array:
    """The images of one split as uint8 [N, C, H, W]."""
    try:
        from PIL import Image
    except ImportError as error:
        raise PolytempoError(
            'these images are WebP; reading them needs Pillow: pip install "polytempo[images]"'
        ) from error
    height, width, channels = (int(size) for size in archive[f"{split}_hwc"])
    packed = archive[f"{split}_webp"].tobytes()
    strips, at = [], 0
    for size in archive[f"{split}_len"].tolist():
        with Image.open(io.BytesIO(packed[at : at + size])) as picture:
            pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
        strips.append(pixels.reshape(-1, height, width, channels).transpose(0, 3, 1, 2))
        at += size
    # In order of memory too, or every later copy would pay for the transposition.
    return np.ascontiguousarray(np.concatenate(strips))
