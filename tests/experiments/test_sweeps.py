"""Grids of settings: every combination, nothing twice, and honest statistics."""

import csv
import io
import json
import statistics
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polytempo as pt
from polytempo.core.errors import PolytempoError
from polytempo.experiments import jobs
from polytempo.experiments.grid import Range, points_of, read_grid, with_values
from polytempo.experiments.significance import holm, paired
from polytempo.experiments.tables import confidence, formatted

TINY = (
    *("--clients", 6, "--updates", 10, "--limit", 120, "--model", "linear", "--epochs", 1),
    *("--adapt-epochs", 1, "--jobs", 1),
)
GRID = ("--grid", "lr=0.01,0.1", "--grid", "strategy=fedavg,fedbuff:buffer_size=2,server_lr=1")
LABELS = [
    f"lr={lr} strategy={strategy}"
    for lr in ("0.01", "0.1")
    for strategy in ("fedavg", "fedbuff:buffer_size=2,server_lr=1")
]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- grids -----------------------------------------------------------------------------------------


def test_commas_separate_values_but_not_options():
    found = read_grid(
        [
            "strategy=pace:omega=2,reply=fresh,fedavg",
            "partition=pathological:sizes=[1,2],iid",
            "batch-size=8,16",
            "limit=none,100",
            "keep_optimizer=true,false",
            "batch_size=32",
        ]
    )
    assert found == {
        "strategy": ["pace:omega=2,reply=fresh", "fedavg"],
        "partition": ["pathological:sizes=[1,2]", "iid"],
        "batch_size": [8, 16, 32],
        "limit": [None, 100],
        "keep_optimizer": [True, False],
    }


def test_points_are_all_combinations_without_repetition():
    assert points_of({"lr": [0.1, 0.1, 0.2], "epochs": [1, 2]}) == [
        {"lr": lr, "epochs": epochs} for lr in (0.1, 0.2) for epochs in (1, 2)
    ]


def test_options_of_a_setting_are_values_too():
    settings = {"strategy": "fedasync:a=0.3"}
    found = with_values(settings, {"strategy.alpha": 0.2})
    assert found == {"strategy": {"name": "fedasync", "a": 0.3, "alpha": 0.2}}
    assert with_values({}, {"strategy.graph.gamma": 2})["strategy"]["name"] == "pace"
    both = with_values({}, {"strategy.alpha": 0.2, "strategy": pt.strategies.FedAsync(a=0.7)})
    assert (both["strategy"]["alpha"], both["strategy"]["a"]) == (0.2, 0.7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--grid", "lr"), "setting=value"),
        (("--grid", "lrr=1,2"), "did you mean 'lr'"),
        (("--grid", "lr=0.1,-1"), "lr = -1"),
        (("--grid", "seed=1,2"), "--seeds"),
        (("--grid", "lr.x=1"), "lr has no options"),
        (("--grid", "strategy=fedavg,fedbuf"), "did you mean 'fedbuff'"),
        (("--grid", "strategy.alpa=1", "--strategy", "fedasync"), "did you mean 'alpha'"),
        (("--grid", "lr=0.1", "--baseline", "strategy=fedavg"), "strategy is not in the grid"),
        (("--grid", "strategy=fedavg,fedbuff", "--baseline", "strategy=fedav"), "'fedavg'"),
        (("--grid", "lr=0.1", "--format", "latx"), "did you mean 'latex'"),
        (("--grid", "lr=0.1", "--interval", "x"), "std or ci95"),
        (("--grid", "lr=0.1", "--figure", "hand"), "did you mean 'handed'"),
    ],
)
def test_mistakes_are_found_before_anything_is_run(arguments, words, polytempo, tmp_path):
    assert words in polytempo("sweep", *arguments, *TINY, "-o", tmp_path / "out").error
    assert not (tmp_path / "out").exists()


# -- statistics ------------------------------------------------------------------------------------


