"""Callbacks: what they are told, how they end a run, and that they do no harm."""

import json
import math
import signal

import pytest

import polytempo as pt
from fleets import run_fleet
from polytempo import PolytempoError
from polytempo.core.events import Upload
from polytempo.core.metric import ACCURACY, MetricInfo
from polytempo.experiments import drive
from polytempo.experiments.callbacks import STOPS, Run
from polytempo.experiments.config import difference, make_config, read_config, write_config
from polytempo.experiments.folders import of_run

SETTINGS = {"clients": 6, "limit": 120, "model": "linear", "updates": 24, "eval_every": 2}
SMALL = {**SETTINGS, "epochs": 1, "adapt_epochs": 1, "progress": False}
NEVER_BETTER = "early:patience=3,min_delta=10"  # the first row is the best; three more are awaited


class Diary(pt.Callback):
    """Writes down all that it is told."""

    def __init__(self):
        self.told, self.rows, self.events = [], [], []

    def start(self, run):
        self.told.append(("start", run))

    def event(self, event):
        self.events.append(event)

    def evaluated(self, row):
        self.rows.append(row)

    def end(self, result):
        self.told.append(("end", result))

    def failed(self, error):
        self.told.append(("failed", error))


class InterruptAt(pt.Callback):
    """As Ctrl-C does, at the first event of that number or later."""

    def __init__(self, number):
        self.number = number

    def event(self, event):
        if event.n >= self.number:
            self.number = math.inf
            signal.raise_signal(signal.SIGINT)


def simulate(**settings):
    return pt.simulate("digits", **{**SMALL, **settings})


def summary(folder):
    found = json.loads((folder / "result.json").read_text())
    return {key: found[key] for key in found if key not in ("wall_seconds", "peak_rss_mb")}


