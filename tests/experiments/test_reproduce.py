"""Papers' experiments: the files are sound, and the command runs them, resumes, and compares."""

import csv
import itertools
import json
import re
import statistics
import tomllib
from pathlib import Path

import pytest

import polytempo
from polytempo import Federation, simulate
from polytempo.core.errors import PolytempoError
from polytempo.core.optimizer import Sgd
from polytempo.data import available
from polytempo.experiments import compare, paper_specs, result_folder, run, world
from polytempo.experiments.config import read_config
from polytempo.experiments.paper_report import _spelled
from polytempo.experiments.paper_specs import experiments, load_experiment
from polytempo.models import MODELS
from polytempo.models.pretrained import path_of

PACKAGE = Path(polytempo.__file__).parent
PACE = ["fig3", "fig4", "fig5", "fig6", "fig7", "table2", "table3", "table4", "why"]
ACE = ["fig2", "fig3", "figa2", "figa3", "table2", "tablea2", "uploads"]
CASA = ["fig10", "fig5", "fig6", "fig7", "fig8", "fig9", "table1", "table2"]
P2P = ["along", "fastslow", "fig4", "table1"]
PERSONAL = ["table"]
PAPERS = {"ace": ACE, "casa": CASA, "p2p": P2P, "pace": PACE, "personal": PERSONAL}
ALL = [f"{paper}/{name}" for paper, names in PAPERS.items() for name in names]

SPLITS = ("even", "c2")
COMMON = """
title = "A paper"
remarks = ["Nobody has read this paper."]
[settings]
clients = 6
concurrency = 2
updates = 12
eval_every = 2
epochs = 1
adapt_epochs = 1
[quick]
clients = 4
updates = 8
limit = 100
[datasets.digits]
title = "Digits"
settings = { data = "digits", limit = 240, model = "linear" }
remarks = ["Digits are small."]
[datasets.digits.columns]
even = { title = "even", settings = { partition = "iid" } }
"c2" = { title = "#C = 2", settings = { partition = "pathological:labels=2" } }
[datasets.other]
title = "Others"
comparable = false
settings = { data = "synthetic", limit = 240, model = "linear" }
columns = { users = { title = "users", settings = { partition = "natural" } } }
[strategies.standalone]
label = "alone"
strategy = "standalone"
settings = { refill = "idle" }
[strategies.fedavg]
label = "FedAvg"
strategy = "fedavg"
[strategies.fedasync]
label = "FedAsync"
strategy = "fedasync:alpha=0.5"
remark = "Alpha is a guess."
[strategies.pace]
label = "PACE"
strategy = "pace"
[strategies.other]
label = "other PACE"
strategy = "pace:a=0"
published_as = "pace"
"""
TABLE = """
title = "Table 1"
about = "Three methods."
columns = ["digits/even", "digits/c2", "other/users"]
rows = ["standalone", "fedavg", "fedasync", "pace", "other"]
[paper.accuracy]
fedavg = { "digits/even" = [71.25, 0.5], "digits/c2" = [61.5, 0.25], "other/users" = [44.0] }
pace = { "digits/even" = [92.75, 0.5], "digits/c2" = [82.5, 0.75] }
[paper.time]
pace = { "digits/even" = 0.25 }
[paper.sent]
pace = { "digits/even" = 1.01 }
"""
FIGURE = """
title = "Fig. 1"
about = "The same runs."
columns = ["digits/even"]
rows = ["standalone", "fedavg", "pace"]
figures_of = "table1"
"""


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """A paper about embedded data. Returns the options of the command that write to a new place."""
    folder = tmp_path / "papers" / "tiny"
    folder.mkdir(parents=True)
    (folder / "common.toml").write_text(COMMON)
    (folder / "table1.toml").write_text(TABLE)
    (folder / "fig1.toml").write_text(FIGURE + 'plot = "tradeoff"\n')
    (folder / "fig2.toml").write_text(FIGURE + 'plot = "bars"\n')
    monkeypatch.setattr(paper_specs, "PAPERS", tmp_path / "papers")
    return ("--out", tmp_path / "out", "--jobs", 1)


@pytest.fixture
def ran(monkeypatch):
    """The runs that were really begun from now on, as (row, seed)."""
    real, seen = compare.run, []

    def record(config, place, **more):
        seen.append((place.parent.name, config.seed))
        return real(config, place, **more)

    monkeypatch.setattr(compare, "run", record)
    return seen


@pytest.mark.parametrize("strategy", ["majority", "p2p:local_steps=2"])
def test_what_a_strategy_ignores_does_not_hide_its_runs(polytempo, paper, strategy):
    """A reference has updates of its own, and peers know no steps of a server's clients."""
    more = f'[strategies.odd]\nlabel = "odd"\nstrategy = "{strategy}"\nsettings = {{ steps = 3 }}\n'
    folder = paper[1].parent / "papers/tiny"
    (folder / "common.toml").write_text(COMMON + more)
    (folder / "table1.toml").write_text(TABLE.replace('"other"]', '"odd"]'))
    options = ("--dataset", "digits", "--partition", "even", "--only", "odd", *paper)
    polytempo("reproduce", "tiny/table1", *options)
    found = rows_of((paper[1] / "tiny/table1/digits/table.md").read_text(), "Digits, even")
    assert found["odd"]["seeds"] == "1"


def rows_of(markdown: str, heading: str) -> dict[str, dict[str, str]]:
    """The table below a heading, by the first cell of each row."""
    lines = markdown.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


def summary(out: Path, column: str, row: str, seed: int = 0, paper: str = "tiny") -> dict:
    return json.loads((out / paper / "runs" / column / row / f"seed{seed}/result.json").read_text())


def pooled(folder: Path) -> float:
    """Per cent on the pooled test set, mean of the last three evaluations."""
    with (folder / "history.csv").open(newline="") as file:
        return 100 * statistics.mean(
            float(row["accuracy_weighted"]) for row in list(csv.DictReader(file))[-3:]
        )


# -- the files of the papers ----------------------------------------------------------------------


def test_every_table_and_figure_is_there():
    assert experiments() == ALL


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("quick", [False, True])
def test_all_settings_of_every_file_are_valid(name, quick):
    experiment = load_experiment(name)
    for column in experiment.columns:
        for row in experiment.rows:
            for choice in experiment.choices(row, quick):
                config = experiment.config(row, column, 0, quick, choice)
                assert config.make("strategy").name == config.strategy_table["name"]
                assert config.make("partition") is not None
                if path_of(config.model) is None:  # else its files may not be here
                    MODELS.create(config.model)
                known = {info.name for info in available()}
                assert config.data.partition(":")[0] in known
                assert config.concurrency is None or config.concurrency <= config.clients


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(("pace/", "casa/"))])
@pytest.mark.parametrize("quick", [False, True])
def test_every_run_can_have_another_length(name, quick):
    experiment = load_experiment(name, updates=70)
    for column, row in itertools.product(experiment.columns, experiment.rows):
        assert experiment.config(row, column, 0, quick).updates == 70


