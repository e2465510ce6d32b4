"""Settings: the same ones as options, from TOML files and in Python, all checked before a run."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from polytempo import PolytempoError
from polytempo.core.layout import Parts
from polytempo.core.optimizer import Adam, Sgd
from polytempo.experiments.config import RunConfig, make_config, read_config, write_config
from polytempo.strategies import STRATEGIES

# A value for each setting that is not its default.
VALUES: dict[str, Any] = {
    "strategy": "fedprox:mu=0.25",
    "data": "synthetic",
    "data_dir": "somewhere",
    "clients": 7,
    "partition": "dirichlet:alpha=0.5",
    "shift": "noise",
    "test_fraction": 0.5,
    "validation": 0.2,
    "limit": 100,
    "problem": "classification",
    "model": "linear",
    "buffers": "reset",
    "personal": "head",
    "freeze": "features.*,norm",
    "trainable": "head",
    "updates": 9,
    "until": 5.5,
    "versions": 7,
    "messages": 30,
    "stop": "early:patience=3,min_delta=0.01,figure=loss",
    "concurrency": 2,
    "refill": "same",
    "devices": "two-speed:slow=0.5",
    "network": "wifi",
    "dropout": "drop:probability=0.2",
    "epochs": 2,
    "steps": 3,
    "batch_size": 8,
    "lr": 0.5,
    "lr_schedule": "steps:at=[40,60],gamma=0.5",
    "optimizer": "adamw:beta1=0.5",
    "momentum": 0.1,
    "weight_decay": 0.01,
    "keep_optimizer": True,
    "eval_every": 4,
    "adapt_epochs": 0,
    "adapt_always": True,
    "solver": "torch",
    "backend": "serial",
    "device": "cuda:1",
    "workers": 2,
    "bank": "disk",
    "dp": "clip=2,noise=0.5",
    "compress": "topk:0.25",
    "attack": "sign-flip:share=0.3",
    "defend": "norm:times=2",
    "diagnose": 5,
    "seed": 3,
    "check": True,
    "events": True,
    "log": "wandb:project=mine",
    "plots": "pdf",
}


@pytest.fixture
def resolved(monkeypatch, polytempo):
    """The settings with which `polytempo run ...` would have run."""
    found = []

    def stand_in(config, folder, **ignored):
        found.append(config)
        raise PolytempoError("enough")

    monkeypatch.setattr("polytempo.cli.run.run", stand_in)

    def resolve(*arguments: object) -> RunConfig:
        assert polytempo("run", *arguments).error == "enough"
        return found[-1]

    return resolve


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_option(name: str, value: object) -> list[object]:
    return [option(name)] if value is True else [option(name), value]


def write(path: Path, **table: object) -> Path:
    path.write_text(tomli_w.dumps(table), encoding="utf8")
    return path


def test_the_table_above_names_every_setting():
    assert VALUES.keys() == RunConfig.model_fields.keys()


@pytest.mark.parametrize("name", RunConfig.model_fields)
def test_every_setting_is_an_option_and_a_key(name, resolved, tmp_path):
    wanted = make_config({name: VALUES[name]})
    assert wanted != RunConfig()
    assert resolved(*as_option(name, VALUES[name])) == wanted
    underscore = write(tmp_path / "a.toml", **{name: VALUES[name]})
    assert resolved("--config", underscore) == wanted
    hyphen = write(tmp_path / "b.toml", **{name.replace("_", "-"): VALUES[name]})
    assert resolved("-c", hyphen) == wanted


def test_options_win_over_the_file_and_the_file_over_defaults(resolved, tmp_path):
    file = write(tmp_path / "my.toml", updates=9, lr=0.5, strategy="fedavg")
    config = resolved("--config", file, "--updates", 7, "--strategy", "fedbuff")
    assert (config.updates, config.lr, config.strategy_table["name"]) == (7, 0.5, "fedbuff")
    assert config.optimizer == RunConfig().optimizer


def test_momentum_and_weight_decay_are_short_for_options_of_the_optimizer():
    short = make_config({"momentum": 0.5, "weight_decay": 0.25})
    assert short == make_config({"optimizer": "sgd:momentum=0.5,weight_decay=0.25"})
    assert short.task().optimizer == Sgd(momentum=0.5, weight_decay=0.25)
    adam = make_config({"optimizer": "adam:beta1=0.5", "weight_decay": 0.25})
    assert adam.task().optimizer == Adam(beta1=0.5, weight_decay=0.25)
    with pytest.raises(PolytempoError, match=r"adam: .*momentum"):
        make_config({"optimizer": "adam", "momentum": 0.5})


def test_the_one_mechanism_of_privacy_need_not_be_named():
    wanted = {"name": "gaussian", "clip": 1.0, "noise": 0.8, "delta": 1e-5}
    for spelled in ("clip=1,noise=0.8", {"clip": 1, "noise": 0.8}, "gaussian:noise=0.8,clip=1"):
        assert make_config({"dp": spelled}).dp == wanted
    for wrong, said in (("clip=0,noise=1", "clip"), ("clip=1", "noise"), ("noisy", "no privacy")):
        with pytest.raises(PolytempoError, match=said):
            make_config({"dp": wrong})


def test_parts_are_lists_of_names():
    config = make_config({"personal": "head, norm,", "freeze": "features.*", "buffers": "reset"})
    assert config.parts() == Parts(["head", "norm"], ["features.*"], "reset")
    assert make_config({}).parts() == Parts([], [])


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ({"backend": "batched"}, "backend batched is now a solver: use --solver native, or auto"),
        ({"solver": "dense"}, "solver dense is now a part of native: use --solver native, or auto"),
        ({"rounds": 400}, "rounds is now called updates"),
        ({"slots": 4}, "slots is now called concurrency"),
        ({"cohort": 4}, "cohort is now called concurrency"),
    ],
)
def test_who_asks_for_what_has_gone_is_told_what_there_is(old, said):
    with pytest.raises(PolytempoError, match=said):
        make_config(old)


def test_things_with_options_may_be_tables(resolved, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(
        'strategy = {name = "pace", graph = {name = "pfedgraph", gamma = 2}}\n'
        '[partition]\nname = "dirichlet"\nalpha = 0.5\n'
        '[model]\nname = "mlp"\nhidden = [8]\n'
    )
    config = resolved("-c", file)
    assert config == resolved(
        *("--strategy", "pace:graph.gamma=2", "--partition", "dirichlet:alpha=0.5"),
        *("-c", write(tmp_path / "model.toml", model={"name": "mlp", "hidden": [8]})),
    )
    assert config.make("strategy").graph.gamma == 2


def test_a_strategy_is_resolved_with_all_its_options():
    config = make_config({"strategy": "pace:graph.gamma=2"})
    made = STRATEGIES.create("pace:graph.gamma=2")
    assert config.strategy == STRATEGIES.describe(made)
    assert config.make("strategy") == made


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ('strategy = "pace:graph=fedamp,graph.sigma=5"', "pace:graph=fedamp,graph.sigma=5"),
        (
            '[strategy]\nname = "pace"\ngraph = {name = "fedamp", sigma = 5}',
            "pace:graph=fedamp,graph.sigma=5",
        ),
        ('[strategy]\nname = "pace"\n[strategy.graph]\nname = "fedsac"', "pace:graph=fedsac"),
        ('[strategy]\nname = "pfedgraph"\ngraph.gamma = 2', "pfedgraph:graph.gamma=2"),
        ('[strategy]\nname = "fedsac"\ngraph.clip = "none"', "fedsac:graph.clip=none"),
    ],
)
def test_options_of_a_graph_in_a_file(text, spec, tmp_path):
    """As text, as a table within the table, or as a dotted key, which completes the default's."""
    (tmp_path / "my.toml").write_text(text)
    config = make_config(read_config(tmp_path / "my.toml"))
    assert config.make("strategy") == STRATEGIES.create(spec)
    write_config(tmp_path / "written.toml", config)
    again = make_config(read_config(tmp_path / "written.toml"))
    assert again == config
    assert again.make("strategy") == STRATEGIES.create(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('graph.sigmma = 5\ngraph.name = "fedamp"', r"graph fedamp: .*did you mean 'sigma'\?"),
        ("graph.gama = 5", r"graph pfedgraph: .*did you mean 'gamma'\?"),
        ("grap.gamma = 5", r"strategy pace: unknown option 'grap'; did you mean 'graph'\?"),
        ('graph = "fedam"', r"no graph is called 'fedam'; did you mean 'fedamp'\?"),
    ],
)
def test_a_mistake_in_the_options_of_a_graph_names_the_nearest(text, message, tmp_path):
    (tmp_path / "my.toml").write_text(f'[strategy]\nname = "pace"\n{text}')
    with pytest.raises(PolytempoError, match=message):
        make_config(read_config(tmp_path / "my.toml"))


