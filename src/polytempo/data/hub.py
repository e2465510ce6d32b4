"""Data sets of the Hugging Face hub: `hub:owner/dataset`, with options for what cannot be guessed.

hub:owner/dataset
hub:owner/dataset:label=topic,text=body,user=author
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.registry import Options
from polytempo.data.pool import Pool, features, labels
from polytempo.data.source import SOURCES, Request

LABELS = ("label", "labels", "fine_label", "target", "class", "y")
IMAGES = ("image", "img", "images", "picture")
TEXTS = ("text", "content", "sentence", "document", "review", "body")


@SOURCES.register("hub")
class Hub(Options):
    """All splits of a data set of the hub, pooled.

    image, text, columns: what the samples are made of (one column of images, one of texts, or
        several of numbers); label: the labels; user: whom a sample belongs to. Without these, the
        type and the name of each column decide; there are users only if you name them.
    config: the configuration, for data sets that have several; split: only that one.
    length, vocabulary: for text.
    """

    description: ClassVar[str] = "any labelled data set of the Hugging Face hub"

    dataset: str
    image: str | None = None
    text: str | None = None
    columns: tuple[str, ...] = ()
    label: str | None = None
    user: str | None = None
    config: str | None = None
    split: str | None = None
    length: Annotated[int, Field(ge=1)] = 128
    vocabulary: Annotated[int, Field(ge=1)] = 32_000

    def __call__(self, request: Request) -> Pool:
        who = f"hub:{self.dataset}"
        splits = self._fetch(who)
        kinds: Mapping[str, Any] = splits[0].features
        for name in (self.image, self.text, self.label, self.user, *self.columns):
            if name is not None and name not in kinds:
                raise PolytempoError(f"{who}: no column is called {name!r}{nearest(name, kinds)}")
        label = self.label or _find(kinds, "ClassLabel", LABELS)
        if label is None:
            raise PolytempoError(
                f"{who}: no column of labels among {', '.join(kinds)}; name it with label="
            )
        y = _column(splits, label)
        classes = getattr(kinds[label], "num_classes", None)
        # Hidden test labels are -1 by convention: such rows are of no use here.
        known = [i for i, value in enumerate(y) if value is not None and value != -1]
        if not known:
            raise PolytempoError(f"{who}: column {label!r} has no labels; name another with label=")
        x = features(self._samples(who, splits, kinds, label, known), who)
        numbers = labels([y[i] for i in known], len(known), who, classes)
        users = None
        if self.user is not None:
            everybody = _column(splits, self.user)
            users = np.array([str(everybody[i]) for i in known])
        return Pool(
            name=who,
            x=x,
            y=numbers,
            outputs=classes or int(numbers.max()) + 1,
            users=users,
            length=self.length,
            vocabulary=self.vocabulary,
        )

    def _fetch(self, who: str) -> list[Any]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise PolytempoError(
                f'{who} needs the package datasets: pip install "polytempo[hub]"'
            ) from error
        try:
            found = load_dataset(self.dataset, name=self.config, split=self.split)
        except Exception as error:  # whatever the network or the hub has to say, in one line
            reason = " ".join(str(error).split())
            raise PolytempoError(
                f"{who} cannot be loaded: {reason}; check the name, config= and split=, and the "
                "connection"
            ) from error
        return list(found.values()) if isinstance(found, Mapping) else [found]

    def _samples(
        self, who: str, splits: list[Any], kinds: Mapping[str, Any], label: str, known: list[int]
    ) -> Any:
        taken = {label, self.user}
        rest = {name: kind for name, kind in kinds.items() if name not in taken}
        if self.columns:
            numeric = list(self.columns)
        else:
            image = self.image or (None if self.text else _find(rest, "Image", IMAGES))
            if image is not None:
                pictures = _column(splits, image)
                return _stack(who, [pictures[i] for i in known])
            text = self.text or _find(rest, "string", TEXTS)
            if text is not None:
                texts = _column(splits, text)
                return [str(texts[i]) for i in known]
            numeric = [name for name, kind in rest.items() if _is_number(kind)]
        if not numeric:
            raise PolytempoError(
                f"{who}: neither images nor text nor numbers among {', '.join(kinds)}; name them "
                "with image=, text= or columns="
            )
        table = np.stack([np.asarray(_column(splits, name), dtype=np.float32) for name in numeric])
        return table.T[known]


def _column(splits: list[Any], name: str) -> list[Any]:
    return [value for split in splits for value in split[name]]


def _is_number(kind: Any) -> bool:
    return str(getattr(kind, "dtype", "")).startswith(("int", "uint", "float"))


def _find(kinds: Mapping[str, Any], kind: str, names: tuple[str, ...]) -> str | None:
    """A column of that kind, one with a usual name first; else any column with a usual name."""
    fitting = [
        name
        for name, found in kinds.items()
        if type(found).__name__ == kind or getattr(found, "dtype", None) == kind
    ]
    for name in names:
        if name in fitting:
            return name
    if fitting:
        return fitting[0]
    return next((name for name in names if name in kinds), None)


def _stack(who: str, pictures: list[Any]) -> Any:
    """Pictures to one array, in colour if any of them is."""
    if all(hasattr(picture, "convert") for picture in pictures):
        grey = all(picture.mode in ("1", "L", "I;16") for picture in pictures)
        pictures = [picture.convert("L" if grey else "RGB") for picture in pictures]
    arrays = [np.asarray(picture, dtype=np.uint8) for picture in pictures]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise PolytempoError(
            f"{who}: pictures of {len(shapes)} shapes, such as {shapes[0]} and {shapes[-1]}; "
            "resize them first, and use Federation.from_pool"
        )
    return np.stack(arrays)