def test_the_paired_test_agrees_with_one_by_hand():
    """t = mean / (s / sqrt n); for n = 3, the t distribution has a closed form."""
    values, baseline = [0.9, 0.8, 0.85], [0.7, 0.75, 0.72]
    apart = [a - b for a, b in zip(values, baseline, strict=True)]
    t = statistics.mean(apart) / (statistics.stdev(apart) / 3**0.5)
    by_hand = 1 - abs(t) / (2 + t * t) ** 0.5  # two-sided, 2 degrees of freedom
    mean, p = paired(values, baseline)
    assert mean == pytest.approx(statistics.mean(apart))
    assert p == pytest.approx(by_hand)
    assert paired([0.5], [0.4]) == (pytest.approx(0.1), None)
    assert paired([0.5, 0.6], [0.4, 0.5])[1] is None, "differences are all the same"
    assert paired([0.5, 0.6], [0.5, 0.6]) == (0.0, None)


def test_the_confidence_interval_agrees_with_tables():
    values = [1.0, 2.0, 4.0]
    assert confidence(values) == pytest.approx(4.302653 * statistics.stdev(values) / 3**0.5)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, None]) == pytest.approx([0.03, 0.06, 0.06, None])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_single_and_bonferroni(values):
    found = holm(values)
    for p, corrected in zip(values, found, strict=True):
        assert p <= corrected <= min(1.0, len(values) * p) + 1e-12
    order = np.argsort(values, kind="stable")
    assert np.all(np.diff(np.array(found)[order]) >= 0)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(polytempo, tmp_path_factory):
    """Two rates and two strategies with three seeds. To be read only."""
    folder = tmp_path_factory.mktemp("swept") / "out"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("result_folder", "sweep"):
            patch.setattr(f"polytempo.experiments.{name}.can_plot", lambda: False)
        arguments = ("sweep", *GRID, *TINY, "--seeds", 3, "--baseline", "strategy=fedavg")
        return folder, arguments, polytempo(*arguments, "-o", folder)


def results(folder: Path, label: str) -> list[dict]:
    [place] = [
        p
        for p in folder.iterdir()
        if p.name == label.replace(" ", "-").replace(":", "_").replace(",", "_")
    ]
    return [json.loads((place / f"seed{seed}" / "result.json").read_text()) for seed in range(3)]


def test_every_combination_runs_with_every_seed(swept):
    folder, _, outcome = swept
    assert outcome.code == 0, outcome.err
    for label in LABELS:
        assert [run["seed"] for run in results(folder, label)] == [0, 1, 2]
    runs = table(folder / "runs.csv")
    assert len(runs) == 12
    for row in runs:
        label = f"lr={row['lr']} strategy={row['strategy']}"
        found = results(folder, label)[int(row["seed"])]
        assert float(row["handed"]) == pytest.approx(found["accuracy"])


def test_the_summary_is_numbers_and_the_tests_are_paired(swept):
    folder, _, outcome = swept
    rows = table(folder / "summary.csv")
    assert [f"lr={row['lr']} strategy={row['strategy']}" for row in rows] == LABELS
    expected = []
    for row, label in zip(rows, LABELS, strict=True):
        values = [run["accuracy"] for run in results(folder, label)]
        assert float(row["handed"]) == pytest.approx(statistics.mean(values))
        assert float(row["handed_std"]) == pytest.approx(statistics.stdev(values))
        assert float(row["handed_ci95"]) == pytest.approx(confidence(values))
        against = results(folder, f"lr={row['lr']} strategy=fedavg")
        if label.endswith("fedavg"):
            assert row["difference"] == row["p"] == row["p_holm"] == ""
        else:
            apart, p = paired(values, [run["accuracy"] for run in against])
            assert float(row["difference"]) == pytest.approx(apart)
            expected.append(p)
        text = {key: value for key, value in row.items() if key not in ("strategy", "metric")}
        assert all(float(value) == float(value) for value in text.values() if value)
    found = [float(row["p_holm"]) if row["p_holm"] else None for row in rows if row["difference"]]
    assert found == pytest.approx(holm(expected))
    assert "paired t-test" in outcome.out and "±" in outcome.out