@pytest.mark.parametrize("name", PACE)
def test_every_table_has_standalone_and_figures_of_rows_and_columns_that_exist(name):
    experiment = load_experiment(f"pace/{name}")
    assert experiment.rows[0] == "standalone"
    assert experiment.config("standalone", experiment.columns[0], 0, False).refill == "idle"
    own = tomllib.loads((PACKAGE / f"experiments/papers/pace/{name}.toml").read_text())
    for figures in own.get("paper", {}).values():
        assert figures.keys() <= set(experiment.rows)
        for of_row in figures.values():
            assert of_row.keys() <= set(experiment.columns)
    assert any(row in experiment.paper.accuracy for row in experiment.rows)


@pytest.mark.parametrize(
    ("paper", "column"),
    [
        ("pace", "cifar10/dir0.1"),
        ("ace", "cifar10/dir0.1-beta5"),
        ("casa", "cifar10/groups"),
    ],
)
def test_every_method_is_used_and_no_two_are_the_same_run(paper, column):
    """Experiments share runs by the name of the row, so one run must have one name."""
    everything = [load_experiment(name) for name in experiments() if name.startswith(f"{paper}/")]
    used = {row for experiment in everything for row in experiment.rows}
    assert used == set(everything[0].strategies)
    specs = {row: everything[0].config(row, column, 0, False) for row in used}
    different = {json.dumps(config.model_dump(), sort_keys=True) for config in specs.values()}
    assert len(different) == len(used)


def test_the_setting_is_that_of_section_v():
    experiment = load_experiment("pace/table2")
    for column in ("emnist/c10", "cifar10/dir0.1", "agnews/dir0.3"):
        found = experiment.config("pace", column, 0, False)
        assert (found.clients, found.concurrency, found.updates, found.epochs) == (100, 10, 2000, 5)
        assert found.batch_size == 64
        assert found.task().optimizer == Sgd(momentum=0.9, weight_decay=1e-4)
        assert found.lr == 0.01
        assert found.devices == {"name": "two-speed", "slow": 0.3, "factor": 5.0} | found.devices
    assert experiment.config("pace", "uci_har/users", 0, False).lr == 0.001
    partition = experiment.config("pace", "agnews/dir0.3", 0, False).partition
    assert (partition["name"], partition["alpha"]) == ("dirichlet", 0.3)
    assert experiment.config("pace", "emnist/c10", 0, False).partition["labels"] == 10


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("fedprox", {"mu": 0.5}),
        ("fedasync", {"weighting": "hinge", "a": 1, "b": 4, "rho": 0}),
        ("fedbuff", {"buffer_size": 10, "server_lr": 10 / 10}),  # the paper's code divides by K
        ("port", {"alpha": 1, "beta": 1, "bound": 10, "buffer_size": 5}),
        ("fedac", {"beta1": 0.9, "beta2": 0.9, "server_lr": 0.01, "buffer_size": 5}),
        ("fedamp-async", {"lam": 1, "graph.sigma": 10, "graph.self_weight": 0.7}),
        ("pfedgraph-async", {"graph.gamma": 1.5, "lam": 0.01}),
        ("fedsac-async", {"graph.alpha": 1.5, "graph.beta": 1.5, "lam": 0.01}),
        ("pace", {"graph.gamma": 1.5, "lam": 0.01, "a": 1.5, "omega": 2500}),
        ("pace", {"buffer": True, "multicast": True, "staleness_decay": True}),
        ("pace-multicast", {"buffer": True, "multicast": True, "staleness_decay": False}),
        ("pace-buffer", {"buffer": True, "multicast": False, "staleness_decay": False}),
    ],
)
def test_hyper_parameters_are_those_of_section_v(row, expected):
    table = load_experiment("pace/table2").config(row, "cifar10/dir0.1", 0, False).strategy_table
    flat = {**table, **{f"graph.{k}": v for k, v in table.get("graph", {}).items()}}
    assert {key: flat[key] for key in expected} == expected


def test_every_users_trainings_are_as_many_where_clients_are_fewer():
    experiment = load_experiment("pace/table2")
    a, b = (experiment.config("pace", c, 0, False) for c in ("cifar10/c2", "uci_har/users"))
    assert a.updates / a.clients == b.updates / b.clients
    assert a.concurrency / a.clients == b.concurrency / b.clients


def test_published_figures_agree_where_the_paper_gives_them_twice():
    two, three, four, five = (
        load_experiment(f"pace/{name}").paper.accuracy
        for name in ("table2", "table3", "table4", "fig5")
    )
    for row in ("fedamp-async", "fedsac-async"):
        for column, figure in three[row].items():
            assert figure[0] == two[row][column][0]
    gains = {  # printed in brackets in Table III
        ("fedamp", "cifar10/dir0.1"): 8.20,
        ("fedamp", "agnews/dir0.3"): 5.79,
        ("fedsac", "cifar10/dir0.1"): 11.73,
        ("fedsac", "agnews/dir0.3"): 9.38,
    }
    for (method, column), gain in gains.items():
        found = three[f"{method}-pace"][column][0] - three[f"{method}-async"][column][0]
        assert found == pytest.approx(gain)
    for column, figure in four["pace"].items():
        assert figure == two["pace"][column]
    bars = [
        five[row]["cifar10/dir0.1"][0]
        for row in ("pfedgraph-async", "pace-buffer", "pace-multicast", "pace")
    ]
    steps = [after - before for before, after in itertools.pairwise(bars)]
    assert steps == pytest.approx([20.69, 15.93, 28.33])  # Sec. V-D1
    assert bars[0] == two["pfedgraph-async"]["cifar10/dir0.1"][0]


def test_quick_is_small_for_every_column():
    for name in experiments():
        experiment = load_experiment(name)
        for column in experiment.columns:
            config = experiment.config(experiment.rows[0], column, 0, True)
            uploads = min(config.updates, 10 * (config.versions or config.updates))
            samples = config.batch_size if config.steps else config.limit / config.clients
            assert uploads * config.epochs * samples < 51_000
            steps = min(config.updates, config.versions or config.updates)
            assert steps >= 4 * config.eval_every  # enough to speak of convergence


# -- ACE's files ----------------------------------------------------------------------------------