def test_the_default_strategy_and_data_need_nothing():
    assert (RunConfig().strategy_table["name"], RunConfig().data) == ("pace", "digits")


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    table=some.fixed_dictionaries(
        {},
        optional={
            "strategy": some.sampled_from([*STRATEGIES, "pace:graph.gamma=0.1,reply=fresh"]),
            "partition": some.sampled_from(["iid", "pathological", "dirichlet:alpha=1e-3"]),
            "devices": some.sampled_from(["equal", "severe", "uniform:high=9"]),
            "dropout": some.sampled_from(["none", "delay", "leave:at=3.5"]),
            "updates": some.integers(1, 10**9),
            "seed": some.integers(-(2**40), 2**40),
            "lr": some.floats(1e-300, 1e300),
            "until": some.floats(1e-9, 1e300),
            "test_fraction": some.floats(1e-6, 1 - 1e-6),
            "validation": some.floats(0, 1 - 1e-6),
            "data": some.text('ab/:.é"\\\n\t ', min_size=1),
            "check": some.booleans(),
        },
    )
)
def test_a_configuration_survives_its_file(table, tmp_path):
    config = make_config(table)
    write_config(tmp_path / "config.toml", config)
    assert make_config(read_config(tmp_path / "config.toml")) == config


def test_an_infinite_option_survives_its_file(tmp_path):
    config = make_config({"strategy": "pace:omega=inf"})
    write_config(tmp_path / "config.toml", config)
    assert make_config(read_config(tmp_path / "config.toml")) == config
    assert config.settings()["strategy"]["omega"] == float("inf")


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("update", "updates"),
        ("batchsize", "batch_size"),
        ("eval-evry", "eval_every"),
        ("sed", "seed"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, near, polytempo, tmp_path):
    file = write(tmp_path / "my.toml", **{key: 3})
    error = polytempo("run", "-c", file).error
    assert repr(key.replace("-", "_")) in error
    assert repr(near) in error


