"""The command as a newcomer meets it: help, lists, JSON for machines, pictures of the data."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest
from rich.progress import Progress

import archives
from polytempo.cli.catalogue import KINDS, known
from polytempo.cli.commands import COMMANDS, load
from polytempo.core.events import Dispatch, Evaluate
from polytempo.core.metric import ACCURACY
from polytempo.data import Federation, available
from polytempo.experiments.advice import constant_level
from polytempo.experiments.callbacks import Run
from polytempo.experiments.config import RunConfig
from polytempo.experiments.progress import RunProgress
from polytempo.strategies import STRATEGIES
from websites import website

TINY = ("--clients", 6, "--updates", 5, "--limit", 120, "--model", "linear", "--epochs", 1)


def flat(text: str) -> str:
    """A help page without its frames and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


# -- help -----------------------------------------------------------------------------------------


def test_the_command_alone_shows_its_help(polytempo):
    outcome = polytempo()
    assert outcome.code in (0, 2)
    assert all(command in outcome.out + outcome.err for command in COMMANDS)
    assert "error" not in outcome.err  # this is no mistake


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, flag, polytempo):
    outcome = polytempo(command, flag)
    assert outcome.code == 0
    assert re.search(rf"Usage: .*polytempo {command} ", outcome.out)
    assert f"Example: polytempo {command}" in outcome.out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(command, polytempo):
    line = COMMANDS[command].help
    assert load(command).help.partition("\n")[0] == line
    assert f"{command} {line}" in flat(polytempo("--help").out)


def test_the_help_of_run_names_every_setting(polytempo):
    page = flat(polytempo("run", "--help").out)
    for name, field in RunConfig.model_fields.items():
        assert "--" + name.replace("_", "-") + " " in page
        assert flat(str(field.description)) in page


def test_the_help_of_run_tells_the_defaults(polytempo):
    page = flat(polytempo("run", "--help").out)
    for name, field in RunConfig.model_fields.items():
        if field.default not in (None, False):
            assert f"{flat(str(field.description))} [{field.default}]" in page, name
    assert "[a new one in runs, named by the settings]" in page


def test_the_help_of_compare_tells_what_the_target_is_by_default(polytempo):
    assert "[fedavg, or the first]" in flat(polytempo("compare", "--help").out)


def test_every_option_is_explained():
    for name in COMMANDS:
        for parameter in load(name).params:
            assert parameter.help, f"{name} {parameter.name}"


def test_an_unknown_command_names_the_nearest(polytempo):
    outcome = polytempo("compar")
    assert outcome.code == 2
    assert "compare" in outcome.err.replace("'compar'", "")


@pytest.mark.parametrize(
    "arguments",
    [["run", "--clinets", 6], ["run", "--updates", "ten"], ["run", "pace"], ["compare"]],
)
def test_mistakes_on_the_command_line_are_one_line_too(arguments, polytempo):
    outcome = polytempo(*arguments)
    assert outcome.error
    assert outcome.err.count("\n") == 1


def test_an_error_does_not_begin_with_an_empty_line(polytempo):
    assert polytempo("run", "--updates", 0).err.startswith("error: ")


# -- JSON -----------------------------------------------------------------------------------------


def test_json_is_all_that_run_prints(polytempo, tmp_path):
    outcome = polytempo("run", *TINY, "--out", tmp_path / "run", "--json")
    assert outcome.json == json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome.err == ""


def test_json_is_all_that_compare_prints(polytempo, tmp_path):
    outcome = polytempo("compare", "pace", "fedavg", *TINY, "--out", tmp_path, "--json")
    assert outcome.json == json.loads((tmp_path / "results.json").read_text())
    assert [found["strategy"] for found in outcome.json] == ["pace", "fedavg"]
    assert outcome.err == ""


