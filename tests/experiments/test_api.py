"""The library from Python: simulate, compare, resume, load, and what a result gives."""

import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import polytempo as pt
from polytempo.core.errors import PolytempoError
from polytempo.experiments import compare as comparisons
from polytempo.experiments.progress import RunProgress

TINY = {"epochs": 1, "adapt_epochs": 1, "updates": 12, "solver": "torch"}
DATA = {"clients": 6, "limit": 120}


def federation() -> pt.Federation:
    return pt.Federation.load("digits", **DATA)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def score(module: nn.Module, fed: pt.Federation, client: int) -> float:
    """The accuracy of a model on a client's test samples, in plain torch."""
    x, y = fed.prepare(fed.x[fed.test[client]]), fed.y[fed.test[client]]
    with torch.no_grad():
        return float((module.eval()(x).argmax(1) == y).double().mean())


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run on data and a model of one's own, in a folder; with what it returned."""
    place = tmp_path_factory.mktemp("api") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polytempo.experiments.result_folder.can_plot", lambda: False)
        given = {"strategy": "fedper", "model": lambda: network(), **TINY, "updates": 18}
        return place, pt.simulate(federation(), out=place, **given)


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_is_the_one_that_was_scored_with_its_personal_part(ran, adapted):
    _, result = ran
    fed, module = federation(), network()
    column = "accuracy_adapted" if adapted else "accuracy"
    for row in result.clients:
        module.load_state_dict(result.model(row["client"], adapted=adapted))
        if row["tested"]:
            assert score(module, fed, row["client"]) == pytest.approx(row[column])
    one, other = (result.model(client) for client in (0, 1))
    assert torch.equal(one["1.weight"], other["1.weight"]), "shared"
    assert not torch.equal(one["3.weight"], other["3.weight"]), "personal"


@pytest.mark.parametrize("adapted", [False, True])
def test_a_loaded_folder_has_the_same_figures_and_models(ran, adapted):
    place, result = ran
    again = pt.load(place, federation(), model=network)
    assert again.summary == result.summary and repr(again) == repr(result)
    assert again.clients == result.clients
    for name, tensor in result.model(2, adapted=adapted).items():
        assert torch.equal(again.model(2, adapted=adapted)[name], tensor)


def test_what_the_folder_does_not_hold_must_be_given(ran):
    place, result = ran
    read = pt.load(place)
    assert read.accuracy == result.accuracy
    with pytest.raises(PolytempoError, match=r"data that the folder does not hold; give them"):
        read.model(0)
    with pytest.raises(PolytempoError, match=r"cannot be imported; give model="):
        pt.load(place, federation()).model(0)
    with pytest.raises(PolytempoError, match=r"data other than the present"):
        pt.load(place, pt.Federation.load("digits", **DATA, seed=5), model=network).model(0)
    with pytest.raises(PolytempoError, match=r"no client 6: they are 0 to 5"):
        result.model(6)
    with pytest.raises(PolytempoError, match=r"has no result.json; name one of the runs in it"):
        pt.load(place.parent)


def test_saved_models_load_without_us(ran, tmp_path):
    _, result = ran
    result.save_model(tmp_path / "sub" / "m.safetensors", 3)
    result.save_model(tmp_path / "m.pt", 3, adapted=True)
    one, other = network(), network()
    one.load_state_dict(load_file(tmp_path / "sub" / "m.safetensors"))
    other.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert torch.equal(one[1].weight, result.model(3)["1.weight"])
    assert torch.equal(other[1].weight, result.model(3, adapted=True)["1.weight"])
    with pytest.raises(PolytempoError, match=r"\.safetensors or \.pt"):
        result.save_model(tmp_path / "m.h5", 3)


def test_export_writes_the_model_of_a_client(polytempo, ran, tmp_path):
    run = tmp_path / "run"
    given = ("--clients", 6, "--limit", 120, "--updates", 12, "--strategy", "fedbuff:buffer_size=2")
    more = ("--model", "linear", "--personal", "head", "--epochs", 1, "--adapt-epochs", 1)
    assert polytempo("run", *given, *more, "-o", run).error  # all of it would be personal
    more = ("--model", "mlp:hidden=[8]", "--personal", "head", "--epochs", 1, "--adapt-epochs", 1)
    assert polytempo("run", *given, *more, "-o", run).code == 0
    file = tmp_path / "model.safetensors"
    outcome = polytempo("export", run, "--client", 3, "--to", file)
    assert outcome.code == 0 and str(file) in outcome.out
    state, expected = load_file(file), pt.load(run).model(3)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert polytempo("export", run, "--client", 3, "--adapted", "--to", tmp_path / "a.pt").code == 0
    adapted = torch.load(tmp_path / "a.pt", weights_only=True)
    assert any(not torch.equal(adapted[name], state[name]) for name in state)
    assert "no client 9" in polytempo("export", run, "--client", 9, "--to", file).error
    assert "does not hold" in polytempo("export", ran[0], "--client", 0, "--to", file).error


