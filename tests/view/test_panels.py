"""What the page is told: capped, and whole whatever the folder holds."""

import json
import os
import random

import numpy as np
import pytest

from polytempo.view import panels
from polytempo.view.folder import RunFolder
from polytempo.view.shelf import Shelf, find


def looked(folder):
    run = RunFolder(folder, folder.name)
    run.look()
    return run


def shown(folder, **options):
    return json.loads(json.dumps(panels.everything(looked(folder), **options), allow_nan=False))


def a_training(log, client, start, end, staleness=0):
    number = log.n
    return [
        log("dispatch", start, client=client, dispatch=number),
        log("upload", end, client=client, dispatch=number, staleness=staleness, versions=0),
    ]


def test_curves_are_of_the_history_and_of_events_that_it_does_not_have_yet(make_run, log):
    folder = make_run(
        events=[
            log("evaluate", 0.0, metric="accuracy", value=0.1, loss=2.0),
            log("evaluate", 5.0, metric="accuracy", value=0.4, loss=1.0),
        ]
    )
    with (folder / "history.csv").open("a") as file:
        file.write("0.0,0,0,0.1,2.0,0\n5.0,1,0,")  # the second row is half-written
    found = shown(folder)["curve"]
    assert found["time"] == [0.0, 5.0] and found["value"] == [0.1, 0.4]
    assert found["loss"] == [2.0, 1.0]


