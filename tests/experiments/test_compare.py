"""Several strategies on the same federation, devices and seeds: nothing is run twice."""

import csv
import json
import statistics
from pathlib import Path

import pytest

from polytempo.core.events import Evaluate
from polytempo.experiments import compare as module
from polytempo.experiments.config import read_config

real_run = module.run
SMALL = ("--clients", 6, "--updates", 12, "--limit", 300, "--adapt-epochs", 1)
TINY = ("--clients", 6, "--updates", 10, "--limit", 120, "--model", "linear", "--epochs", 1)


@pytest.fixture(scope="session")
def compared(polytempo, tmp_path_factory):
    """PACE and FedAvg over two seeds, with the plots of the comparison. To be read only."""
    folder = tmp_path_factory.mktemp("compared")
    arguments = ("compare", "pace", "fedavg", *SMALL, "--seeds", 2, "-o", folder)
    with pytest.MonkeyPatch.context() as patch:  # plots of the single runs are tested elsewhere
        patch.setattr("polytempo.experiments.result_folder.can_plot", lambda: False)
        return folder, polytempo(*arguments)


@pytest.fixture
def quick(polytempo, tmp_path) -> Path:
    """A folder with two quick strategies in it."""
    assert polytempo("compare", "pace", "standalone", *TINY, "-o", tmp_path).code == 0
    return tmp_path


@pytest.fixture
def forbidden(monkeypatch):
    """From now on, nothing may be run."""

    def refuse(*args, **kwargs):
        raise AssertionError("this was to be taken from the folder")

    monkeypatch.setattr(module, "run", refuse)
    monkeypatch.setattr(module, "resume", refuse)


def summaries(folder: Path, strategy: str, seeds=(0, 1)) -> list[dict]:
    places = [folder / strategy / f"seed{seed}" / "result.json" for seed in seeds]
    return [json.loads(place.read_text()) for place in places]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_plots_may_come_as_pdf_without_a_new_run(polytempo, tmp_path, monkeypatch, forbidden):
    with monkeypatch.context() as patch:
        patch.setattr(module, "run", real_run)
        arguments = ("compare", "fedasync", "fedavg", *TINY, "-o", tmp_path)
        assert polytempo(*arguments).code == 0
    monkeypatch.setattr(module, "can_plot", lambda: True)
    assert polytempo(*arguments, "--plots", "pdf").code == 0
    drawn = {file.stem for file in tmp_path.glob("*.png")}
    assert {"accuracy_time", "loss_time", "distribution"} <= drawn
    assert {file.stem for file in tmp_path.glob("*.pdf")} == drawn
    assert "'png', 'pdf' or 'svg'" in polytempo(*arguments, "--plots", "pfd").error


def test_every_strategy_runs_with_every_seed(compared):
    folder, outcome = compared
    assert outcome.code == 0
    for strategy in ("pace", "fedavg"):
        for seed in (0, 1):
            [found] = summaries(folder, strategy, [seed])
            assert (found["strategy"], found["seed"], found["complete"]) == (strategy, seed, True)


def test_strategies_share_everything_but_themselves(compared):
    for seed in (0, 1):
        one = read_config(compared[0] / "pace" / f"seed{seed}" / "config.toml")
        other = read_config(compared[0] / "fedavg" / f"seed{seed}" / "config.toml")
        assert one.pop("strategy") != other.pop("strategy")
        assert (one.pop("refill"), other.pop("refill")) == ("idle", "cohort")
        assert one == other
        [a], [b] = (summaries(compared[0], name, [seed]) for name in ("pace", "fedavg"))
        assert a["federation"] == b["federation"]


def test_the_table_shows_mean_and_spread_and_the_summary_holds_the_numbers(compared):
    folder, outcome = compared
    table = {row["strategy"]: row for row in rows(folder)}
    for strategy in ("pace", "fedavg"):
        runs = summaries(folder, strategy)
        [line] = [line for line in outcome.out.splitlines() if line.strip().startswith(strategy)]
        for heading, key in [("handed", "accuracy"), ("adapted", "accuracy_adapted")]:
            values = [run[key] for run in runs]
            mean, spread = statistics.mean(values), statistics.stdev(values)
            row = table[strategy]
            assert float(row[heading]) == pytest.approx(mean)
            assert float(row[f"{heading}_std"]) == pytest.approx(spread)
            assert f"{100 * mean:.1f} ± {100 * spread:.1f}%" in line


def test_the_summary_holds_numbers_alone(compared):
    for row in rows(compared[0]):
        assert row.pop("strategy") in ("pace", "fedavg") and row.pop("metric") == "accuracy"
        assert row["seeds"] == "2"
        assert all(float(value) == float(value) for value in row.values() if value)