# -- resuming --------------------------------------------------------------------------------------


def test_a_run_from_python_resumes_from_python(ran, tmp_path):
    """A run that is made longer is bit for bit the one that was long from the start."""
    given = {"strategy": "fedper", "model": lambda: network(), **TINY, "updates": 6}
    pt.simulate(federation(), out=tmp_path / "run", eval_every=1, **given)
    with pytest.raises(PolytempoError, match=r"polytempo.resume\(FOLDER, federation\)"):
        pt.resume(tmp_path / "run", updates=18)
    longer = pt.resume(tmp_path / "run", federation(), model=given["model"], updates=18)
    assert longer.arrivals == 18
    assert longer.fingerprint != ""
    whole = pt.simulate(federation(), eval_every=1, **{**given, "updates": 18})
    assert longer.fingerprint == whole.fingerprint
    assert longer.clients == whole.clients


def test_data_by_name_make_a_folder_that_the_command_resumes(polytempo, tmp_path):
    result = pt.simulate("digits", model="linear", out=tmp_path / "run", **DATA, **TINY)
    assert (
        polytempo("run", "--resume", tmp_path / "run", "--updates", 15, "--json").json["arrivals"]
        == 15
    )
    assert pt.resume(tmp_path / "run", updates=20).arrivals == 20
    given = pt.simulate(federation(), model="linear", **TINY)
    assert given.fingerprint == result.fingerprint


# -- what there is to look at ----------------------------------------------------------------------


def test_every_figure_is_an_attribute_and_completed(ran):
    _, result = ran
    for name in ("simulated_time", "accuracy_worst10", "accuracy_best10", "staleness_mean"):
        assert getattr(result, name) == result.summary[name]
        assert name in dir(result)


def test_a_result_and_a_federation_are_one_line_and_a_table(ran):
    _, result = ran
    fed = federation()
    assert repr(result).startswith("<RunResult fedper on digits, 6 clients") and "\n" not in repr(
        result
    )
    assert f"{result.accuracy:.1%}" in repr(result) and "18 updates" in repr(result)
    assert repr(fed) == (
        "<Federation digits, 6 clients, dirichlet(alpha=0.1, balanced), 120 samples: "
        f"{sum(fed.samples)} training and {120 - sum(fed.samples)} test samples of 1x8x8, "
        "classification with 10 outputs>"
    )
    assert "<table>" in result._repr_html_() and "<td>6</td>" in fed._repr_html_()


def test_tables_are_frames_where_pandas_is_there(ran, monkeypatch):
    _, result = ran
    pandas = pytest.importorskip("pandas")
    frame = result.frame()
    assert isinstance(frame, pandas.DataFrame) and frame["updates"].iloc[-1] == 18
    assert len(result.frame("clients")) == 6
    with pytest.raises(PolytempoError, match="client"):
        result.frame("client")
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert result.frame() == result.history


def test_progress_is_shown_when_asked_for_and_not_in_a_log(capsys):
    given = {"model": "linear", **DATA, **TINY, "adapt_epochs": 0}
    pt.simulate("digits", **given)
    assert capsys.readouterr().err == ""
    pt.simulate("digits", progress=True, **given)
    said = capsys.readouterr()
    assert "12/12" in said.err and said.out == ""


def test_bars_within_the_callers_own_do_no_harm():
    with RunProgress(quiet=False) as mine:
        mine.bar("outer")(1, 2, "")
        assert pt.simulate("digits", model="linear", progress=True, **DATA, **TINY).arrivals == 12


# -- comparisons -----------------------------------------------------------------------------------


class Own(pt.strategies.FedAsync):
    """A strategy that cannot be imported by name."""


def test_a_comparison_in_memory_has_results_table_and_models():
    fed = federation()
    strategies = ["fedavg", pt.strategies.FedAsync(alpha=0.3), "standalone"]
    found = pt.compare(fed, strategies, model=network, seeds=2, fairness=True, **TINY)
    assert list(found.results) == ["fedavg", "fedasync:alpha=0.3", "standalone"]
    assert [row["strategy"] for row in found.table()] == list(found.results)
    assert found.results["fedavg"][1].seed == 1
    alone = pt.simulate(fed, model=network, strategy="fedavg", seed=1, **TINY)
    assert alone.fingerprint == found.results["fedavg"][1].fingerprint
    assert found.results["fedavg"][0].model(0).keys() == network().state_dict().keys()
    assert "\n" not in repr(found) and "6 runs" in repr(found) and "<table>" in found._repr_html_()
    assert found.numbers()[0]["handed"] == pytest.approx(
        np.mean([run.accuracy for run in found.results["fedavg"]])
    )


