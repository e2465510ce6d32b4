"""Words to numbers: a small tokenizer and a vocabulary that has seen only training text."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.data.cache import cached
from polytempo.data.partition import Array

PADDING, UNKNOWN = 0, 1

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def words(text: str, length: int) -> list[str]:
    """The first `length` words of a text, in lower case."""
    return [match.group() for match in islice(_WORD.finditer(text.lower()), length)]


def build_vocabulary(texts: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Numbers for the most frequent words, from 2 up; equally frequent ones by the alphabet.

    `size` counts padding (0) and unknown (1) too.
    """
    if size < 3:
        raise PolytempoError(f"vocabulary={size}: at least 3 is needed; 32000 is usual")
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: size - 2], start=2)}


def encode(texts: Sequence[Sequence[str]], vocabulary: dict[str, int], length: int) -> Array:
    """Tokens [texts, length], cut or padded at the end."""
    tokens = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, text in enumerate(texts):
        found = [vocabulary.get(word, UNKNOWN) for word in text[:length]]
        tokens[row, : len(found)] = found
    return tokens


class Tokenizer(Protocol):
    """That of a pre-trained model: it knows its tokens before it has seen a text.

    name: for people; digest: of all that tokens depend on; vocabulary: tokens are below it, and 0
    is padding.
    """

    name: str
    digest: str
    vocabulary: int

    def __call__(self, texts: Sequence[str], length: int) -> Array:
        """Tokens [texts, length], cut or padded at the end."""
        ...


def tokenized(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> Array:
    """The same, as kept from an earlier run if there was one."""
    digest = hashlib.blake2b(f"{tokenizer.digest} {length}".encode(), digest_size=16)
    for text in texts:
        digest.update(hashlib.blake2b(text.encode("utf8", "replace")).digest())
    name = f"tokens-{digest.hexdigest()}"
    return cached(name, [], len(texts), lambda: tokenizer(texts, length))
