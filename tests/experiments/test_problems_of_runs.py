"""Runs that learn something other than labels: results, tables and plots name their metric."""

import copy
import csv
import json
import math
import pickle
from functools import partial

import pytest

import polytempo as pt
from polytempo.core.errors import PolytempoError
from polytempo.core.metric import RESERVED, finite
from polytempo.experiments import result_folder
from polytempo.experiments.compare import Comparison
from polytempo.experiments.result_folder import read_result
from polytempo.simulation.metrics import MODELS

SHORT = (
    *("--clients", "4", "--updates", "8", "--eval-every", "2"),
    *("--adapt-epochs", "1", "--backend", "serial"),
)
TINY = (*SHORT, "--epochs", "1")
# Data, metric, label of the axis, and the direction.
CASES = {
    "regression": ("diabetes", "mse", "mean squared error (lower is better)", "lower"),
    "made": ("synthetic-regression:samples=20", "mse", "mean squared error", "lower"),
    "multilabel": ("synthetic-multilabel:samples=20", "f1", "F1", "higher"),
    "text": ("synthetic-text:samples=12,tokens=4", "perplexity", "perplexity (lower", "lower"),
}
FORMS = ("best", "weighted", "std", "worst10", "adapted", "newcomers")


@pytest.fixture
def plots(plotless, monkeypatch):
    """As an exception, draw them."""
    monkeypatch.setattr(result_folder, "can_plot", lambda: True)


