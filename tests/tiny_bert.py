"""A transformer that is small enough for tests, made here: nothing is downloaded."""

import importlib.util

import numpy as np
import pytest

from polytempo import Federation, tokenizer

needs_transformers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "peft")),
    reason='needs the extra "transformers"',
)
WORDS = [f"{letter}{number}" for letter in "abcd" for number in range(8)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LENGTH = 12


def write_bert(folder, *, seed=0, words=WORDS, hidden=32, **more):
    """BERT of two layers, with random weights, and a tokenizer of some 30 words; the folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    fast = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    PreTrainedTokenizerFast(
        tokenizer_object=fast, sep_token="[SEP]", model_max_length=128, **named
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=128,
        initializer_range=0.3,  # so that words matter without any training
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(folder)
    return folder


def texts(count=48, seed=0):
    """Sentences of 2 to 14 words, and labels: which letter is the commonest."""
    rng = np.random.default_rng(seed)
    found, labels = [], rng.integers(0, 4, count)
    for label in labels:
        size = int(rng.integers(2, 15))
        letters = np.where(rng.random(size) < 0.8, label, rng.integers(0, 4, size))
        found.append(" ".join(f"{'abcd'[k]}{rng.integers(0, 8)}" for k in letters))
    return found, labels


def text_federation(model, clients=3, count=48, **more):
    x, y = texts(count)
    read_by = tokenizer(model)
    return Federation.from_pool(
        x, y, clients=clients, partition="iid", length=LENGTH, tokenizer=read_by, **more
    )
