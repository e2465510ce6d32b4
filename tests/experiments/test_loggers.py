"""Logs in the formats of other tools, read back with these tools."""

import json
import signal
import struct
import sys

import pytest

import polytempo as pt
from polytempo import PolytempoError
from polytempo.experiments.loggers import LOGS, flat

SMALL = {"clients": 6, "limit": 120, "model": "linear", "updates": 12, "eval_every": 3}
SMALL |= {"epochs": 1, "adapt_epochs": 1, "lr": 0.05, "progress": False}
EXTRAS = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


@pytest.fixture(scope="module")
def unsynced():
    """MLflow makes its tables in a hundred transactions: a busy disk need not keep up."""
    sqlalchemy = pytest.importorskip("sqlalchemy")

    def relax(connection, record):
        connection.execute("PRAGMA synchronous=OFF")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", relax)
    yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", relax)


@pytest.fixture(scope="module")
def logged(tmp_path_factory, unsynced):
    """A run with all logs that was interrupted, and resumed for more updates: its folder and
    result."""
    for package in (*EXTRAS.values(), "alembic"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("logged") / "run"

    class Interrupt(pt.Callback):
        def evaluated(self, row):
            if row["updates"] == 6:
                signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polytempo.experiments.result_folder.can_plot", lambda: False)
        half = pt.simulate("digits", out=folder, log=list(LOGS), callbacks=[Interrupt()], **SMALL)
        assert not half.complete
        return folder, pt.resume(folder, updates=15, progress=False)


def curve(result, column="accuracy"):
    return [(row["updates"], row[column]) for row in result.history]


def test_logs_change_nothing(logged):
    plain = pt.simulate("digits", **{**SMALL, "updates": 15})
    assert plain.fingerprint == logged[1].fingerprint and plain.history == logged[1].history


def test_json_lines_hold_settings_rows_and_figures(logged):
    folder, result = logged
    first, *rows, last = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    assert first["settings"]["lr"] == 0.05 and first["settings"]["optimizer.momentum"] == 0.9
    assert [(row["updates"], row["accuracy"]) for row in rows] == curve(result)
    assert last["ended"] == "complete"
    assert last["final/accuracy_adapted"] == result.accuracy_adapted


def test_tensorboard_reads_the_curves(logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, result = logged
    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    for column in ("accuracy", "loss", "messages"):
        read = [(point.step, point.value) for point in found.Scalars(column)]
        assert read == [(step, pytest.approx(value)) for step, value in curve(result, column)]
    times = [point.wall_time for point in found.Scalars("accuracy")]
    assert times == [row["time"] for row in result.history]
    [final] = found.Scalars("final/accuracy")
    assert final.value == pytest.approx(result.accuracy)
    plugin = found.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert b"strategy.graph" in plugin.content and b"pfedgraph" in plugin.content


def test_mlflow_reads_the_run(logged):
    from mlflow.entities import ViewType
    from mlflow.tracking import MlflowClient

    folder, result = logged
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("polytempo").experiment_id
    [run] = client.search_runs([experiment])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["lr"] == "0.05" and run.data.params["updates"] == "15"
    assert run.data.metrics["final/accuracy"] == result.accuracy
    points = client.get_metric_history(run.info.run_id, "accuracy")
    assert [(point.step, point.value) for point in points] == curve(result)
    assert [point.timestamp for point in points] == [
        round(1000 * row["time"]) for row in result.history
    ]
    [earlier] = client.search_runs([experiment], run_view_type=ViewType.DELETED_ONLY)
    assert earlier.info.status == "KILLED" and earlier.data.params["updates"] == "12"


def records(path):
    """What the file of an offline run holds: records in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15  # of this block: too little for a header is padding
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_an_offline_run_of_wandb_holds_it_all(logged):
    folder, result = logged
    [place] = (folder / "wandb").glob("offline-run-*")
    [file] = place.glob("*.wandb")
    config, summary, rows = {}, {}, []
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            assert record.run.project == "polytempo" and record.run.display_name == "run"
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            rows.append({i.nested_key[0]: json.loads(i.value_json) for i in record.history.item})
        elif kind == "summary":
            summary |= {i.key: json.loads(i.value_json) for i in record.summary.update if i.key}
    assert config["lr"] == 0.05 and config["strategy.graph"] == "pfedgraph"
    assert [(row["_step"], row["accuracy"]) for row in rows] == curve(result)
    assert [row["time"] for row in rows] == [row["time"] for row in result.history]
    assert summary["final/accuracy"] == result.accuracy


@pytest.mark.parametrize("name", EXTRAS)
def test_who_lacks_an_extra_is_told_its_name(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, EXTRAS[name], None)
    wanted = f'log {name} needs the package {EXTRAS[name]}: pip install "polytempo\\[{name}\\]"'
    with pytest.raises(PolytempoError, match=wanted):
        pt.simulate("digits", log=name, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


def test_a_log_needs_a_folder():
    with pytest.raises(PolytempoError, match="log jsonl writes to the folder of a run; give out="):
        pt.simulate("digits", log="jsonl", **SMALL)


def test_a_log_of_a_run_that_failed_says_so(tmp_path):
    class Failing(pt.Callback):
        def evaluated(self, row):
            return 1 // (6 - row["updates"]) and None

    with pytest.raises(PolytempoError, match="Failing"):
        pt.simulate("digits", log="jsonl", out=tmp_path / "run", callbacks=[Failing()], **SMALL)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line.get("updates") for line in lines] == [None, 0, 3, None]
    assert lines[-1] == {"ended": "failed"}


def test_tables_become_names_with_dots():
    given = {"lr": 0.1, "strategy": {"name": "pace", "graph": {"name": "own", "gamma": 2}}}
    given |= {"hidden": [8, 8], "check": True}
    wanted = {"lr": 0.1, "strategy": "pace", "strategy.graph": "own", "strategy.graph.gamma": 2}
    assert flat(given) == wanted | {"hidden": "[8, 8]", "check": True}