def test_a_resumed_run_is_read_anew(make_run, log):
    lines = [log("evaluate", float(k), metric="accuracy", value=k / 10, loss=1.0) for k in range(6)]
    folder = make_run(events=lines)
    run = looked(folder)
    version = run.version
    assert len(panels.curve(run)["time"]) == 6
    with (folder / "events.jsonl").open("r+b") as file:  # as a resumed run cuts off its log
        file.truncate(len(b"".join(lines[:3])))
    run.look()
    assert panels.curve(run)["time"] == [0.0, 1.0, 2.0] and run.version > version
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b"".join(lines[3:]))
    run.look()
    assert panels.curve(run)["time"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert run.look() == run.look()  # nothing new


def test_without_events_the_page_says_how_to_get_them(make_run):
    folder = make_run()
    with (folder / "history.csv").open("a") as file:
        file.write("0.0,0,0,0.1,2.0,0\n1.0,5,5,0.6,1.0,9\n")
    found = shown(folder)
    assert "--events" in found["notes"][0] and found["clients"] is None
    assert found["updates"] == 5 and found["figures"]["accuracy now"] == "60.0%"
    assert found["figures"]["models sent"] == "9"


def test_the_slowest_come_first(make_run, log):
    lines = [
        *a_training(log, 0, 0.0, 1.0, 2),
        *a_training(log, 3, 0.0, 9.0),
        log("leave", 9.0, client=1),
    ]
    found = shown(make_run(events=lines))
    assert found["timeline"]["clients"] == [3, 0] and found["timeline"]["seconds"] == [9.0, 1.0]
    assert found["staleness"] == {"width": 1, "start": [0, 1, 2], "count": [1, 0, 1]}


@pytest.mark.parametrize(
    ("before", "now", "models"),
    [
        ("seed = 0", 'seed = 0\nrefill = "cohort"', True),
        ('name = "pace"', 'name = "standalone"', False),  # who trains alone sends nothing
    ],
)
def test_there_is_no_staleness_where_nothing_is_overtaken(make_run, log, before, now, models):
    folder = make_run(events=[*a_training(log, 0, 0.0, 1.0, 2), *a_training(log, 3, 0.0, 9.0)])
    config = folder / "config.toml"
    config.write_text(config.read_text().replace(before, now))
    found = shown(folder)
    assert found["staleness"] is None and "mean staleness" not in found["figures"]
    assert found["clients"]["staleness"] is None and set(found["timeline"]["staleness"]) == {0}
    assert (found["messages"] is not None) == models == (found["figures"]["models sent"] != "0")


def states(found):
    clients = found["clients"]
    return [clients["states"][int(code)] for code in clients["state"]]


def test_what_every_client_does(make_run, log):
    lines = [
        *a_training(log, 0, 0.0, 1.0),
        log("dispatch", 1.0, client=2, dispatch=90),
        log("leave", 1.0, client=1),
    ]
    folder = make_run(events=lines)
    found = shown(folder)
    assert states(found) == ["uploading", "gone", "training", "idle"]
    assert found["clients"]["counts"] == [1, 1, 1, 1]
    (folder / "result.json").write_text('{"complete": true}')
    found = shown(folder)  # nothing is under way any more
    assert states(found) == ["idle", "gone", "idle", "idle"]
    assert found["status"] == "finished"


def test_the_metric_of_every_client(make_run, log):
    folder = make_run(events=a_training(log, 0, 0.0, 1.0))
    (folder / "clients.csv").write_text("client,name,accuracy\n0,ann,0.5\n2,bob,\nx,y,z\n")
    found = shown(folder)["clients"]
    assert found["value"] == [0.5, None, None, None] and found["names"][:3] == ["ann", None, "bob"]


def test_thousands_of_clients_and_a_hundred_thousand_events_stay_small(make_run):
    draw = random.Random(0)
    lines, now = [], 0.0
    for k in range(50_000):
        now += 0.01
        client, stale = draw.randrange(12_000), draw.randrange(300)
        head = f'"n": {2 * k}, "time": {now}, "updates": {k}, "version": {k}, "client": {client}'
        lines.append(f'{{{head}, "event": "dispatch", "dispatch": {k}}}\n')
        lines.append(
            f'{{{head}, "event": "upload", "dispatch": {k}, "staleness": {stale}, "versions": 0}}\n'
        )
    folder = make_run(events=[line.encode() for line in lines], clients=12_000)
    run = looked(folder)
    while run.unread:
        run.look()
    found = panels.everything(run)
    assert found["events"] == 100_000
    assert len(found["clients"]["state"]) == panels.CELLS and found["clients"]["total"] == 12_000
    assert sum(found["clients"]["counts"]) == 12_000
    assert len(found["timeline"]["clients"]) == panels.ROWS
    assert len(found["timeline"]["row"]) <= panels.BARS
    assert len(found["staleness"]["count"]) <= panels.BINS + 1
    assert sum(found["staleness"]["count"]) == 50_000
    assert len(json.dumps(found)) < 300_000


def test_long_curves_are_thinned_to_their_cap(make_run, log):
    lines = [
        log("evaluate", float(k), metric="accuracy", value=0.5, loss=1.0) for k in range(2_500)
    ]
    found = shown(make_run(events=lines))["curve"]
    assert len(found["time"]) == panels.POINTS and found["left_out"] == 1_500
    assert found["time"][0] == 0.0 and found["time"][-1] == 2_499.0


def test_matrices_are_ordered_and_averaged_over_blocks(make_run):
    folder = make_run(clients=6)
    pairs = np.zeros((6, 6), dtype=np.float32)
    for one, other in ((0, 3), (1, 4), (2, 5)):
        pairs[one, other] = pairs[other, one] = 1.0
    later = np.stack([np.zeros((6, 6), dtype=np.float32), pairs])
    np.savez(folder / "graph.npz", updates=[0, 7], times=[0.0, 2.5], matrices=later)
    run = looked(folder)
    found = panels.matrix(run, "graph", -1)
    order = found["clients"]
    assert {frozenset(order[k : k + 2]) for k in (0, 2, 4)} == {
        frozenset(pair) for pair in ((0, 3), (1, 4), (2, 5))
    }
    assert found["cells"][0][0] is None and found["cells"][0][1] == 1.0
    assert (found["updates"], found["time"], found["of"]) == (7, 2.5, 2)
    assert panels.matrix(run, "graph", 0)["updates"] == 0
    assert panels.matrix(run, "similarity", 0) is None


def test_blocks_are_means_of_what_is_known():
    cells = np.array([[np.nan, 1.0, 2.0], [3.0, np.nan, 4.0], [5.0, 6.0, np.nan]])
    found = panels._blocks(cells, 2)
    assert found[0, 0] == 2.0 and found[0, 1] == 3.0 and found[1, 0] == 5.5
    assert np.isnan(found[1, 1])


def test_clusters_over_the_run(make_run, log):
    folder = make_run(events=[line for k in range(4) for line in a_training(log, k, 0.0, 1.0)])
    (folder / "clusters.csv").write_text(
        "updates,time,client,cluster\n1,0.0,0,0\n1,0.0,1,0\n3,1.0,1,1\n1,0,99,0\nx,y,z,w\n"
    )
    found = shown(folder)["clusters"]
    rows = dict(zip(found["clients"], found["cells"], strict=True))
    assert rows[0] == [0, 0, 0, 0] and rows[1] == [0, 0, 1, 1] and rows[3] == [-1] * 4
    assert found["number"] == 2


GARBAGE = [
    b"",
    b"\x00\xff" * 50,
    b"{",
    b"[]",
    b"null",
    b"a,b\n1",
    b"time,updates\nx,y\n,\n",
    b'{"metric": 3}',
]


@pytest.mark.parametrize("content", GARBAGE)
def test_damaged_and_foreign_files_never_matter(make_run, content):
    folder = make_run()
    for name in (
        *("config.toml", "about.json", "result.json", "events.jsonl", "history.csv"),
        *("clients.csv", "clusters.csv", "diagnosis.csv", "graph.npz", "similarity.npz", ".lock"),
    ):
        (folder / name).write_bytes(content)
    found = shown(folder)
    assert found["name"] == "run"
    assert panels.matrix(looked(folder), "graph", 0) is None


def test_wrong_types_in_right_places_never_matter(make_run):
    folder = make_run()
    (folder / "config.toml").write_text(
        'updates = "many"\nclients = [1]\nstrategy = 3\nseed = {}\n'
    )
    result = {"metric": {"name": 1}, "messages": [1], "complete": "yes", "strategy": {"x": 1}}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "about.json").write_text('{"metric": {"name": "a b", "label": 1}}')
    np.savez(folder / "graph.npz", matrices=np.array(["a", "b"]))
    np.savez(folder / "similarity.npz", matrices=np.zeros((2, 3, 3)), updates=[1], times=[])
    shown(folder)
    assert panels.matrix(looked(folder), "similarity", 1)["updates"] is None