def test_the_setting_of_ace_is_that_of_its_appendix_f4():
    experiment = load_experiment("ace/fig2")
    for row in set(experiment.rows) - {"pooled"}:
        found = experiment.config(row, "cifar10/dir0.1-beta5", 0, False)
        assert (found.clients, found.versions, found.batch_size) == (100, 500, 50)
        assert found.steps == (1 if row == "fedbuff" else None)  # others upload a gradient
        assert found.devices["name"] == "exponential"
        buffered = row in ("ca2fl", "fedbuff")
        assert found.concurrency == (20 if buffered else None)  # None: all clients, see below
        assert found.strategy_table.get("buffer_size", 1) == (10 if buffered else 1)
        assert found.updates >= 500 * (10 if buffered else 1)
        assert buffered or found.make("strategy").all_train
        grid = [choice["server_lr"] for choice in experiment.choices(row, False)]
        assert grid == [0.01, 0.03, 0.1, 0.3]  # the same for each method, on a gradient ...
        assert min(grid) < 0.2 * (100 / 500) ** 0.5 < max(grid)  # ... around the paper's
    assert (
        experiment.config("fedbuff", "cifar10/dir0.1-beta5", 0, False).lr == 1
    )  # ... in this case


def test_rates_are_per_gradient_whatever_the_number_of_local_steps():
    experiment = load_experiment("ace/table2")
    for row in experiment.rows:
        config = experiment.config(row, "cifar10/dir0.3-beta5", 0, False)
        k = int(row.partition("-k")[2] or 1)
        if row.startswith("fedbuff"):
            assert config.steps == k
            scale = k * config.lr
        else:
            assert config.strategy_table["local_steps"] == k
            scale = k
        rates = [scale * choice["server_lr"] for choice in experiment.choices(row, False)]
        wanted = [0.01, 0.03, 0.1, 0.3] if k == 1 else [0.05, 0.1, 0.2]
        assert rates == pytest.approx(wanted)


def test_table_2_says_that_local_steps_and_delays_harm():
    """A slip in typing the paper's figures would break their order."""
    paper = load_experiment("ace/table2").paper.accuracy
    assert sum(map(len, paper.values())) == 15 * 6
    for name in ("ace", "ca2fl", "fedbuff", "delay-adaptive", "vanilla"):
        for column in paper[name]:
            one, five, ten = (paper[f"{name}{k}"][column][0] for k in ("", "-k5", "-k10"))
            assert one > five > ten
        for k in ("", "-k5", "-k10"):
            row = paper[f"{name}{k}"]
            for alpha in ("0.1", "0.3"):
                steps = f"cifar10-steps/dir{alpha}"
                assert row[f"{steps}-beta5"] > row[f"{steps}-beta30"]
                assert row[f"{steps}-beta5"] == row[f"cifar10/dir{alpha}-beta5"]
            assert row["cifar10-steps/dir0.3-beta30"] > row["cifar10-steps/dir0.1-beta30"]


def test_the_setting_of_table_a2_is_that_of_table_a6():
    experiment = load_experiment("ace/tablea2")
    assert {
        load_experiment("ace/tablea2", updates=100).config(row, column, 0, False).updates
        for row in experiment.rows
        for column in experiment.columns
    } == {100}
    for row in experiment.rows:
        found = experiment.config(row, "newsgroups20/dir0.1", 0, False)
        assert (found.clients, found.steps, found.batch_size, found.lr) == (20, 1, 32, 5e-4)
        assert found.optimizer["name"] == "adamw" and found.trainable == "lora:r=8,alpha=16"
        assert (found.updates, found.versions) == (500, None)
        buffered = row in ("ca2fl-way", "fedbuff-way")
        assert found.concurrency == (10 if buffered else None)
        assert found.strategy_table.get("buffer_size", 1) == (10 if buffered else 1)
        assert found.strategy_table["server_lr"] == found.strategy_table.get("buffer_size", 1)
    ranked = ["vanilla", "delay-adaptive", "fedbuff", "ca2fl", "aced", "ace"]
    paper = [experiment.paper.accuracy[f"{row}-way"] for row in ranked]
    for worse, better in itertools.pairwise(paper):
        assert all(worse[column] < better[column] for column in experiment.columns)
    for row in paper:
        assert row["newsgroups20/dir0.1"] < row["newsgroups20/dir1"] < row["newsgroups20/dir10"]


def test_at_equal_uploads_only_the_end_of_a_run_and_the_rates_differ():
    uploads, steps = load_experiment("ace/uploads"), load_experiment("ace/fig2")
    column = "cifar10-steps/dir0.1-beta30"
    for row in set(uploads.rows) - {"pooled"}:
        config = uploads.config(row, column, 0, False)
        assert config.updates == 5000
        assert config.versions == (5000 if row.endswith("-5000") else 500)
        other = steps.config(row.removesuffix("-5000"), column, 0, False)
        ends = {"updates": 0, "versions": 0, "eval_every": 0}
        assert config.model_copy(update=ends) == other.model_copy(update=ends)


def test_clients_vanish_half_way_in_steps():
    experiment = load_experiment("ace/fig3")
    shares = []
    for column in experiment.columns:
        config = experiment.config("aced", column, 0, False)
        if config.dropout["name"] == "leave":
            assert config.dropout["version"] == config.versions / 2
        shares.append(config.dropout.get("share", 0))
        assert config.partition["alpha"] == 0.3
    assert shares == [0, 0.1, 0.3, 0.5, 0.7]


def test_the_map_covers_every_pair_of_heterogeneity_and_delay():
    experiment = load_experiment("ace/figa2")
    seen = set()
    for column in experiment.columns:
        config = experiment.config("ace", column, 0, False)
        alpha, beta = experiment.column(column)[1].at
        assert config.partition["alpha"] == float(alpha)
        assert (config.concurrency, config.refill) == (
            int(beta) + 1,
            "idle",
        )  # mean staleness is beta
        seen.add((alpha, beta))
    assert len(seen) == 16


def test_beta_is_nothing_but_the_unit_of_time_where_everybody_computes():
    """Which is why there is one beta only."""
    federation = Federation.load("digits", clients=8, limit=200)
    five, thirty = (
        simulate(
            federation, model="linear", strategy="ace", updates=60, devices=devices, concurrency=8
        )
        for devices in ("exponential:beta=5", "exponential:beta=30")
    )
    assert five.history[-1]["version"] > 10
    for one, other in zip(five.history, thirty.history, strict=True):
        assert one["time"] == pytest.approx(other["time"] / 6)
        assert one | {"time": 0} == other | {"time": 0}


# -- CASA's files ---------------------------------------------------------------------------------