def test_a_second_call_runs_nothing_again_and_formats_the_table(swept, polytempo, monkeypatch):
    folder, arguments, _ = swept

    def refuse(*args, **kwargs):
        raise AssertionError("this was to be taken from the folder")

    monkeypatch.setattr("polytempo.experiments.compare.run", refuse)
    monkeypatch.setattr("polytempo.experiments.compare.resume", refuse)
    again = polytempo(*arguments, "-o", folder, "--format", "csv")
    assert again.code == 0, again.err
    assert list(csv.DictReader(io.StringIO(again.out))) == table(folder / "summary.csv")
    numbers = polytempo(*arguments, "-o", folder, "--format", "json").json
    assert [row["lr"] for row in numbers] == [0.01, 0.01, 0.1, 0.1]
    markdown = polytempo(*arguments, "-o", folder, "--format", "markdown").out.splitlines()
    assert markdown[0].startswith("| lr | strategy | handed |") and len(markdown) == 6
    latex = polytempo(*arguments, "-o", folder, "--format", "latex").out
    assert r"fedbuff:buffer\_size=2,server\_lr=1" in latex and r"$\pm$" in latex


def test_an_interrupted_sweep_goes_on(polytempo, interrupt, tmp_path):
    arguments = ("sweep", "--grid", "lr=0.01,0.1", *TINY, "--strategy", "fedbuff")
    whole = polytempo(*arguments, "-o", tmp_path / "whole")
    assert whole.code == 0
    interrupt(12)
    stopped = polytempo(*arguments, "-o", tmp_path / "halved")
    assert stopped.code == 130 and "again" in stopped.err
    assert not (tmp_path / "halved" / "summary.csv").exists()
    assert polytempo(*arguments, "-o", tmp_path / "halved").code == 0
    one, other = (
        [run["fingerprint"] for run in json.loads((tmp_path / name / "results.json").read_text())]
        for name in ("whole", "halved")
    )
    assert one == other


def test_runs_go_side_by_side_where_cores_allow(polytempo, tmp_path, monkeypatch):
    asked = []
    real = jobs.carry_out_all

    def count(orders, at_once, watch):
        asked.append((len(orders), at_once, orders[0].config.workers))
        return real(orders, 1, watch)  # tested for itself elsewhere

    monkeypatch.setattr("polytempo.experiments.sweep.carry_out_all", count)
    given = (*TINY[:-2], "--strategy", "fedavg", "-o", tmp_path, "--jobs", 2)
    assert polytempo("sweep", "--grid", "lr=0.01,0.1", *given).code == 0
    assert asked == [(2, 2, 1)]


def test_a_point_that_diverges_is_left_out_and_named(polytempo, tmp_path):
    arguments = ("sweep", "--grid", "lr=0.01,1e30", *TINY, "--strategy", "fedavg", "-o", tmp_path)
    outcome = polytempo(*arguments)
    assert outcome.code == 2
    assert "lr=1e+30" in outcome.err
    assert [row["lr"] for row in table(tmp_path / "summary.csv")] == ["0.01"]


def test_a_sweep_can_be_watched_and_its_report_tells_all(polytempo, tmp_path, monkeypatch):
    watched = []
    monkeypatch.setattr(
        "polytempo.cli.sweep.viewed", lambda *given: watched.append(given) or nullcontext()
    )
    monkeypatch.setattr("polytempo.experiments.sweep.can_plot", lambda: True)
    arguments = ("sweep", "--grid", "lr=0.01,0.1", *TINY, "--strategy", "fedavg", "-o", tmp_path)
    assert polytempo(*arguments, "--live", "--plots", "pdf").code == 0
    assert watched == [(tmp_path, True)]
    assert len(list(tmp_path.glob("*/seed0/events.jsonl"))) == 2
    report = (tmp_path / "report.html").read_text()
    assert all(word in report for word in ("polytempo sweep", "batch_size", "began", "torch"))
    assert (tmp_path / "accuracy_time.pdf").exists()