def test_the_time_to_the_best_of_fedavg_is_the_default_column(compared):
    folder = compared[0]
    table = {row["strategy"]: row for row in rows(folder)}
    times = []
    for seed, run in enumerate(summaries(folder, "fedavg")):
        with (folder / "fedavg" / f"seed{seed}" / "history.csv").open(newline="") as file:
            history = list(csv.DictReader(file))
        reached = [r for r in history if float(r["accuracy"]) >= run["accuracy_best"]]
        times.append(float(reached[0]["time"]))
    assert float(table["fedavg"]["seconds_to_target"]) == pytest.approx(statistics.mean(times))
    assert table["fedavg"]["reached"] == "2"
    assert "s to best of fedavg" in compared[1].out


def test_a_comparison_writes_results_plots_and_report(compared):
    folder = compared[0]
    results = json.loads((folder / "results.json").read_text())
    assert results == [*summaries(folder, "pace"), *summaries(folder, "fedavg")]
    for name in ("accuracy_time.png", "accuracy_updates.png", "accuracy_messages.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    text = (folder / "report.html").read_text()
    assert text.count("data:image/png;base64,") == 5
    assert (folder / "distribution.png").exists()
    assert "pace" in text
    assert "fedavg" in text


def test_a_second_call_runs_nothing_again(quick, polytempo, forbidden):
    before = {path: path.stat().st_mtime_ns for path in quick.glob("*/seed*/*")}
    outcome = polytempo("compare", "pace", "standalone", *TINY, "-o", quick, "--json")
    expected = [*summaries(quick, "pace", [0]), *summaries(quick, "standalone", [0])]
    assert outcome.json == expected
    assert {path: path.stat().st_mtime_ns for path in quick.glob("*/seed*/*")} == before


def test_a_strategy_or_a_seed_can_be_added_later(quick, polytempo, monkeypatch):
    real, ran = module.run, []

    def record(config, place, **more):
        ran.append((config.strategy_table["name"], config.seed))
        return real(config, place, **more)

    monkeypatch.setattr(module, "run", record)
    more = ("compare", "pace", "fedbuff", *TINY, "--seeds", 2, "-o", quick, "--json")
    outcome = polytempo(*more)
    assert ran == [("fedbuff", 0), ("pace", 1), ("fedbuff", 1)]  # seed by seed
    assert [(found["strategy"], found["seed"]) for found in outcome.json] == [
        ("pace", 0),
        ("pace", 1),
        ("fedbuff", 0),
        ("fedbuff", 1),
    ]


def test_the_first_seed_can_be_chosen(polytempo, tmp_path):
    arguments = ("compare", "fedavg", *TINY, "--first-seed", 7, "--seeds", 2, "-o", tmp_path)
    assert [found["seed"] for found in polytempo(*arguments, "--json").json] == [7, 8]


def test_a_seed_from_the_file_is_not_ignored(polytempo, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("seed = 5\n")
    outcome = polytempo("compare", "fedavg", *TINY, "-c", file, "-o", tmp_path / "c", "--json")
    assert outcome.code == 2 or [found["seed"] for found in outcome.json] == [5]


def test_options_of_strategies_tell_them_apart(polytempo, tmp_path):
    labels = ("fedasync:alpha=0.2", "fedasync:alpha=0.9,a=0.1")
    outcome = polytempo("compare", *labels, *TINY, "-o", tmp_path)
    assert outcome.code == 0
    assert len(list(tmp_path.glob("*/seed0/result.json"))) == 2
    table = rows(tmp_path)
    assert [row["strategy"] for row in table] == list(labels)
    one, other = (json.loads(p.read_text()) for p in tmp_path.glob("*/seed0/result.json"))
    assert one["fingerprint"] != other["fingerprint"]


def test_the_summary_is_a_rectangle_whatever_the_target_is_called(polytempo, tmp_path):
    label = "fedasync:alpha=0.9,a=0.1"  # the comma is in a heading, too
    assert polytempo("compare", label, *TINY, "-o", tmp_path).code == 0
    with (tmp_path / "summary.csv").open(newline="") as file:
        header, *body = csv.reader(file)
    assert [len(row) for row in body] == [len(header)]
    assert body[0][0] == label


def test_other_settings_in_the_same_folder_are_refused(quick, polytempo):
    before = {path: path.read_bytes() for path in quick.rglob("*") if path.is_file()}
    error = polytempo("compare", "pace", "standalone", *TINY, "--lr", 0.5, "-o", quick).error
    assert "lr = 0.01" in error
    assert "0.5" in error
    assert "--out" in error
    assert {path: path.read_bytes() for path in quick.rglob("*") if path.is_file()} == before


def test_an_interrupted_comparison_goes_on(polytempo, interrupt, tmp_path):
    arguments = ("compare", "pace", "fedavg", *TINY)
    whole = polytempo(*arguments, "-o", tmp_path / "whole", "--json").json
    interrupt(12)
    stopped = polytempo(*arguments, "-o", tmp_path / "halved")
    assert stopped.code == 130
    assert "again" in stopped.err
    assert not (tmp_path / "halved" / "results.json").exists()
    assert polytempo(*arguments, "-o", tmp_path / "halved").code == 0
    finished = json.loads((tmp_path / "halved" / "results.json").read_text())
    assert [run["fingerprint"] for run in finished] == [run["fingerprint"] for run in whole]


def test_an_interrupt_in_the_last_evaluation_of_a_run_is_not_lost(polytempo, interrupt, tmp_path):
    """The run is finished by then: the comparison must stop all the same."""
    interrupt(lambda event: isinstance(event, Evaluate) and event.updates == 10)
    outcome = polytempo("compare", "pace", "fedavg", *TINY, "-o", tmp_path)
    assert outcome.code == 130
    assert not (tmp_path / "fedavg").exists()


@pytest.mark.parametrize(
    ("target", "heading"),
    [("0.5", "to 50.0%"), ("standalone", "to best of standalone"), ("1", "to 100.0%")],
)
def test_the_target_is_an_accuracy_or_a_strategy(target, heading, quick, polytempo, forbidden):
    arguments = ("compare", "pace", "standalone", *TINY, "-o", quick)
    outcome = polytempo(*arguments, "--target", target)
    assert outcome.code == 0 and heading in outcome.out
    best = float(rows(quick)[1]["best"])
    assert float(rows(quick)[0]["target"]) == (best if target == "standalone" else float(target))


def test_a_target_that_is_never_reached_is_never(quick, polytempo, forbidden):
    arguments = ("compare", "pace", "standalone", *TINY, "-o", quick, "--target", "1.0")
    outcome = polytempo(*arguments)
    assert outcome.code == 0 and outcome.out.count(" never ") == 2
    assert [row["reached"] for row in rows(quick)] == ["0", "0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pace", "fedavg", "--target", "fedav"), ["fedav", "did you mean 'fedavg'"]),
        (("pace", "--target", "80"), ["80", "0.8"]),
        (("pace", "--target", "-1"), ["-1"]),
        (("pace", "--target", "nan"), ["nan"]),
        (("pace", "--target", "fedavg"), ["fedavg", "pace"]),  # it takes no part
        (("pace", "fedavgg"), ["fedavgg", "did you mean 'fedavg'"]),
        (("pace", "fedbuff:buffersize=3"), ["buffersize", "buffer_size"]),
        (("pace", "--seeds", "0"), ["--seeds", "0"]),
    ],
)
def test_mistakes_are_found_before_anything_is_run(arguments, words, polytempo, tmp_path):
    error = polytempo("compare", *arguments, *TINY, "-o", tmp_path / "out").error
    assert all(word in error for word in words), error
    assert not (tmp_path / "out").exists()