def test_the_setting_of_casa_is_that_of_its_appendix_a2():
    experiment = load_experiment("casa/table1")
    synchronous = {"fedavg", "fedprox", "cfl", "ifca3", "ifca4", "ifca5", "icfl"}
    for column in ("mnist/groups", "cifar10/groups"):
        for row in experiment.rows:
            found = experiment.config(row, column, 0, False)
            assert (found.clients, found.concurrency, found.batch_size, found.lr) == (
                100,
                100,
                10,
                0.01,
            )
            assert found.partition["proportions"] == [0.2, 0.2, 0.3, 0.3]
            assert found.partition["alpha"] == 1
            strategy = found.make("strategy")
            if strategy.engine == "reference":
                continue
            refill = found.refill or strategy.refill
            assert refill == ("cohort" if row in synchronous else "same") or strategy.all_train
            devices = found.make("devices").factors(100, 0)
            assert sorted(devices) == [1.0] * 70 + [5.0] * 30
    targets = [experiment.column(column)[1].target for column in experiment.columns]
    assert targets == [0.95, 0.8, 0.75]
    for row, options in (
        ("fedprox", {"mu": 0.05}),
        ("fedasync", {"weighting": "hinge", "alpha": 0.3, "a": 1, "b": 4, "rho": 0}),
        ("fedbuff", {"buffer_size": 10}),
        ("cfl", {"eps_1": 0.4, "eps_2": 0.7}),
        ("cfl-async", {"eps_2": 1, "alpha": 0.3}),
        ("icfl", {"start": 0.85, "eps": 4}),
        ("ifca4-async", {"k": 4, "alpha": 0.3}),
        ("casa", {"alpha_0": 2, "k": 0.001, "gamma": 0.15}),
    ):
        table = experiment.config(row, "cifar10/groups", 0, False).strategy_table
        assert {key: table[key] for key in options} == options
    sparse = experiment.config("casa+", "cifar10/groups", 0, False)
    assert sparse.strategy_table["r_end"] == sparse.updates
    lengths = [
        experiment.config(row, "cifar10/groups", 0, False).strategy_table["updates"]
        for row in ("icfl", "icfl-async")
    ]
    assert lengths == [sparse.updates / sparse.concurrency, sparse.updates]


def test_published_figures_of_casa_say_what_its_text_says():
    """A slip in typing the paper's figures would break its ratios."""
    one, two = (load_experiment(f"casa/{name}").paper for name in ("table1", "table2"))
    seconds = {row: found["mnist/groups"] for row, found in one.seconds.items()}
    assert max(seconds.values()) / seconds["casa"] == pytest.approx(39.11, abs=0.01)
    assert seconds["fedprox"] / seconds["casa"] == pytest.approx(37.39, abs=0.01)
    best = {
        column: max(found.get(column, (0,))[0] for found in one.accuracy.values())
        for column in ("mnist/groups", "cifar10/groups", "uci_har/users")
    }
    assert best == {column: one.accuracy["casa"][column][0] for column in best}
    gap = one.accuracy["casa"]["cifar10/groups"][0] - one.accuracy["fedbuff"]["cifar10/groups"][0]
    assert gap == pytest.approx(30.34)
    later = {
        row: found["uci_har/scenario-b"] / found["uci_har/scenario-a"]
        for row, found in two.seconds.items()
    }
    assert later["casa"] == pytest.approx(1.08, abs=0.005)
    del later["casa"], later["standalone"]
    assert min(later.values()) == pytest.approx(1.17, abs=0.005)
    assert max(later.values()) == pytest.approx(2.39, abs=0.005)
    for experiment in map(load_experiment, (f"casa/{name}" for name in CASA)):
        own = tomllib.loads((PACKAGE / f"experiments/papers/{experiment.name}.toml").read_text())
        for figures in own.get("paper", {}).values():
            assert figures.keys() <= set(experiment.rows)
            assert all(of.keys() <= set(experiment.columns) for of in figures.values())


CLUSTERED = """
title = "Table 1"
about = "Clusters."
columns = ["synthetic/groups"]
rows = ["casa", "fedasync", "other"]
plot = "clusters"
[paper.seconds]
casa = { "synthetic/groups" = 2.5 }
fedasync = { "synthetic/groups" = inf }
"""
GROUPS = """
title = "Clusters"
remarks = []
[settings]
clients = 8
concurrency = 8
refill = "same"
updates = 64
eval_every = 8
epochs = 1
batch_size = 10
lr = 0.05
adapt_epochs = 0
[quick]
updates = 16
[datasets.synthetic]
title = "Synthetic"
settings = { data = "synthetic:groups=2,samples=30", model = "linear" }
columns = { groups = { title = "two groups", target = 0.3, settings = {} } }
[strategies.casa]
label = "CASA"
strategy = "casa"
[strategies.fedasync]
label = "FedAsync"
strategy = "fedasync"
[strategies.other]
label = "other CASA"
strategy = "casa:gamma=0.3"
published_as = "casa"
"""


def test_times_to_a_target_and_clusters_stand_in_the_table(tmp_path, monkeypatch, polytempo):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "papers" / "tiny"
    folder.mkdir(parents=True)
    (folder / "common.toml").write_text(GROUPS)
    (folder / "table1.toml").write_text(CLUSTERED)
    monkeypatch.setattr(paper_specs, "PAPERS", tmp_path / "papers")
    monkeypatch.setattr(result_folder, "can_plot", lambda: True)
    out = tmp_path / "out"
    outcome = polytempo("reproduce", "tiny/table1", "--out", out, "--plots", "pdf")
    assert outcome.code == 0, outcome.err
    report = out / "tiny/table1/synthetic"
    found = rows_of((report / "table.md").read_text(), "Synthetic, two groups")
    assert [found[row]["paper's time"] for row in found] == ["2.5", "never", "2.5"]
    for row, label in (("casa", "CASA"), ("fedasync", "FedAsync")):
        run_folder = out / "tiny/runs/synthetic-groups" / row / "seed0"
        history = result_folder.read_result(run_folder).history
        expected = next((r["time"] for r in history if r["accuracy"] >= 0.3), None)
        assert found[label]["to 30%"] == ("never" if expected is None else f"{expected:.1f}")
    assert found["FedAsync"]["clusters"] == found["FedAsync"]["purity"] == "-"
    assert found["CASA"]["clusters"] == str(summary(out, "synthetic-groups", "casa")["clusters"])
    drawn = {path.name for path in report.glob("*.png")}
    assert {"groups_casa_clusters.png", "groups_casa_similarity.png"} <= drawn
    assert {path.stem for path in report.glob("*.pdf")} == {path[:-4] for path in drawn}
    assert "groups_fedasync_clusters.png" not in drawn