def test_a_comparison_in_a_folder_is_not_run_again(tmp_path, monkeypatch):
    given = {"model": network, **TINY, "out": tmp_path}
    first = pt.compare(federation(), ["fedavg", Own()], **given)

    def refuse(*args, **kwargs):
        raise AssertionError("this was to be taken from the folder")

    monkeypatch.setattr(comparisons, "run", refuse)
    monkeypatch.setattr(comparisons, "resume", refuse)
    again = pt.compare(federation(), ["fedavg", Own()], **given)
    assert again.numbers() == first.numbers()
    label = list(again.results)[1]
    assert "Own" in label
    one, other = (found.results[label][0].model(1) for found in (first, again))
    assert torch.equal(one["1.weight"], other["1.weight"])
    with pytest.raises(PolytempoError, match=r"lr = 0.01, but now it is 0.5"):
        pt.compare(federation(), ["fedavg"], lr=0.5, **given)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pt.compare(federation(), ["fedavg"], seed=3), "seeds="),
        (lambda: pt.compare(federation(), ["fedavg"], clients=3), "already given"),
        (lambda: pt.simulate(federation(), clients=3), "already given"),
        (lambda: pt.simulate(federation(), events=True), "out=FOLDER"),
        (lambda: pt.compare(federation(), []), "at least one strategy"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(PolytempoError, match=words):
        call()


# -- data of one's own -----------------------------------------------------------------------------


def arrays(seed: int, count: int = 12):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(count, 3)).astype(np.float32), draw.integers(0, 2, count)


def same(one: pt.Federation, other: pt.Federation) -> bool:
    return one.digest == other.digest


def test_clients_may_have_names_and_groups():
    given = {"ann": arrays(0), "bob": arrays(1), "eve": arrays(2)}
    fed = pt.Federation.from_arrays(given, groups=["b", "a", "b"])
    assert fed.names == ("ann", "bob", "eve") and fed.groups.tolist() == [1, 0, 1]
    assert same(fed, pt.Federation.from_arrays(list(given.values()), names=["x", "y", "z"]))
    result = pt.simulate(fed, model="linear", strategy="fedavg", **TINY)
    assert [(row["name"], row["group"]) for row in result.clients] == [
        *(("ann", 1), ("bob", 0), ("eve", 1))
    ]


def test_files_give_clients_their_names(tmp_path):
    for number, name in enumerate(("north", "south")):
        x, y = arrays(number)
        np.savez(tmp_path / f"{name}.npz", X=x, y=y)
    assert pt.Federation.from_npz(tmp_path).names == ("north", "south")


def test_frames_series_and_datasets_are_the_arrays_that_they_hold():
    pandas = pytest.importorskip("pandas")
    (x, y), (x_test, y_test) = arrays(0), arrays(1, 4)
    plain = pt.Federation.from_arrays([(x, y)])
    columns = ["a", "b", "c"]
    frame = pandas.DataFrame(x, columns=columns)
    assert same(pt.Federation.from_arrays([(frame, pandas.Series(y))]), plain)
    whole = frame.assign(label=y)
    assert same(pt.Federation.from_arrays([whole], target="label"), plain)
    dataset = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    assert same(pt.Federation.from_arrays([dataset]), plain)
    split = pt.Federation.from_arrays([(x, y, x_test, y_test)])
    assert [part.stop - part.start for part in (split.train[0], split.test[0])] == [12, 4]
    tested = pandas.DataFrame(x_test, columns=columns).assign(label=y_test)
    assert same(pt.Federation.from_arrays([(whole, tested)], target="label"), split)
    other = TensorDataset(torch.from_numpy(x_test), torch.from_numpy(y_test))
    assert same(pt.Federation.from_arrays([(dataset, other)]), split)
    whole_numbers = pandas.DataFrame({"age": range(12), "size": range(12)})
    fed = pt.Federation.from_arrays([(whole_numbers, y)])
    assert fed.x.dtype == torch.float32, "columns are features, not tokens"


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


def test_mistakes_in_own_data_are_named():
    pandas = pytest.importorskip("pandas")
    x, y = arrays(0)
    frame = pandas.DataFrame({"a": x[:, 0], "town": ["x"] * len(x), "label": y})
    from_arrays = pt.Federation.from_arrays
    for call, words in (
        (lambda: from_arrays([frame]), "which column of the frame is the target"),
        (lambda: from_arrays([frame], target="lable"), "a, town, label"),
        (lambda: from_arrays([frame], target="label"), "'town' is of type"),
        (lambda: from_arrays([(x, y)], names=["a", "b"]), "2 names for 1 clients"),
        (lambda: from_arrays([(x, y)] * 2, names=["a", "a"]), "called 'a'"),
        (lambda: from_arrays([(x, y)], groups=[1, 2]), "1 clients; give one for each"),
        (lambda: from_arrays({"a": (x, y)}, names=["b"]), "names already"),
        (lambda: from_arrays([Endless()]), "without a length"),
        (lambda: from_arrays([TensorDataset(torch.zeros(3, 2))]), "pairs"),
    ):
        with pytest.raises(PolytempoError, match=words):
            call()