@pytest.mark.parametrize("command", [["run"], ["compare", "pace"], ["data", "--data", "digits"]])
def test_an_error_leaves_stdout_empty_for_machines(command, polytempo, tmp_path):
    outcome = polytempo(*command, "--clients", 99999, "--json", "--out", tmp_path / "out.png")
    assert "99999" in outcome.error


# -- for people -----------------------------------------------------------------------------------


def test_run_prints_the_figures_of_its_result(finished):
    folder, outcome = finished
    found = json.loads((folder / "result.json").read_text())
    for share in ("accuracy", "accuracy_best", "accuracy_adapted"):
        assert f"{100 * found[share]:.1f}%" in outcome.out
    assert found["fingerprint"] in outcome.out
    assert f"{found['arrivals']} updates" in outcome.out


def test_progress_goes_to_stderr(finished):
    outcome = finished[1]
    assert "12/12" in outcome.err
    assert re.search(r"t=[\d.]+s +accuracy [\d.]+%", outcome.err)
    assert "12/12" not in outcome.out


def test_the_bar_looks_at_a_run_a_few_times_a_second_and_at_every_evaluation(monkeypatch):
    """There are thousands of events a second, and none may cost more than the update."""
    seen, now = [], 100.0
    monkeypatch.setattr(Progress, "update", lambda *given, **shown: seen.append(shown))
    monkeypatch.setattr("polytempo.experiments.jobs.monotonic", lambda: now)
    with RunProgress(quiet=True) as progress:
        bar = progress.watch("run")
        bar.start(Run({"updates": 100}, ACCURACY, None))
        for done in range(1, 101):
            now += 0.01
            bar.event(Dispatch(0, 1.0, done, 0, 3, 7))
        updates = [shown["completed"] for shown in seen]
        assert updates[0] == 0 and 9 <= len(updates) <= 12
        bar.event(Evaluate(1, 1.0, 100, 0, "accuracy", 0.5, 1.0))
    assert seen[-1]["completed"] == 100 and len(seen) == len(updates) + 1


def test_the_progress_of_a_resumed_run_is_where_it_ended(finished, polytempo):
    assert "12/12" in polytempo("run", "--resume", finished[0]).err


def test_each_figure_takes_one_line_when_piped(polytempo, tmp_path):
    name = "synthetic:groups=2,kind=permutation,samples=24,features=12,classes=4"
    given = ("--data", name, "--clients", 6, "--updates", 2, "--model", "linear")
    lines = polytempo("run", *given, "--out", tmp_path / "run").out.splitlines()
    assert [line for line in lines if not re.match(r" *\w[\w, ]*  \S", line)] == []


# -- strategies -----------------------------------------------------------------------------------


def test_json_lists_every_strategy_with_its_options(polytempo):
    listed = {row["name"]: row for row in polytempo("strategies", "--json").json}
    assert list(listed) == sorted(STRATEGIES)
    for name, row in listed.items():
        assert row["family"]
        assert row["paper"]
        assert row["summary"]
        made = STRATEGIES.create(name)
        options = {f.name: getattr(made, f.name) for f in fields(made) if f.init}
        for option in {"graph", "decision", "fusion"} & options.keys():
            inner = options[option]
            options |= {f"{option}.{f.name}": getattr(inner, f.name) for f in fields(inner)}
            options[option] = inner.name
        assert row["parameters"] == json.loads(json.dumps(options))


def test_every_listed_option_can_be_given(polytempo):
    for row in polytempo("strategies", "--json").json:
        given = {k: "none" if v is None else v for k, v in row["parameters"].items()}
        made = STRATEGIES.create({"name": row["name"], **given})
        assert made == STRATEGIES.create(row["name"])


def test_the_table_of_strategies_names_them_all(polytempo):
    out = polytempo("strategies").out
    assert all(f" {name} " in out for name in STRATEGIES)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("kind", KINDS)