def test_an_unknown_key_in_no_way_like_another_lists_them_all(polytempo, tmp_path):
    error = polytempo("run", "-c", write(tmp_path / "my.toml", xyzzy=1)).error
    assert all(name in error for name in RunConfig.model_fields)


@pytest.mark.parametrize("command", ["run", "compare", "data"])
@pytest.mark.parametrize(("key", "near"), [("--client", "--clients"), ("--limits", "--limit")])
def test_an_unknown_option_names_the_nearest(command, key, near, polytempo):
    outcome = polytempo(command, *(["pace"] if command == "compare" else []), key, 3)
    assert outcome.code == 2
    assert key in outcome.err
    assert near in outcome.err.replace(key + " ", "")
    assert outcome.out == ""


@pytest.mark.parametrize(("old", "new"), [("--rounds", "--updates"), ("--slots", "--concurrency")])
def test_an_option_that_has_another_name_now_says_which(old, new, polytempo):
    outcome = polytempo("run", old, 3)
    assert outcome.code == 2
    assert f"{old} is now called {new}" in outcome.err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("updates", "many"),
        ("updates", 1.5),
        ("clients", "some"),
        ("lr", "fast"),
        ("check", "perhaps"),
        ("strategy", 5),
        ("data", 3),
        ("seed", [1, 2]),
        ("refill", "never"),
        ("buffers", "drop"),
    ],
)
def test_a_wrong_type_in_a_file_is_one_line(name, value, polytempo, tmp_path):
    error = polytempo("run", "-c", write(tmp_path / "my.toml", **{name: value})).error
    assert name in error
    assert repr(value) in error