def test_the_usual_folder_is_named_by_grid_and_settings(polytempo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("sweep", "--grid", "lr=0.01,0.1", *TINY, "--strategy", "fedavg")
    assert polytempo(*arguments).code == polytempo(*arguments, "--seeds", 2).code == 0
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("sweep-lr-fedavg-digits-clients=6")


def test_compare_has_the_same_formats(polytempo, tmp_path):
    arguments = ("compare", "fedavg", *TINY[:-2], "-o", tmp_path)
    outcome = polytempo(*arguments, "--format", "latex")
    assert outcome.code == 0 and outcome.out.startswith(r"\begin{tabular}{l")
    assert polytempo(*arguments, "--format", "json").json[0]["strategy"] == "fedavg"


def test_signs_that_mean_something_in_a_format_are_escaped():
    rows = [{"a|b": "50% ± 1", "c_d": "x{y}\\~"}]
    assert formatted("markdown", rows, []).splitlines() == [
        r"| a\|b | c_d |",
        "| --- | ---: |",
        r"| 50% ± 1 | x{y}\~ |",
    ]
    latex = formatted("latex", rows, [])
    assert r"a|b & c\_d \\" in latex
    assert r"50\% $\pm$ 1 & x\{y\}\textbackslash{}\textasciitilde{} \\" in latex


# -- searches --------------------------------------------------------------------------------------

SEARCH = (
    *("--search", 6, "--grid", "lr=0.001..1:log", "--grid", "strategy=fedavg,fedbuff"),
    *("--grid", "epochs=1..3"),
)


def test_a_range_is_written_as_two_ends():
    assert read_grid(["lr=1e-3..0.1:log", "epochs=1..5", "strategy.alpha=.1...9"]) == {
        "lr": [Range(1e-3, 0.1, log=True)],
        "epochs": [Range(1, 5)],
        "strategy.alpha": [Range(0.1, 0.9)],
    }
    assert points_of({"lr": "0.1,0.2"}) == [{"lr": 0.1}, {"lr": 0.2}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--grid", "lr=0.1..0.2"), "--search 20"),
        (("--grid", "lr=0.2..0.1", "--search", 2), "lower end first"),
        (("--grid", "lr=0..0.1:log", "--search", 2), "lower end first above 0"),
        (("--grid", "lr=1e..2", "--search", 2), "not numbers"),
        (("--grid", "lr=0.1..0.2,0.5", "--search", 2), "one range or some values"),
        (("--grid", "lr=-1..1", "--search", 2), "lr = -1"),
        (("--grid", "strategy=fedavg,fedbuf", "--search", 2), "did you mean 'fedbuff'"),
        (("--grid", "lr=0.1,0.2", "--search", 2, "--baseline", "lr=0.1"), "--baseline"),
        (("--grid", "lr=0.1,0.2", "--search", 2, "--validation", 0), "by the test samples"),
        (("--grid", "validation=0.1,0.2", "--search", 2), "give --validation"),
    ],
)
def test_mistakes_of_a_search_are_found_before_anything_is_run(
    arguments, words, polytempo, tmp_path
):
    assert words in polytempo("sweep", *arguments, *TINY, "-o", tmp_path / "out").error
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def searched(polytempo, tmp_path_factory):
    """Six trials, then the best of them with two seeds. To be read only."""
    pytest.importorskip("optuna")
    folder = tmp_path_factory.mktemp("searched") / "out"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("result_folder", "sweep"):
            patch.setattr(f"polytempo.experiments.{name}.can_plot", lambda: False)
        arguments = ("sweep", *SEARCH, *TINY, "--seeds", 2)
        return folder, arguments, polytempo(*arguments, "-o", folder)


def test_trials_see_validation_samples_and_the_best_is_tested(searched):
    folder, _, outcome = searched
    assert outcome.code == 0, outcome.err
    trials, [best] = table(folder / "trials" / "summary.csv"), table(folder / "summary.csv")
    assert len(trials) == 6
    assert max(trials, key=lambda row: float(row["handed"]))["lr"] == best["lr"]
    for row in trials:
        assert 0.001 <= float(row["lr"]) <= 1 and row["epochs"] in "123"
    tried, tested = (
        [tomllib.loads(file.read_text()) for file in sorted(where.glob("*/seed*/config.toml"))]
        for where in (folder / "trials", folder)
    )
    assert [(run["validation"], run["seed"]) for run in tried] == [(0.2, 0)] * 6
    assert [(run["validation"], run["seed"]) for run in tested] == [(0.0, 0), (0.0, 1)]
    said = " ".join(outcome.out.split())
    assert "the best of 6 points by handed on validation samples" in said
    assert "figures are on the test samples" in said


