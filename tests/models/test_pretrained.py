"""Pre-trained transformers as models: their tokens, masks, heads and errors."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from polytempo import Federation, PolytempoError, simulate, tokenizer
from polytempo.core.layout import Layout, Parts
from polytempo.models import Inputs, build, trained_parts
from polytempo.models.pretrained import path_of
from tiny_bert import LENGTH, WORDS, needs_transformers, text_federation, texts, write_bert

pytestmark = needs_transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def model(folder):
    return f"hf:{folder}"


def module_for(model, federation, trainable=None, seed=0):
    return build(model, Inputs.of(federation), seed, trainable)


def frozen(space):
    return {n for n, p in space.module.named_parameters() if not p.requires_grad}


# -- tokens ---------------------------------------------------------------------------------------


def test_tokens_are_the_tokenizers_numbers_plus_one_and_padding_is_0(model):
    found = tokenizer(model)(["a0 b1", "a0 nobody " + "c2 " * 20], 6)
    numbers = {word: 4 + place for place, word in enumerate(WORDS)}  # after PAD, UNK, CLS, SEP
    cls, sep, unknown = 2, 3, 1
    c = numbers["c2"]
    expected = [[cls, numbers["a0"], numbers["b1"], sep], [cls, numbers["a0"], unknown, c, c, sep]]
    assert found[0].tolist() == [number + 1 for number in expected[0]] + [0, 0]
    assert found[1].tolist() == [number + 1 for number in expected[1]]
    assert tokenizer(model).vocabulary == 4 + len(WORDS) + 1


def test_texts_are_tokenized_once_and_kept(model, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path))
    first = text_federation(model)
    kept = list(tmp_path.glob("tokens-*.npy"))
    assert len(kept) == 1

    monkeypatch.setattr(type(tokenizer(model)), "__call__", lambda *given: pytest.fail("again"))
    assert torch.equal(text_federation(model).x, first.x)
    other = text_federation(model, seed=3)  # another division of the same texts
    assert not torch.equal(other.x, first.x) and len(other.x) == len(first.x)


def test_federations_know_whose_tokens_they_hold(model):
    found = text_federation(model)
    assert found.shape == (LENGTH,) and found.x.dtype == torch.int64
    assert found.tokenizer == tokenizer(model).digest
    assert found.vocabulary == tokenizer(model).vocabulary


@pytest.mark.parametrize("pooling", ["model", "mean"])
def test_padding_has_no_influence(model, pooling):
    federation = text_federation(model)
    module = module_for(f"{model}:pooling={pooling}", federation).eval()
    tokens = federation.x[:8]
    alone = torch.cat([module(row[row != 0][None]) for row in tokens])
    assert torch.allclose(module(tokens), alone, atol=1e-6)
    padded = torch.nn.functional.pad(tokens, (0, 5))
    assert torch.equal(module(padded), module(tokens))
    changed = tokens.clone()
    changed[:, 1] = 7
    assert not torch.allclose(module(changed), alone, atol=1e-3)


def test_an_empty_text_has_finite_scores(model):
    module = module_for(model, text_federation(model)).eval()
    assert torch.isfinite(module(torch.zeros(2, LENGTH, dtype=torch.int64))).all()


def test_scores_are_those_of_transformers_itself(model, folder):
    from transformers import AutoModel, AutoTokenizer

    module = module_for(f"{model}:pooling=mean", text_federation(model)).eval()
    said = ["a0 b1 c2", "d3"]
    given = AutoTokenizer.from_pretrained(folder)(said, padding=True, return_tensors="pt")
    hidden = AutoModel.from_pretrained(folder).eval()(**given).last_hidden_state
    mask = given["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    expected = mean @ module.classifier.weight.T + module.classifier.bias
    ours = torch.from_numpy(tokenizer(model)(said, LENGTH)).long()
    assert torch.allclose(module(ours), expected, atol=1e-5)


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainable", [None, "lora:r=2"])
def test_the_seed_decides_what_is_new(model, trainable):
    federation = text_federation(model)
    before = torch.random.get_rng_state()
    one, same, other = (module_for(model, federation, trainable, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    pairs = list(zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for (_, a), b, _ in pairs)
    differ = {name for (name, a), _, c in pairs if not torch.equal(a, c)}
    assert all("classifier.weight" in n or "lora_A" in n for n in differ)
    assert "network.classifier.weight" in differ


def test_lora_trains_adapters_and_head_alone(model):
    module = module_for(model, text_federation(model), "lora:r=2,alpha=8")
    space = Layout(module, Parts(trained=trained_parts("lora:r=2,alpha=8")))
    adapters = 2 * 2 * (2 * 32 + 32 * 2)  # layers, query and value, A and B
    assert space.size == space.parameters == adapters + 32 * 4 + 4
    assert all("lora_" in name or "classifier" in name for name in space.shared_names)


def test_lora_is_what_its_formula_says():
    """`W x + alpha / r B A x`, in the chain of linear layers of any module."""
    inputs = Inputs((6,), 3)
    chain = build(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), inputs, 0)
    adapted = build(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), inputs, 0, "lora:r=2"
    )
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(adapted(x), chain(x)), "B is zero at first"
    named = dict(adapted.named_parameters())
    assert len([n for n in named if "lora" in n]) == 2, "the head has none"
    a, b = named["0.lora_A.default.weight"], named["0.lora_B.default.weight"]
    with torch.no_grad():
        b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(1)))
    inner = chain[0](x) + 16 / 2 * x @ a.T @ b.T
    assert torch.allclose(adapted(x), chain[2](torch.tanh(inner)), atol=1e-6)


def test_trainable_head_and_patterns_freeze_all_else():
    def network():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    head = Layout(network(), Parts(trained=trained_parts("head")))
    assert head.shared_names == ["2.weight", "2.bias"]
    assert frozen(head) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    biases = Layout(network(), Parts(trained=trained_parts("*.bias")))
    assert biases.shared_names == ["0.bias", "1.bias", "2.bias", "1.running_mean", "1.running_var"]
    assert trained_parts("all") is None and trained_parts(None) is None


def test_the_head_of_a_model_may_have_several_layers(model, tmp_path):
    from transformers import DistilBertConfig, DistilBertModel

    write_bert(tmp_path)  # for its tokenizer
    config = DistilBertConfig(
        vocab_size=36, dim=16, hidden_dim=32, n_layers=1, n_heads=2, max_position_embeddings=32
    )
    DistilBertModel(config).save_pretrained(tmp_path)
    module = module_for(f"hf:{tmp_path}", text_federation(model))
    space = Layout(module, Parts(trained=("head",)))
    assert {name.split(".")[1] for name in space.shared_names} == {"pre_classifier", "classifier"}


# -- errors ---------------------------------------------------------------------------------------


def test_wrong_paths_are_named(tmp_path):
    with pytest.raises(PolytempoError, match=r"no such folder.*save_pretrained"):
        tokenizer(f"hf:{tmp_path}/nowhere")
    with pytest.raises(PolytempoError, match=r"there is no config.json in it"):
        tokenizer(f"hf:{tmp_path}")
    with pytest.raises(PolytempoError, match="no package 'not_installed_here'"):
        tokenizer("hf:package/not_installed_here/model")


def test_the_hub_is_not_asked_when_it_must_not_be(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PolytempoError, match=r"hf:nobody/nothing cannot be loaded.*on the hub"):
        tokenizer("hf:nobody/nothing")


def test_a_damaged_file_is_one_line(tmp_path, model):
    write_bert(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(PolytempoError, match="cannot be loaded"):
        module_for(f"hf:{tmp_path}", text_federation(model))


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_without_the_extra_it_says_what_to_install(package, model, monkeypatch):
    federation = text_federation(model)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PolytempoError, match=rf"needs the package {package}.*polytempo\[transf"):
        module_for(model, federation, "lora")


def test_texts_need_a_model_for_texts_and_numbers_another(model):
    with pytest.raises(PolytempoError, match="'mlp' takes numbers, but the data are tokens"):
        simulate(text_federation(model), model="mlp", updates=1)
    with pytest.raises(PolytempoError, match=r"hf:.* reads texts, but a sample has shape \(64,\)"):
        build(model, Inputs((64,), 10), 0)
    with pytest.raises(PolytempoError, match=r"hf:.* reads texts, but the samples of digits are"):
        Federation.load("digits", tokenizer=tokenizer(model))


def test_texts_must_have_been_read_by_the_models_own_tokenizer(model, tmp_path):
    x, y = texts()
    words = Federation.from_pool(x, y, clients=2, partition="iid")
    with pytest.raises(PolytempoError, match=r"the data are words; load them with .*tokenizer\("):
        simulate(words, model=model, updates=1)
    other = f"hf:{write_bert(tmp_path, words=WORDS[::-1])}"
    with pytest.raises(PolytempoError, match="tokens of another tokenizer"):
        simulate(text_federation(other), model=model, updates=1)


def test_texts_longer_than_the_model_reads_are_refused(model):
    x, y = texts()
    fed = Federation.from_pool(x, y, clients=2, length=140, tokenizer=tokenizer(model))
    with pytest.raises(PolytempoError, match="reads at most 128 tokens, but texts have 140"):
        simulate(fed, model=model, updates=1)


def test_what_cannot_be_trained_is_named(model):
    with pytest.raises(PolytempoError, match="has no layers nothing"):
        module_for(model, text_federation(model), 'lora:targets=["nothing"]')
    with pytest.raises(PolytempoError, match="unknown option 'rank'"):
        trained_parts("lora:rank=3")
    with pytest.raises(PolytempoError, match="--trainable nothing: Sequential has nothing"):
        Layout(nn.Sequential(nn.Linear(2, 2)), Parts(trained=("nothing",)))
    with pytest.raises(PolytempoError, match="names nothing"):
        trained_parts(" ,")


def test_models_are_told_apart_by_name(model):
    assert path_of("hf:owner/name:pooling=mean") == "owner/name"
    assert path_of({"name": "hf", "path": "p"}) == path_of({"name": "hf:p"}) == "p"
    assert path_of("mlp") is None and path_of("mymodule:factory") is None
    assert path_of(lambda: None) is None and tokenizer("mlp") is None


def test_a_folder_inside_an_installed_package(tmp_path, monkeypatch):
    write_bert(tmp_path / "tiny_package_of_a_test" / "model")
    (tmp_path / "tiny_package_of_a_test" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert tokenizer("hf:package/tiny_package_of_a_test/model").vocabulary == 4 + len(WORDS) + 1


def test_tokens_are_what_numpy_can_keep(model):
    assert tokenizer(model)(["a0"], 4).dtype == np.int32