def test_each_catalogue_lists_all_and_describes_one(kind, polytempo):
    registry = known(KINDS[kind])
    listed = {row["name"]: row for row in polytempo(kind, "--json").json}
    assert list(listed) == sorted(registry)
    out = polytempo(kind).out
    for name, row in listed.items():
        assert row["summary"] and f" {name} " in out
        page = polytempo(kind, name).out
        assert f"--{KINDS[kind].setting} {name}" in page
        assert flat(row["description"]) in flat(page)
        assert all(f"\n{option}=" in page for option in (*row["required"], *row["parameters"]))
    setting = KINDS[kind].setting.replace("-", "_")
    assert setting in RunConfig.model_fields
    registry.create(KINDS[kind].example)  # can be read


def test_a_name_that_is_nearly_right_is_corrected(polytempo):
    outcome = polytempo("partitions", "dirichlett")
    assert outcome.code == 2 and "did you mean 'dirichlet'" in flat(outcome.err)


# -- data -----------------------------------------------------------------------------------------


def test_json_lists_the_data_sets(polytempo, tmp_path):
    listed = {row["name"]: row for row in polytempo("data", "--json").json}
    assert set(listed) == {info.name for info in available()}
    assert listed["digits"]["available"] is True
    assert listed["digits"]["samples"] == 1797
    assert listed["mnist"]["available"] is False
    assert "POLYTEMPO_DATA" in listed["mnist"]["where"]
    elsewhere = {
        row["name"]: row for row in polytempo("data", "--data-dir", tmp_path, "--json").json
    }
    assert str(tmp_path) in elsewhere["mnist"]["where"]


def test_the_table_of_data_sets_names_them_all(polytempo):
    out = polytempo("data").out
    for info in available():
        assert info.name.partition(":")[0] in out
    assert ".npz" in out


def test_data_get_downloads_converts_and_is_listed(polytempo, tmp_path):
    folder = tmp_path / "data"
    with website() as site:
        path = archives.heart_disease(tmp_path)[0]
        site.files[path.name] = path.read_bytes()
        outcome = polytempo("data", "get", "heart-disease", "--url", site.url, "--data-dir", folder)
        assert outcome.code == 0, outcome.err
        assert f"heart_disease is here now, 38 samples: {folder}" in outcome.out.replace("\n", "")
        assert "note: heart+disease.zip: its publisher gives no hash" in outcome.err
        again = polytempo("data", "get", "heart-disease", "--data-dir", folder, "--json").json
        assert again[0]["new"] is False and len(site.asked) == 1
        del site.files[path.name]
        error = polytempo(
            *("data", "get", "heart-disease", "--url", site.url, "--data-dir", folder, "--force")
        ).error
        assert "404" in error and "--from heart+disease.zip" in error
    listed = polytempo("data", "list", "--data-dir", folder, "--json").json
    found = {row["name"]: row for row in listed}["heart_disease"]
    assert found["available"] and found["users"] == 4 and found["licence"] == "CC BY 4.0"
    figures = ("data", "--data", "heart-disease", "--data-dir", folder, "--json")
    assert polytempo(*figures).json["clients"] == 4


def test_data_get_takes_archives_that_are_here(polytempo, tmp_path):
    given = [part for path in archives.mnist(tmp_path) for part in ("--from", path)]
    folder = ("--data-dir", tmp_path / "data")
    outcome = polytempo("data", "get", "mnist", *given, *folder)
    assert outcome.code == 0 and "mnist is here now, 60 samples" in outcome.out
    assert "differs from the official file" in outcome.err
    error = polytempo("data", "get", "mnist", "cifar10", *given, *folder).error
    assert "--from and --url FILE are for one data set, but 2 are named" in error
    assert "come after it" in polytempo("data", *folder, "get", "mnist").error