def test_figures_are_compared_with_the_papers_model_only():
    lenet, resnet = (load_experiment("ace/fig2", model) for model in (None, "resnet18:norm=batch"))
    assert not lenet.comparable("cifar10/dir0.1-beta5")
    assert resnet.comparable("cifar10/dir0.1-beta5")
    config = resnet.config("ace", "cifar10/dir0.1-beta5", 0, False)
    assert MODELS.create(config.model).norm == "batch"
    assert load_experiment("pace/table2").comparable("cifar10/dir0.1")


def test_the_files_are_installed_with_the_package():
    root = PACKAGE.parents[1]
    if not (root / "pyproject.toml").exists():
        pytest.skip("the package is installed without its sources")
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["polytempo"]
    installed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert set(PACKAGE.rglob("*.toml")) <= installed


# -- the command ----------------------------------------------------------------------------------


def test_alone_it_lists_what_there_is(polytempo):
    outcome = polytempo("reproduce")
    assert outcome.code == 0
    assert all(name in outcome.out for name in ALL)
    listed = polytempo("reproduce", "--json").json
    assert [each["name"] for each in listed] == experiments()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tiny/tabel1",), ["tabel1", "did you mean 'tiny/table1'"]),
        (("table1",), ["table1", "tiny/table1"]),
        (("tiny/common",), ["tiny/common", "tiny/table1"]),
        (("tiny/table1", "--dataset", "digit"), ["digit", "did you mean 'digits'"]),
        (("tiny/table1", "--partition", "evn"), ["evn", "did you mean 'even'"]),
        (("tiny/table1", "--dataset", "other", "--partition", "c2"), ["'c2'", "users"]),
        (("tiny/table1", "--only", "pace,fedavgg"), ["fedavgg", "did you mean 'fedavg'"]),
        (("tiny/table1", "--seeds", "0"), ["--seeds", "1"]),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(arguments, words, paper, polytempo):
    error = polytempo("reproduce", *arguments, *paper).error
    assert all(word in error for word in words), error
    assert not paper[1].exists()


def test_missing_data_is_said_before_anything_is_run(polytempo, tmp_path):
    error = polytempo("reproduce", "pace/fig5", "--data-dir", tmp_path, "-o", tmp_path / "o").error
    assert "cifar10" in error
    assert "--data-dir" in error
    assert not (tmp_path / "o").exists()


def test_ours_and_the_papers_figures_stand_in_the_right_rows(paper, polytempo):
    out = paper[1]
    arguments = ("reproduce", "tiny/table1", "--dataset", "digits", "--seeds", 2, *paper)
    outcome = polytempo(*arguments)
    assert outcome.code == 0
    text = (out / "tiny/table1/digits/table.md").read_text()
    published = {"even": ("71.25 ± 0.50", "92.75 ± 0.50"), "c2": ("61.50 ± 0.25", "82.50 ± 0.75")}
    for split, title in (("even", "even"), ("c2", "#C = 2")):
        found = rows_of(text, f"Digits, {title}")
        assert list(found) == ["alone", "FedAvg", "FedAsync", "PACE", "other PACE"]
        assert found["other PACE"]["paper"] == found["PACE"]["paper"]
        assert (found["FedAvg"]["paper"], found["PACE"]["paper"]) == published[split]
        assert found["FedAsync"]["paper"] == found["alone"]["diff."] == "-"
        for label, row in (("alone", "standalone"), ("FedAvg", "fedavg"), ("PACE", "pace")):
            runs = [summary(out, f"digits-{split}", row, seed) for seed in (0, 1)]
            for heading, key in (("handed", "accuracy"), ("adapted", "accuracy_adapted")):
                mean = statistics.mean(100 * run[key] for run in runs)
                assert float(found[label][heading].split()[0]) == pytest.approx(mean, abs=0.051)
            assert found[label]["seeds"] == "2"
            time = statistics.mean(run["convergence_time"] for run in runs)
            assert float(found[label]["time"].split()[0]) == pytest.approx(time, abs=0.051)
        ours = statistics.mean(
            summary(out, f"digits-{split}", "pace", s)["accuracy"] for s in (0, 1)
        )
        expected = 100 * ours - float(published[split][1].split(" ± ")[0])
        assert float(found["PACE"]["diff."]) == pytest.approx(expected, abs=0.051)
        assert found["alone"]["messages"].startswith("0")
    [line] = [line for line in outcome.out.splitlines() if line.strip().startswith("PACE  ")][:1]
    assert "92.75" in line
    for remark in ("Nobody has read this paper.", "Digits are small.", "Alpha is a guess."):
        assert remark in text
        assert remark in outcome.out


def test_what_the_paper_gives_for_few_methods_stands_below_the_table(paper, polytempo):
    out = paper[1]
    arguments = ("reproduce", "tiny/table1", "--dataset", "digits", "--partition", "even")
    text = polytempo(*arguments, *paper).out
    pace, fedavg, fedasync = (
        summary(out, "digits-even", row) for row in ("pace", "fedavg", "fedasync")
    )
    [share] = re.findall(r"PACE: ([\d.]+)% of FedAvg's convergence time \(paper: 25.0%\)", text)
    expected = 100 * pace["convergence_time"] / fedavg["convergence_time"]
    assert float(share) == pytest.approx(expected, abs=0.051)
    [times] = re.findall(r"PACE: ([\d.]+) times FedAsync's models sent \(paper: 1.01\)", text)
    sent = [m["messages"]["dispatch"] + m["messages"]["multicast"] for m in (pace, fedasync)]
    assert float(times) == pytest.approx(sent[0] / sent[1], abs=0.0006)


def test_a_second_call_runs_nothing_and_says_the_same(paper, polytempo, ran):
    arguments = ("reproduce", "tiny/table1", "--dataset", "digits", "--partition", "even", *paper)
    first = polytempo(*arguments)
    assert [row for row, _ in ran] == ["standalone", "fedavg", "fedasync", "pace", "other"]
    ran.clear()
    assert polytempo(*arguments).out == first.out
    assert ran == []
    polytempo(*arguments, "--seeds", 2)
    assert {seed for _, seed in ran} == {1}


def test_experiments_of_one_paper_share_their_runs(paper, polytempo, ran):
    assert polytempo("reproduce", "tiny/fig1", *paper).code == 0
    ran.clear()
    arguments = ("reproduce", "tiny/table1", "--dataset", "digits", "--partition", "even", *paper)
    assert polytempo(*arguments).code == 0
    assert ran == [("fedasync", 0), ("other", 0)]