@pytest.mark.parametrize(
    ("name", "value"), [("updates", "many"), ("clients", "1.5"), ("lr", "fast"), ("seed", "x")]
)
def test_a_wrong_type_in_an_option_names_the_option(name, value, polytempo):
    outcome = polytempo("run", option(name), value)
    assert outcome.code == 2
    assert option(name) in outcome.err
    assert "valid" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("updates", 0),
        ("clients", 0),
        ("clients", -3),
        ("limit", 0),
        ("test_fraction", 0),
        ("validation", -0.1),
        ("validation", 1),
        ("test_fraction", 1),
        ("until", 0),
        ("concurrency", 0),
        ("epochs", 0),
        ("steps", 0),
        ("batch_size", 0),
        ("lr", 0),
        ("lr", -0.1),
        ("lr", "nan"),
        ("momentum", 1),
        ("momentum", -0.5),
        ("weight_decay", -1),
        ("eval_every", 0),
        ("adapt_epochs", -1),
        ("refill", "sometimes"),
        ("buffers", "keep"),
    ],
)
def test_a_value_out_of_range_is_one_line(name, value, polytempo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = polytempo("run", option(name), value).error
    assert name in error
    assert str(value) in error
    assert "should be" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"updates = \n", "line 1"),
        (b"updates = 3\nupdates = 4\n", "line 2"),
        (b"[strategy\n", "line 1"),
        (b"\xff\xfe\x00", "utf-8"),
    ],
)
def test_a_broken_file_is_named_with_the_place(content, why, polytempo, tmp_path):
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    for command in (["run"], ["compare", "pace"], ["data"]):
        error = polytempo(*command, "-c", file).error
        assert str(file) in error
        assert why in error


def test_a_missing_file_is_named(polytempo, tmp_path):
    error = polytempo("run", "-c", tmp_path / "none.toml").error
    assert "none.toml" in error
    assert "No such file" in error
    assert str(tmp_path) in polytempo("run", "-c", tmp_path).error  # a folder is no file


@pytest.mark.parametrize(
    ("setting", "spec", "words"),
    [
        ("strategy", "pacee", ["pacee", "pace"]),
        ("strategy", "nonsense", ["nonsense", *STRATEGIES]),
        ("strategy", "pace:graph.gama=2", ["gama", "gamma"]),
        ("strategy", "pace:graph.gamma=much", ["gamma", "much"]),
        ("strategy", "pace:graph.gamma=-1", ["gamma", "-1", "greater"]),
        ("strategy", "pace:graph.gamma", ["gamma", "key=value"]),
        ("partition", "dirichelt", ["dirichelt", "dirichlet"]),
        ("partition", "dirichlet:alpha=0", ["alpha", "greater than 0"]),
        ("shift", "rotate", ["rotate", "rotation"]),
        ("devices", "two-sped", ["two-sped", "two-speed"]),
        ("devices", "two-speed:slow=2", ["slow", "less than or equal to 1"]),
        ("network", "6g", ["6g", "5g"]),
        ("dropout", "drops", ["drops", "drop"]),
        ("model", "mpl", ["mpl", "mlp"]),
        ("model", "mlp:hiden=3", ["hiden", "hidden"]),
    ],
)
def test_a_wrong_name_or_option_names_the_right_one(setting, spec, words, polytempo, tmp_path):
    error = polytempo("run", option(setting), spec, "--out", tmp_path / "run").error
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()