def test_whose_process_is_gone_has_stopped(make_run, log):
    folder = make_run(events=[log("evaluate", 0.0, metric="accuracy", value=0.1, loss=1.0)])
    (folder / ".lock").write_text(str(os.getpid()))
    assert shown(folder)["status"] == "running"
    (folder / ".lock").write_text("999999999")
    for name in ("events.jsonl", "history.csv", "config.toml"):
        os.utime(folder / name, (1, 1))
    found = shown(folder)
    assert found["status"] == "stopped" and "Start it again" in found["notes"][-1]


def test_runs_are_found_at_any_depth_and_links_are_not_followed(make_run, tmp_path):
    one, two = make_run("compare/pace/seed0"), make_run("mine")
    fleet = make_run("fleet")
    (fleet / "server").mkdir()
    for name in ("config.toml", "history.csv"):
        (fleet / name).rename(fleet / "server" / name)
    (fleet / "config.toml").write_text("")
    (tmp_path / "runs" / "link").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes" / "result.json").write_text("{}")
    assert set(find(tmp_path / "runs")) == {one, two, fleet / "server"}
    shelf = Shelf([tmp_path / "runs"])
    assert {run.name for run in shelf.runs().values()} == {
        *("compare/pace/seed0", "mine", "fleet/server")
    }
    assert {run.name for run in Shelf([one]).runs().values()} == {"seed0"}
    assert Shelf([tmp_path / "nowhere"]).runs() == {}


def test_only_the_latest_runs_are_listed(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr("polytempo.view.shelf.LISTED", 2)
    for k in range(4):
        folder = make_run(f"run{k}")
        for name in ("config.toml", "history.csv"):
            os.utime(folder / name, (1_000 + k, 1_000 + k))
    shelf = Shelf([tmp_path / "runs"])
    assert [run.name for run in shelf.runs().values()] == ["run3", "run2"]
    assert shelf.left_out == 2