def history(folder):
    with (folder / "history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("case", CASES)
def test_the_command_runs_it_and_everything_names_the_metric(case, polytempo, plots, tmp_path):
    data, name, label, better = CASES[case]
    outcome = polytempo("run", "--data", data, *TINY, "--out", tmp_path / "a", "--events")
    assert outcome.code == 0, outcome.err
    assert f"{name}, as handed" in outcome.out and f"{better} is better" in outcome.out
    assert f"{name} " in outcome.err  # the progress bar
    found = json.loads((tmp_path / "a" / "result.json").read_text())
    assert (found["metric"]["name"], found["metric"]["better"]) == (name, better)
    assert {name, *(f"{name}_{form}" for form in FORMS)} <= found.keys()
    assert "accuracy_best" not in found
    rows = history(tmp_path / "a")
    values = [float(row[name]) for row in rows]
    assert found[name] == pytest.approx(sum(values[-3:]) / 3)
    assert found[f"{name}_best"] == (min if better == "lower" else max)(values[1:])
    worse = found[f"{name}_worst10"] - values[-1]
    assert worse >= 0 if better == "lower" else worse <= 0
    assert bool(found["time_to"]) == (name == "f1")
    drawn = {path.name for path in (tmp_path / "a").glob("*.png")}
    assert f"{name}.png" in drawn and "accuracy.png" not in drawn
    log = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    seen = [(e["metric"], e["value"]) for e in log if e["event"] == "evaluate"]
    assert seen == [(name, value) for value in values]
    text = read_result(tmp_path / "a").plot(tmp_path / "a.svg").read_text()
    assert f"<!-- {label}" in text


@pytest.fixture(scope="module")
def regression():
    fed = pt.Federation.load("diabetes", clients=4, seed=0)
    return pt.simulate(fed, strategy="fedavg", updates=12, eval_every=2, adapt_epochs=1)


def test_python_has_the_figures_under_their_names_and_under_a_common_one(regression):
    assert regression.metric.name == "mse"
    assert regression.value == regression.mse == regression.summary["mse"]
    assert regression.adapted == regression.mse_adapted == regression.history[-1]["mse_adapted"]
    assert regression.mae == regression.summary["mae"]
    assert regression.simulated_time == regression.summary["simulated_time"]
    with pytest.raises(AttributeError, match="'accuracy'; the metric of this run is mse"):
        _ = regression.accuracy
    with pytest.raises(AttributeError, match="did you mean 'mse_adapted'"):
        _ = regression.mse_adpted


def test_a_result_can_be_copied_and_pickled(regression):
    bare = copy.copy(regression)
    bare.simulator = None
    assert pickle.loads(pickle.dumps(bare)).mse == copy.deepcopy(bare).mse == regression.mse


def test_time_to_a_low_error_is_the_first_time_below_it(regression):
    values = [row["mse"] for row in regression.history]
    assert regression.time_to(max(values)) == 0.0
    best = min(range(len(values)), key=values.__getitem__)
    assert best > 0
    assert regression.time_to(values[best]) == regression.history[best]["time"]
    assert regression.time_to(values[best] - 1e-9) is None


def test_names_that_a_metric_must_not_have_are_those_that_results_use():
    fed = pt.Federation.load("digits", clients=4, limit=80, seed=0)
    for strategy in ("fedavg", "p2p"):
        found = pt.simulate(fed, strategy=strategy, updates=4, adapt_epochs=0)
        used = {*found.summary, *found.history[-1], *(found.peers or [{}])[0]}
        used |= {name for name in dir(found) if not name.startswith("_")}
        own = {name for name in used if name.split("_")[0] in ("accuracy", "top5", "loss")}
        assert used - own <= {*RESERVED}
    assert {*MODELS} <= {*RESERVED}


@pytest.mark.parametrize("strategy", ["fedavg", "pace", "p2p"])
def test_a_figure_that_is_infinite_is_null_in_json(strategy, tmp_path):
    """A perplexity may be; JSON has no word for it."""
    fed = pt.Federation.load("synthetic-text:samples=12,tokens=4", clients=4, seed=0)
    late = {} if strategy == "p2p" else {"dropout": "join:share=0.5,updates=2", "epochs": 1}
    given = {"strategy": strategy, "lr": 1e5, "adapt_epochs": 0, "events": True, **late}
    for updates in (4, 8) if late else (8,):  # peers cannot be extended
        place = {"out": tmp_path, "resume": updates > 4}
        found = pt.simulate(fed, updates=updates, eval_every=2, **given, **place)
    assert any(math.isinf(row["perplexity"]) for row in found.history)
    strict_json = partial(json.loads, parse_constant=pytest.fail)
    summary = strict_json((tmp_path / "result.json").read_text())
    assert summary == found.summary and summary["perplexity"] is None
    if late:
        assert summary["perplexity_newcomers"] is None
    log = [strict_json(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    values = [event["value"] for event in log if event["event"] == "evaluate"]
    assert values == [finite(row["perplexity"]) for row in found.history]
    assert repr(read_result(tmp_path).history) == repr(found.history)  # history.csv knows them


# -- side by side ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory, polytempo):
    folder = tmp_path_factory.mktemp("compared")
    arguments = ("compare", "fedavg", "pace", "--data", "diabetes", *TINY, "--out", folder)
    return folder, arguments, polytempo(*arguments, "--target", "0.5")


def test_a_comparison_is_about_the_metric(compared):
    folder, _, outcome = compared
    assert outcome.code == 0, outcome.err
    assert "mean squared error, lower is better" in outcome.out
    with (folder / "summary.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["metric"] for row in table] == ["mse", "mse"]
    for row in table:
        found = json.loads((folder / row["strategy"] / "seed0" / "result.json").read_text())
        assert float(row["handed"]) == pytest.approx(found["mse"])
        times = [
            float(r["time"])
            for r in history(folder / row["strategy"] / "seed0")
            if float(r["mse"]) <= 0.5
        ]
        assert row["reached"] == str(len(times[:1])) and float(row["target"]) == 0.5
        assert not times or float(row["seconds_to_target"]) == pytest.approx(times[0])
    assert "s to mse 0.5" in outcome.out
    assert {path.name for path in folder.glob("*.png")} == {
        *(f"mse_{x}.png" for x in ("time", "updates", "messages")),
        "loss_time.png",
        "distribution.png",
    }
    text = (folder / "report.html").read_text()
    assert "Mean squared error against simulated time" in text and "lower is better" in text


def test_a_table_says_that_a_figure_is_infinite(polytempo, plotless, tmp_path):
    data = ("--data", "synthetic-text:samples=12,tokens=4", *TINY, "--lr", "1e5")
    assert polytempo("compare", "fedavg", *data, "--out", tmp_path).code == 0
    with (tmp_path / "summary.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["handed"], row["worst10"]) == ("inf", "inf")


@pytest.mark.parametrize("target", ["80", "0.001", "pace"])
def test_a_target_need_not_be_a_share(target, compared, polytempo):
    assert polytempo(*compared[1], "--target", target).code == 0


@pytest.mark.parametrize("target", ["nan", "inf", "mse"])
def test_a_target_must_be_a_number_or_a_strategy(target, compared, polytempo):
    assert f"target {target}" in polytempo(*compared[1], "--target", target).error.replace("'", "")


def test_results_of_different_metrics_are_not_put_into_one_table(compared, regression):
    fed = pt.Federation.load("digits", clients=4, limit=80, seed=0)
    other = pt.simulate(fed, strategy="fedavg", updates=2, epochs=1, adapt_epochs=0)
    with pytest.raises(PolytempoError, match=r"b, seed 0, was judged by accuracy.* about mse"):
        Comparison({"a": [regression], "b": [other]}, regression.metric, "a", True, {})


# -- among peers -----------------------------------------------------------------------------------


def test_peers_are_judged_by_the_metric_too(polytempo, plots, tmp_path):
    arguments = ("--data", "diabetes", "--strategy", "p2p:target=20", *SHORT, "--out", tmp_path)
    outcome = polytempo("run", *arguments)
    assert outcome.code == 0, outcome.err
    with (tmp_path / "peers.csv").open(newline="") as file:
        last = [float(row["mse"]) for row in csv.DictReader(file)][-4:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert [peer["mse"] for peer in found["peers"]] == last
    assert (tmp_path / "mse.png").exists() and (tmp_path / "peers.png").exists()