def test_columns_that_ask_for_the_same_run_share_it(paper, polytempo, ran, tmp_path):
    folder = tmp_path / "papers" / "tiny"
    twice = COMMON.replace('settings = { refill = "idle" }', 'settings = { partition = "iid" }')
    (folder / "common.toml").write_text(twice)
    polytempo("reproduce", "tiny/table1", "--dataset", "digits", "--only", "standalone", *paper)
    assert ran == [("standalone", 0)]
    even, c2 = (summary(tmp_path / "out", f"digits-{split}", "standalone") for split in SPLITS)
    assert even == c2
    polytempo("reproduce", "tiny/table1", "--dataset", "digits", "--only", "fedavg", *paper)
    assert ran[1:] == [("fedavg", 0), ("fedavg", 0)]  # these differ


def test_the_data_are_read_once_for_all_rows(paper, polytempo, monkeypatch):
    real, loaded = world.load_federation, []

    def load(config):
        loaded.append(config.seed)
        return real(config)

    for module in (world, run):
        monkeypatch.setattr(module, "load_federation", load)
    assert polytempo("reproduce", "tiny/fig1", "--seeds", 2, *paper).code == 0
    assert loaded == [0, 1]


def test_a_part_of_the_rows_still_gives_a_table(paper, polytempo, ran):
    arguments = ("reproduce", "tiny/table1", "--dataset", "digits", "--partition", "even", *paper)
    assert polytempo(*arguments, "--only", "pace").code == 0
    assert ran == [("pace", 0)]
    text = (paper[1] / "tiny/table1/digits/table.md").read_text()
    found = rows_of(text, "Digits, even")
    assert found["FedAvg"]["handed"] == "-"
    assert found["FedAvg"]["paper"] == "71.25 ± 0.50"  # still there to be read
    assert found["PACE"]["handed"].endswith("%")
    # what was run before is shown by a later call for other rows
    polytempo(*arguments, "--only", "fedavg")
    text = (paper[1] / "tiny/table1/digits/table.md").read_text()
    assert rows_of(text, "Digits, even")["PACE"]["handed"].endswith("%")


def test_an_interrupt_shows_what_is_there_and_the_next_call_goes_on(paper, polytempo, interrupt):
    arguments = ("reproduce", "tiny/fig1", *paper)
    interrupt(12)
    stopped = polytempo(*arguments)
    assert stopped.code == 130
    assert "92.75" in stopped.out
    assert "again" in stopped.err
    assert not (paper[1] / "tiny/runs/digits-even/pace").exists()
    assert polytempo(*arguments).code == 0
    whole = polytempo(*arguments[:2], "--out", paper[1] / "whole")
    assert whole.code == 0
    for row in ("standalone", "fedavg", "pace"):
        one, other = (summary(o, "digits-even", row) for o in (paper[1], paper[1] / "whole"))
        assert one["fingerprint"] == other["fingerprint"]


def test_runs_with_other_settings_are_not_shown(paper, polytempo):
    assert polytempo("reproduce", "tiny/fig1", *paper).code == 0
    file = paper[1] / "tiny/runs/digits-even/pace/seed0/config.toml"
    file.write_text(file.read_text().replace("updates = 12", "updates = 11"))
    polytempo("reproduce", "tiny/fig1", "--only", "fedavg", *paper)
    found = rows_of((paper[1] / "tiny/fig1/digits/table.md").read_text(), "Digits, even")
    assert found["PACE"]["handed"] == "-"
    assert "updates" in polytempo("reproduce", "tiny/fig1", "--only", "pace", *paper).err


def test_another_data_set_in_the_papers_place_has_no_difference(paper, polytempo):
    arguments = ("reproduce", "tiny/table1", "--dataset", "other", "--only", "fedavg", *paper)
    [found] = [
        row
        for row in polytempo(*arguments, "--json").json["tables"]["other/users"]
        if row["method"] == "FedAvg"
    ]
    assert (found["paper"], found["diff."]) == ("44.00", "-")


def test_quick_is_apart_smaller_and_says_so(paper, polytempo):
    out = paper[1]
    outcome = polytempo("reproduce", "tiny/fig1", "--quick", *paper)
    assert outcome.code == 0
    text = (out / "quick/tiny/fig1/digits/table.md").read_text()
    page = out / "quick/tiny/fig1/digits/report.html"
    for said in (outcome.out, text, page.read_text()):
        assert "QUICK" in said
    assert not (out / "tiny").exists()
    config = read_config(out / "quick/tiny/runs/digits-even/pace/seed0/config.toml")
    assert (config["clients"], config["updates"], config["limit"]) == (4, 8, 100)
    assert rows_of(text, "Digits, even")["PACE"]["diff."] == "-"
    assert "QUICK" not in polytempo("reproduce", "tiny/fig1", *paper).out


def test_plots_and_report_are_written(paper, polytempo, monkeypatch):
    out = paper[1]
    polytempo("reproduce", "tiny/fig1", *paper)
    monkeypatch.setattr(result_folder, "can_plot", lambda: True)
    for name, drawn in (
        ("fig1", ["accuracy_even", "tradeoff_even"]),
        ("fig2", ["accuracy_even", "bars_even"]),
    ):
        assert polytempo("reproduce", f"tiny/{name}", *paper).code == 0
        folder = out / "tiny" / name / "digits"
        assert sorted(path.stem for path in folder.glob("*.png")) == drawn
        assert all(p.read_bytes().startswith(b"\x89PNG") for p in folder.glob("*.png"))
        page = (folder / "report.html").read_text()
        assert page.count("data:image/png;base64,") == 2
        assert "Nobody has read this paper." in page
        assert f"polytempo reproduce tiny/{name}" in page
        text = (folder / "table.md").read_text()
        assert all(f"]({stem}.png)" in text for stem in drawn)


def test_training_that_diverges_leaves_the_other_rows(paper, polytempo, tmp_path):
    file = tmp_path / "papers/tiny/common.toml"
    wild = 'strategy = "fedavg"\nsettings = { lr = 1e30, epochs = 5 }'
    file.write_text(file.read_text().replace('strategy = "fedavg"', wild))
    outcome = polytempo("reproduce", "tiny/fig1", *paper)
    assert outcome.code == 2
    assert "fedavg on digits/even, seed 0" in outcome.err
    found = rows_of((paper[1] / "tiny/fig1/digits/table.md").read_text(), "Digits, even")
    assert found["FedAvg"]["handed"] == "-"
    assert found["PACE"]["handed"].endswith("%")


def test_history_backs_the_convergence_time(paper, polytempo):
    """From then on the smoothed accuracy is within a point of its end; just before it was not."""
    polytempo("reproduce", "tiny/fig1", "--only", "pace", *paper)
    folder = paper[1] / "tiny/runs/digits-even/pace/seed0"
    with (folder / "history.csv").open(newline="") as file:
        rows = [(float(r["time"]), float(r["accuracy"])) for r in csv.DictReader(file)]
    smooth = [statistics.mean(a for _, a in rows[max(0, i - 2) : i + 1]) for i in range(len(rows))]
    near = [abs(value - smooth[-1]) <= 0.01 for value in smooth]
    first = len(near) - next((k for k, ok in enumerate(reversed(near)) if not ok), len(near))
    assert summary(paper[1], "digits-even", "pace")["convergence_time"] == rows[first][0]