def test_the_same_search_makes_the_same_trials_and_a_longer_one_adds_to_them(
    searched, polytempo, tmp_path, interrupt, monkeypatch
):
    for name in ("result_folder", "sweep"):
        monkeypatch.setattr(f"polytempo.experiments.{name}.can_plot", lambda: False)
    folder, arguments, _ = searched
    interrupt(25)
    stopped = polytempo(*arguments, "-o", tmp_path)
    assert stopped.code == 130 and "again" in stopped.err
    assert not (tmp_path / "summary.csv").exists()
    assert polytempo(*arguments, "-o", tmp_path).code == 0
    for name in ("summary.csv", "trials/runs.csv"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()
    longer = ("sweep", "--search", 8, *arguments[3:], "-o", tmp_path)
    assert polytempo(*longer).code == 0
    rows = table(tmp_path / "trials" / "runs.csv")
    assert len(rows) == 8 and rows[:6] == table(folder / "trials" / "runs.csv")


def test_a_trial_that_diverges_is_named_and_never_chosen(polytempo, tmp_path):
    pytest.importorskip("optuna")
    search = ("sweep", "--search", 4, "--grid", "lr=0.01,1e30", *TINY, "--strategy", "fedavg")
    outcome = polytempo(*search, "-o", tmp_path)
    assert outcome.code == 0 and "lr=1e+30" in outcome.err
    assert [row["lr"] for row in table(tmp_path / "summary.csv")] == ["0.01"]


def test_a_search_from_python(monkeypatch):
    pytest.importorskip("optuna")
    small = {"clients": 6, "limit": 120, "model": "linear", "epochs": 1, "adapt_epochs": 0}
    grid = {"lr": "0.01..0.5", "strategy": ["fedavg", "fedasync"]}
    found = pt.sweep("digits", grid, search=3, seeds=2, updates=10, **small)
    assert len(found.trials.points) == 3 and found.points == [found.trials.best()]
    alone = pt.simulate("digits", updates=10, seed=1, **small, **found.points[0])
    assert found.results[0][1].fingerprint == alone.fingerprint
    with pytest.raises(PolytempoError, match="name the data"):
        pt.sweep(pt.Federation.load("digits", clients=6, limit=120), grid, search=3)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(PolytempoError, match=r"polytempo\[search\]"):
        pt.sweep("digits", grid, search=3, **small)


# -- from Python -----------------------------------------------------------------------------------


def test_a_sweep_from_python(tmp_path):
    fed = pt.Federation.load("digits", clients=6, limit=120)
    small = {"model": "linear", "epochs": 1, "adapt_epochs": 0, "updates": 10}
    grid = {"lr": [0.001, 0.2], "strategy": ["fedavg", pt.strategies.FedAsync(alpha=0.3)]}
    found = pt.sweep(fed, grid, seeds=2, baseline={"lr": 0.001}, interval="ci95", **small)
    assert "lr, strategy: 4 points, 8 runs" in repr(found) and "<table>" in found._repr_html_()
    values = [np.mean([run.accuracy for run in each]) for each in found.results]
    assert found.best() == found.points[int(np.argmax(values))]
    assert [bool(test["difference"] is not None) for test in found.tests()] == [0, 0, 1, 1]
    alone = pt.simulate(fed, strategy="fedavg", lr=0.2, seed=1, **small)
    assert found.results[2][1].fingerprint == alone.fingerprint
    assert len(found.frame()) == 4
    again = pt.sweep(fed, grid, seeds=2, out=tmp_path, **small)
    assert [row["handed"] for row in again.numbers()] == [row["handed"] for row in found.numbers()]
    assert again.results[0][0].model(0).keys() == found.results[0][0].model(0).keys()
    with pytest.raises(PolytempoError, match="need a folder"):
        pt.sweep(fed, grid, jobs=2, **small)
    with pytest.raises(PolytempoError, match="limit is given as an object"):
        pt.sweep(fed, {"limit": [1, 2]}, **small)