def assert_same(one, other):
    """Both folders hold the same run, bit for bit."""
    for name in ("events.jsonl", "history.csv", "clients.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert summary(one) == summary(other)


# -- what they are told ----------------------------------------------------------------------------


def test_a_callback_is_told_of_everything_and_changes_nothing(tmp_path):
    diary = Diary()
    simulate(out=tmp_path / "plain", events=True)
    result = simulate(out=tmp_path / "watched", events=True, callbacks=[diary])
    assert_same(tmp_path / "plain", tmp_path / "watched")
    (first, run), (last, ended) = diary.told
    assert (first, last) == ("start", "end") and ended is result
    assert run.folder == tmp_path / "watched" and run.metric.name == "accuracy"
    assert run.settings == make_config(read_config(run.folder / "config.toml")).settings()
    assert [event.n for event in diary.events] == list(range(len(diary.events)))
    lines = (tmp_path / "watched" / "events.jsonl").read_text().splitlines()
    assert len(lines) == len(diary.events)
    assert diary.rows == result.history  # the last one with the adapted figure
    assert diary.rows[-1]["accuracy_adapted"] == result.adapted


def test_what_a_callback_does_to_a_row_is_its_own_business():
    class Spoil(Diary):
        def evaluated(self, row):
            row.clear()

    assert simulate(callbacks=[Spoil()]).history == simulate().history


def test_a_resumed_run_tells_its_earlier_rows_first(tmp_path):
    whole, before, after = Diary(), Diary(), Diary()
    simulate(callbacks=[whole])
    half = simulate(out=tmp_path / "run", callbacks=[before, InterruptAt(30)])
    assert not half.complete and before.told[-1][1] is half
    pt.resume(tmp_path / "run", callbacks=[after], progress=False)
    assert after.rows == whole.rows and before.rows == whole.rows[: len(before.rows)]
    assert before.events + after.events == whole.events


def test_comparisons_and_sweeps_tell_of_one_run_after_the_other(tmp_path):
    diary = Diary()
    pt.compare("digits", ["fedavg", "fedasync"], callbacks=[diary], **SMALL)
    pt.sweep("digits", {"lr": [0.1]}, callbacks=[diary], **SMALL)
    assert [kind for kind, _ in diary.told] == ["start", "end"] * 3
    names = [run.settings["strategy"]["name"] for kind, run in diary.told if kind == "start"]
    assert names == ["fedavg", "fedasync", "pace"]
    with pytest.raises(PolytempoError, match="no callbacks, because each is a process"):
        pt.sweep("digits", {"lr": [1]}, callbacks=[diary], out=tmp_path / "s", jobs=2, **SMALL)


# -- when they fail --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["start", "event", "evaluated", "end"])
def test_an_error_names_the_callback_and_others_are_told(method):
    diary = Diary()

    def fail(self, about):
        return 1 / 0

    fail.__name__ = method
    failing = type("Failing", (pt.Callback,), {method: fail})
    with pytest.raises(PolytempoError, match=f"callback Failing, {method}: ZeroDivisionError: "):
        simulate(callbacks=[diary, failing()])
    assert diary.told[0][0] == "start" and diary.told[-1][0] == "failed"


def test_a_second_error_does_not_hide_the_first():
    class Failing(pt.Callback):
        def evaluated(self, row):
            raise ValueError("first")

        def failed(self, error):
            raise KeyError("mine")

    with pytest.raises(PolytempoError, match="Failing, evaluated: ValueError: first") as caught:
        simulate(callbacks=[Failing()])
    assert caught.value.__notes__ == [f"callback {Failing.__qualname__}, failed: KeyError: 'mine'"]


def test_a_run_that_a_callback_broke_off_can_be_resumed(tmp_path, monkeypatch):
    class Failing(pt.Callback):
        def event(self, event):
            if isinstance(event, Upload) and event.updates == 7:
                raise RuntimeError("enough")

    with monkeypatch.context() as patch, pytest.raises(PolytempoError, match="Failing"):
        patch.setattr(drive, "CHECKPOINT_SECONDS", -1e9)
        simulate(out=tmp_path / "broken", events=True, updates=9, callbacks=[Failing()])
    assert (tmp_path / "broken" / "checkpoint.safetensors").exists()
    pt.resume(tmp_path / "broken", progress=False)
    simulate(out=tmp_path / "whole", events=True, updates=9)
    assert_same(tmp_path / "broken", tmp_path / "whole")


# -- early stopping --------------------------------------------------------------------------------


def judged(values, metric=ACCURACY, column="accuracy", **options):
    """The update at which a run with these values, 10 updates apart, is stopped, and why."""
    callback = pt.EarlyStopping(**options)
    callback.start(Run({}, metric, None))
    for number, value in enumerate(values):
        if why := callback.evaluated({"updates": 10 * number, column: value}):
            return 10 * number, why
    return None


def test_patience_is_counted_from_the_last_better_value():
    values = [0.25, 0.5, 0.5, 0.5625, 0.375, 0.75, 0.75]
    why = "no better accuracy in 2 evaluations than 0.5 at update 10"
    assert judged(values, patience=2, min_delta=0.0625) == (30, why)  # 0.5625 is not enough better
    assert judged(values, patience=2) is None  # it is better: 40 is the first without, 50 is better
    assert judged(values, patience=1) == (20, why.replace("2 evaluations", "1 evaluations"))
    assert judged([*values, 0.5], patience=2)[0] == 70


def test_lower_may_be_better_and_what_is_not_known_does_not_count():
    losses = [2.0, 1.0, math.nan, 1.0, None, math.inf]
    wanted = "no better loss in 3 evaluations than 1 at update 10"
    assert judged(losses, patience=3, figure="loss", column="loss") == (50, wanted)
    mse = MetricInfo("mse", "mean squared error", "lower", False)
    assert judged([3.0, 2.0, 2.5], mse, "mse", patience=1)[0] == 20
    sent = {"figure": "messages", "column": "messages", "patience": 1}
    assert judged([1, 2, 3], **sent, better="lower")[0] == 10
    with pytest.raises(PolytempoError, match="is messages better if higher or if lower"):
        judged([1], **sent)
    with pytest.raises(PolytempoError, match="no column 'accurcy'; did you mean 'accuracy'"):
        judged([1], figure="accurcy", better="higher")
    with pytest.raises(PolytempoError, match=r"stop early: patience: .*greater than or equal to 1"):
        STOPS.create("early:patience=0")


@pytest.mark.parametrize("strategy", ["pace", "fedavg", "standalone", "p2p", "pooled"])
def test_a_run_of_any_kind_ends_where_it_is_told_to(strategy, tmp_path):
    extra = {"epochs": 5} if strategy == "p2p" else {}
    whole = simulate(strategy=strategy, **extra)
    found = simulate(strategy=strategy, stop=NEVER_BETTER, out=tmp_path / "run", **extra)
    assert found.complete and found.arrivals < whole.arrivals
    assert found.stopped == summary(tmp_path / "run")["stopped"]
    best = whole.history[0]["accuracy"]
    assert found.stopped == f"no better accuracy in 3 evaluations than {best:.6g} at update 0"
    assert whole.stopped is None
    assert [row["accuracy"] for row in found.history[:4]] == [
        row["accuracy"] for row in whole.history[:4]
    ]
    assert found.history[3]["updates"] <= found.arrivals  # at most a closing evaluation follows
    assert len(found.history) in (4, 5)
    assert found.adapted is not None


def test_an_object_and_a_setting_end_a_run_alike():
    by_setting = simulate(stop=NEVER_BETTER)
    by_object = simulate(callbacks=[pt.EarlyStopping(patience=3, min_delta=10)])
    assert by_setting.fingerprint == by_object.fingerprint
    assert by_setting.stopped == by_object.stopped and by_setting.arrivals == 6


@pytest.mark.parametrize("at", [5, 12, "last"])
def test_a_run_that_is_stopped_resumes_bit_by_bit(at, tmp_path):
    """Whether it is interrupted before its end, or while the last models are fine-tuned."""
    given = {"stop": NEVER_BETTER, "events": True}
    whole = simulate(out=tmp_path / "whole", **given)

    class AtTheEnd(pt.Callback):
        def evaluated(self, row):
            if row["updates"] == whole.arrivals:
                signal.raise_signal(signal.SIGINT)

    callback = AtTheEnd() if at == "last" else InterruptAt(at)
    half = simulate(out=tmp_path / "run", callbacks=[callback], **given)
    assert not half.complete
    again = pt.resume(tmp_path / "run", progress=False)
    assert again.complete and again.stopped == whole.stopped
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_more_updates_do_not_change_a_run_that_was_stopped_but_more_patience_does(tmp_path):
    given = {"out": tmp_path / "run", "events": True}
    found = simulate(stop=NEVER_BETTER, **given)
    longer = pt.resume(tmp_path / "run", updates=30, progress=False)
    assert longer.fingerprint == found.fingerprint and longer.stopped == found.stopped
    free = simulate(resume=True, **given)
    whole = simulate()
    assert free.stopped is None and free.fingerprint == whole.fingerprint


def test_a_run_that_did_all_its_updates_was_not_stopped():
    found = simulate(updates=6, stop=NEVER_BETTER)
    assert found.arrivals == 6 and found.stopped is None


# -- settings --------------------------------------------------------------------------------------


def test_logs_are_not_part_of_what_a_run_is(tmp_path):
    plain, logged = make_config({}), make_config({"log": ["jsonl", "wandb:project=mine"]})
    assert difference(logged, plain.settings()) is None
    assert of_run(plain) == of_run(logged)
    assert difference(make_config({"stop": "early"}), plain.settings()) == "stop"
    write_config(tmp_path / "config.toml", logged)
    assert make_config(read_config(tmp_path / "config.toml")) == logged
    assert make_config({"log": "jsonl"}) == make_config({"log": [{"name": "jsonl"}]})
    with pytest.raises(PolytempoError, match="log jsonl is there twice"):
        make_config({"log": ["jsonl", "jsonl"]})
    with pytest.raises(PolytempoError, match="no log is called 'tensorbord'; did you mean"):
        make_config({"log": "tensorbord"})


def test_the_command_line_stops_and_logs(polytempo, tmp_path):
    given = [("--" + name.replace("_", "-"), value) for name, value in SETTINGS.items()]
    given = [word for pair in given for word in pair]
    folder = tmp_path / "run"
    outcome = polytempo(
        *("run", *given, "--epochs", 1, "--stop", NEVER_BETTER, "--out", folder),
        *("--log", "jsonl", "--log", f"{__name__}:Named"),
    )
    assert outcome.code == 0 and "no better accuracy in 3 evaluations" in outcome.out
    assert NAMED.pop() == folder
    assert (folder / "log.jsonl").exists()
    said = polytempo("run", "--resume", folder, "--stop", "early").error
    assert "only --updates, --workers, --log and --plots can be changed, not --stop" in said
    assert polytempo("run", "--resume", folder, "--log", "jsonl").code == 0
    assert not NAMED


NAMED = []


class Named(pt.Callback):
    """A user's own, which the command line names."""

    def start(self, run):
        NAMED.append(run.folder)


# -- a fleet ---------------------------------------------------------------------------------------


def test_a_server_logs_each_exam_once(tmp_path):
    outcome = run_fleet(tmp_path, strategy="fedasync", log="jsonl")
    first, *rows, last = (
        json.loads(line) for line in (tmp_path / "server" / "log.jsonl").read_text().splitlines()
    )
    assert first["settings"]["strategy"] == "fedasync"
    assert [row["updates"] for row in rows] == [row["updates"] for row in outcome.result.history]
    assert rows[-1]["accuracy"] == outcome.result.history[-1]["accuracy"]
    assert last["ended"] == "complete" and last["final/arrivals"] == 24