# -- grids, and the figure that counts ------------------------------------------------------------

GRID = """
title = "Table 9"
about = "Two methods and their rates."
columns = ["digits/even"]
rows = ["asgd", "buffered"]
figure = "accuracy_weighted"
against = ["versions", "updates"]
plot = "heatmap"
axes = ["split", "method"]
[paper.accuracy]
asgd = { "digits/even" = [50.0] }
"""
METHODS = """
[strategies.asgd]
label = "ASGD"
strategy = "vanilla-asgd"
grid = { server_lr = [0.0001, 0.5, 1e39] }
[strategies.buffered]
label = "buffered"
strategy = "fedbuff:buffer_size=3"
settings = { concurrency = 3, versions = 4, updates = 100 }
"""


@pytest.fixture
def grid(paper, tmp_path):
    folder = tmp_path / "papers" / "tiny"
    (folder / "common.toml").write_text(COMMON + METHODS)
    (folder / "table9.toml").write_text(GRID)
    return paper


def test_a_grid_is_tuned_on_validation_samples_and_the_best_value_is_run(grid, polytempo, ran):
    outcome = polytempo("reproduce", "tiny/table9", *grid)
    assert outcome.code == 0, outcome.err  # one value diverged: the others are there
    assert ran == [("asgd", 0)] * 3 + [("server_lr=0.5", 0), ("buffered", 0)]
    names = ["server_lr=0.0001", "server_lr=0.5", "server_lr=1e+39"]
    tuning = grid[1] / "tiny/tuning/digits-even/asgd"
    weak, good = (pooled(tuning / name) for name in names[:2])
    assert good > weak and (tuning / names[2] / "diverged.txt").exists()
    run = grid[1] / "tiny/runs/digits-even/asgd/server_lr=0.5/seed0"
    settings = [read_config(folder / "config.toml") for folder in (tuning / names[1], run)]
    assert [each["validation"] for each in settings] == [0.2, 0]
    found = rows_of((grid[1] / "tiny/table9/digits/table.md").read_text(), "Digits, even")
    assert float(found["ASGD"]["pooled"].rstrip("%")) == pytest.approx(pooled(run), abs=0.051)
    assert float(found["ASGD"]["diff."]) == pytest.approx(pooled(run) - 50, abs=0.051)
    assert found["ASGD"]["best"] == "server_lr=0.5"
    assert (found["buffered"]["best"], found["buffered"]["paper"]) == ("-", "-")
    assert (found["buffered"]["steps"], found["buffered"]["uploads"]) == ("4", "12")
    assert "on validation samples" in outcome.out
    assert "adapted" not in found["ASGD"]


def test_a_grid_is_extended_until_the_best_value_is_inside(grid, polytempo, tmp_path):
    """Ten times as much helps."""
    file = tmp_path / "papers/tiny/common.toml"
    file.write_text(file.read_text().replace("[0.0001, 0.5, 1e39]", "[0.002, 0.02]"))
    outcome = polytempo("reproduce", "tiny/table9", "--only", "asgd", *grid)
    tried = sorted(
        float(folder.name.partition("=")[2])
        for folder in (grid[1] / "tiny/tuning/digits-even/asgd").iterdir()
    )
    assert tried[:3] == [0.002, 0.02, 0.2] and 3 <= len(tried) <= 6
    found = rows_of((grid[1] / "tiny/table9/digits/table.md").read_text(), "Digits, even")
    best = found["ASGD"]["best"]
    inside = float(best.removesuffix(" (edge)").partition("=")[2]) < tried[-1]
    assert inside != best.endswith("(edge)")
    assert outcome.code == 0


def test_a_second_call_runs_no_value_again_not_even_those_that_diverged(grid, polytempo, ran):
    arguments = ("reproduce", "tiny/table9", *grid)
    first = polytempo(*arguments)
    ran.clear()
    assert polytempo(*arguments).out == first.out
    assert ran == []


def test_all_seeds_are_run_with_the_value_that_the_first_has_chosen(grid, polytempo):
    polytempo("reproduce", "tiny/table9", "--only", "asgd", "--seeds", 2, *grid)
    runs = grid[1] / "tiny/runs/digits-even/asgd"
    assert [folder.name for folder in runs.iterdir()] == ["server_lr=0.5"]
    found = rows_of((grid[1] / "tiny/table9/digits/table.md").read_text(), "Digits, even")
    mean = statistics.mean(pooled(runs / "server_lr=0.5" / f"seed{seed}") for seed in (0, 1))
    assert float(found["ASGD"]["pooled"].split()[0]) == pytest.approx(mean, abs=0.051)


def test_a_method_that_diverges_with_every_value_has_failed(grid, polytempo, tmp_path):
    file = tmp_path / "papers/tiny/common.toml"
    file.write_text(file.read_text().replace("[0.0001, 0.5, 1e39]", "[1e39, 1e40]"))
    for _ in range(2):
        outcome = polytempo("reproduce", "tiny/table9", *grid)
        assert outcome.code == 2
        assert "asgd on digits/even, with every value of its grid" in outcome.err


TUNED = """
title = "Table 7"
about = "Cohorts and a buffer, as they are handed and fine-tuned."
columns = ["digits/even"]
rows = ["cohorts", "cohorts-tuned", "stream"]
in_time_of = "stream"
beyond = 0
"""
OWN_RATES = """
[strategies.cohorts]
label = "cohorts"
strategy = "fedavg"
grid = { lr = [0.002, 0.02] }
[strategies.cohorts-tuned]
label = "cohorts, fine-tuned"
strategy = "fedavg"
fine_tuned = true
grid = { lr = [0.002, 0.02] }
[strategies.stream]
label = "stream"
strategy = "fedasync:alpha=0.5"
grid = { lr = [0.002, 0.02] }
"""