def test_data_tells_how_a_set_is_spread(polytempo):
    lines = polytempo("data", "--data", "digits", "--clients", 8).out.splitlines()[:-1]
    assert len({line.index("  ", len(line) - len(line.lstrip())) for line in lines}) == 1
    assert any(re.search(r"commonest label  0\.\d\d$", line) for line in lines)
    digits = ("data", "--data", "digits", "--clients", 8, "--json")
    found = polytempo(*digits, "--partition", "iid").json
    assert found["clients"] == 8
    assert found["classes"] == 10
    assert found["smallest_client"] <= found["training_samples"] / 8 <= found["largest_client"]
    assert 9 < found["labels_per_client"] <= 10
    assert 0.1 <= found["commonest_label"] < 0.4
    assert 0.1 <= found["commonest_label_by_sample"] < 0.4
    few = polytempo(*digits, "--partition", "pathological").json
    assert few["labels_per_client"] <= 4


def test_data_without_labels_is_told_but_not_drawn(polytempo, tmp_path):
    found = polytempo("data", "--data", "diabetes", "--clients", 4, "--json").json
    assert (found["problem"], found["outputs"]) == ("regression", 1)
    assert not {"classes", "labels_per_client"} & set(found)
    text = polytempo("data", "--data", "diabetes", "--clients", 4).out
    assert "labels" not in text and re.search(r"groups  -$", text, re.MULTILINE)
    error = polytempo("data", "--data", "diabetes", "-o", tmp_path / "labels.png").error
    assert "diabetes is for regression and has no labels to count" in error


def test_data_draws_the_labels_of_each_client(polytempo, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "new folder" / "labels.png"
    outcome = polytempo("data", "--data", "digits", "--clients", 8, "--limit", 300, "-o", path)
    assert outcome.code == 0
    assert "labels.png" in outcome.out
    assert image.imread(path)[..., :3].std() > 0.02


def test_a_picture_of_an_unknown_kind_is_refused(polytempo, tmp_path):
    error = polytempo("data", "--data", "digits", "-o", tmp_path / "labels.xyz").error
    assert ".png" in error


# -- a run that comes to nothing ------------------------------------------------------------------


def test_a_run_that_learns_nothing_says_so_and_what_to_try(polytempo, tmp_path):
    given = ("--data", "digits", "--clients", 6, "--updates", 6, "--model", "linear", "--epochs", 1)
    for strategy, said in (("fedasync", "the same label for everybody"), ("pace", "commonest")):
        outcome = polytempo(
            *("run", *given, "--strategy", strategy, "--lr", 1e-6, "-o", tmp_path / strategy)
        )
        assert said in flat(outcome.err) and "larger --lr (now 1e-06)" in flat(outcome.err)
    fine = polytempo(
        *("run", *given, "--updates", 60, "--strategy", "fedasync", "--lr", 0.1),
        *("--partition", "iid", "-o", tmp_path / "fine"),
    )
    assert fine.code == 0 and "hardly learned" not in fine.err


def test_a_run_without_a_server_step_says_so(polytempo, tmp_path):
    """ACE waits for everybody."""
    given = ("--data", "digits", "--clients", 6, "--concurrency", 6, "--updates", 5)
    outcome = polytempo("run", *given, "--strategy", "ace", "-o", tmp_path / "ace")
    assert "not taken a step yet" in flat(outcome.err)
    assert "more --updates (now 5)" in flat(outcome.err)


def test_the_level_of_constants_by_hand():
    x = np.zeros((4, 2), np.float32)
    clients = [(x, [0, 0, 0, 1], x, [0, 0, 1, 1]), (x, [1, 1, 2, 1], x, [1, 1, 1, 2])]
    federation = Federation.from_arrays(
        [(a, np.array(b), c, np.array(d)) for a, b, c, d in clients]
    )
    assert constant_level(federation, one=True) == pytest.approx((0.5 + 0.75) / 2)  # label 1
    assert constant_level(federation, one=False) == pytest.approx((0.5 + 0.75) / 2)
    assert constant_level(
        Federation.from_arrays([(x, np.array([0, 0, 1, 2]), x, np.array([0, 0, 0, 2]))] * 2), True
    ) == pytest.approx(0.75)