def test_no_strategy_at_all_is_a_mistake(polytempo):
    outcome = polytempo("compare")
    assert outcome.code == 2
    assert "strategies" in outcome.err


def test_a_damaged_result_is_named(quick, polytempo):
    (quick / "pace" / "seed0" / "result.json").write_text("{")
    error = polytempo("compare", "pace", *TINY, "-o", quick).error
    assert str(quick / "pace" / "seed0") in error


# -- rows that keep everybody honest ---------------------------------------------------------------


def test_fine_tuned_forms_and_references_are_rows_of_their_own(polytempo, tmp_path):
    arguments = ("compare", "fedavg", "fedper", "pace", *TINY, "--model", "mlp:hidden=[8]")
    arguments += ("--solver", "torch")
    more = ("--adapt-epochs", 2, "--seeds", 2, "--devices", "two-speed:factor=3", "-o", tmp_path)
    flags = ("--fine-tuned", "--references")
    outcome = polytempo(*arguments, *more, *flags)
    assert outcome.code == 0, outcome
    table = {row["strategy"]: row for row in rows(tmp_path)}
    # FedPer's model is not one for all, nor PACE's
    tuned = "fedavg + fine-tuning"
    assert list(table) == ["fedavg", "fedper", "pace", "standalone", "majority", tuned]
    assert table[tuned]["handed"] == table[tuned]["adapted"] == table["fedavg"]["adapted"]
    assert table[tuned]["messages"] == table["fedavg"]["messages"]
    runs = summaries(tmp_path, "fedavg")
    later = [run["simulated_time"] + run["adaptation_time"] for run in runs]
    assert float(table[tuned]["seconds"]) == pytest.approx(statistics.mean(later))
    worst = [run["accuracy_adapted_worst10"] for run in runs]
    assert float(table[tuned]["worst10"]) == pytest.approx(statistics.mean(worst))
    listed = json.loads((tmp_path / "results.json").read_text())
    assert [run["strategy"] for run in listed][-2:] == [tuned, tuned]
    assert listed[-1]["accuracy"] == runs[1]["accuracy_adapted"]
    # nothing is run for it, and it can be asked for later
    assert polytempo(*arguments, *more).code == 0
    assert len(rows(tmp_path)) == 3


def test_without_fine_tuning_there_are_no_fine_tuned_rows(polytempo, tmp_path):
    arguments = ("compare", "fedavg", *TINY, "--adapt-epochs", 0, "--fine-tuned", "-o", tmp_path)
    assert polytempo(*arguments).error.startswith("--fine-tuned needs")