def test_a_setting_is_tuned_and_rows_count_what_fine_tuning_makes_of_a_model(
    paper, polytempo, ran, tmp_path
):
    folder = tmp_path / "papers" / "tiny"
    settings = COMMON.replace("epochs = 1\n", "epochs = 1\nlr = 0.01\n", 1)
    (folder / "common.toml").write_text(settings + OWN_RATES)
    (folder / "table7.toml").write_text(TUNED)
    assert polytempo("reproduce", "tiny/table7", *paper).code == 0
    tuning, runs = (paper[1] / "tiny" / what / "digits-even" for what in ("tuning", "runs"))
    assert {path.name for path in (tuning / "stream").iterdir()} == {"lr=0.002", "lr=0.02"}
    assert [row for row, _ in ran].count("cohorts-tuned") == 0  # copied from the other row
    [run] = (runs / "cohorts").glob("*/seed0")
    assert read_config(run / "config.toml")["lr"] == float(run.parent.name.removeprefix("lr="))
    result = {
        row: summary(paper[1], f"digits-even/{row}", "lr=0.02") for row in ("cohorts", "stream")
    }
    found = rows_of((paper[1] / "tiny/table7/digits/table.md").read_text(), "Digits, even")
    handed, tuned = found["cohorts"], found["cohorts, fine-tuned"]
    assert handed["best"] == tuned["best"] == "lr=0.02 (edge)"
    assert tuned["handed"] == handed["adapted"] != handed["handed"]
    assert float(tuned["handed"].rstrip("%")) == pytest.approx(
        100 * result["cohorts"]["accuracy_adapted"], abs=0.051
    )
    assert tuned["time"] == "-"
    assert (tuned["by sample"], tuned["in time"]) == ("-", "-")  # it has one evaluation, the last
    end = result["stream"]["simulated_time"]
    assert end < result["cohorts"]["simulated_time"]
    with (runs / "cohorts/lr=0.02/seed0/history.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if 0 < float(row["time"]) <= end]
    expected = statistics.mean(100 * float(row["accuracy"]) for row in rows[-3:])
    assert float(handed["in time"].rstrip("%")) == pytest.approx(expected, abs=0.051)
    assert "paper" not in handed


def test_an_experiment_may_narrow_the_grids_and_share_the_runs(grid, polytempo, ran, tmp_path):
    polytempo("reproduce", "tiny/table9", *grid)
    ran.clear()
    narrow = tmp_path / "papers/tiny/table8.toml"
    narrow.write_text(GRID.replace("[paper", "grid = { server_lr = [0.5] }\n[paper", 1))
    outcome = polytempo("reproduce", "tiny/table8", "--json", *grid)
    assert ran == []
    assert [line["best"] for line in outcome.json["tables"]["digits/even"]] == [
        "server_lr=0.5",
        "-",
    ]


def test_curves_over_steps_and_uploads_and_a_map_are_drawn(grid, polytempo, monkeypatch):
    monkeypatch.setattr(result_folder, "can_plot", lambda: True)
    polytempo("reproduce", "tiny/table9", *grid)
    folder = grid[1] / "tiny/table9/digits"
    drawn = ["accuracy_even_updates", "accuracy_even_versions", "map"]
    assert sorted(path.stem for path in folder.glob("*.png")) == drawn
    assert (folder / "report.html").read_text().count("data:image/png;base64,") == 3
    assert all(f"]({stem}.png)" in (folder / "table.md").read_text() for stem in drawn)


def test_another_model_has_its_own_folder_and_name(grid, polytempo):
    outcome = polytempo("reproduce", "tiny/table9", "--only", "buffered", "--model", "mlp", *grid)
    assert outcome.code == 0
    assert not (grid[1] / "tiny").exists()
    config = read_config(grid[1] / "tiny-mlp/runs/digits-even/buffered/seed0/config.toml")
    assert config["model"] == "mlp"
    text = (grid[1] / "tiny-mlp/table9/digits/table.md").read_text()
    assert "Digits, mlp, even" in text
    assert "--model mlp" in text


def test_a_table_in_a_pipe_has_a_line_a_row_and_no_empty_columns(paper, polytempo):
    """Nothing can be compared with the paper here, and all is in one seed."""
    given = ("reproduce", "tiny/table1", "--dataset", "other", "--only", "fedavg")
    lines = polytempo(*given, *paper).out.splitlines()
    [head] = [line for line in lines if line.lstrip().startswith("method")]
    words = head.split()
    assert "handed" in words and "messages" in words and "paper" in words
    assert "diff." not in words
    [row] = [line for line in lines if line.lstrip().startswith("FedAvg")]
    assert len(row.split()) == len(head.replace("by sample", "sample").split())


def test_another_length_has_its_own_folder_and_as_many_evaluations(paper, polytempo):
    outcome = polytempo("reproduce", "tiny/fig1", "--only", "pace", "--updates", 24, *paper)
    assert outcome.code == 0
    assert not (paper[1] / "tiny").exists()
    folder = paper[1] / "tiny-updates24"
    config = read_config(folder / "runs/digits-even/pace/seed0/config.toml")
    assert (config["updates"], config["eval_every"]) == (24, 4)
    text = (folder / "fig1/digits/table.md").read_text()
    assert "--updates 24" in text and "Digits, 24 updates, even" in text
    page = (folder / "fig1/digits/report.html").read_text()
    assert re.search(r"updates\W+(<[^>]*>\s*)*24\b", page)


def test_what_depends_on_the_length_follows_it():
    casa = load_experiment("casa/table1", updates=20_000)
    configs = {row: casa.config(row, "mnist/groups", 0, False) for row in casa.rows}
    assert {config.updates for config in configs.values()} == {20_000}
    assert {config.eval_every for config in configs.values()} == {400}  # 50 evaluations
    tables = {row: config.strategy_table for row, config in configs.items()}
    lengths = tables["casa+"]["r_end"], tables["icfl"]["updates"], tables["icfl-async"]["updates"]
    assert lengths == (20_000, 200, 20_000)
    lines = {line["method"]: line["strategy"] for line in _spelled(casa, dict(configs["icfl"]))}
    assert lines["CASA+"].endswith("r_end=20000") and ",updates=200" in lines["ICFL"]
    assert not casa.comparable("mnist/groups")
    whole = load_experiment("casa/table1")
    assert whole.comparable("mnist/groups") and not whole.comparable("uci_har/users")
    assert whole.config("casa", "mnist/groups", 0, False).updates == 50_000
    assert not load_experiment("pace/table2", updates=10).comparable("cifar10/dir0.1")


@pytest.mark.parametrize("name", ["ace/fig2", "p2p/table1"])
def test_rounds_do_not_end_what_something_else_ends(name):
    experiment = load_experiment(name, updates=10)
    with pytest.raises(
        PolytempoError, match=f"{name}: its runs also end after .* --updates would not"
    ):
        experiment.config(experiment.rows[0], experiment.columns[0], 0, False)


def test_quick_tries_two_values_only(grid, polytempo, ran):
    polytempo("reproduce", "tiny/table9", "--quick", "--only", "asgd", *grid)
    tuned = grid[1] / "quick/tiny/tuning/digits-even/asgd"
    assert sorted(folder.name for folder in tuned.iterdir()) == [
        "server_lr=0.0001",
        "server_lr=0.5",
    ]
    assert len(ran) == 3
