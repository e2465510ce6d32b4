"""Runs with privacy, attacks, defences and compression, from their settings to their figures."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from polytempo import PolytempoError, simulate
from polytempo.core.attacks import ATTACKS, Attack
from polytempo.experiments.compare import Comparison
from polytempo.experiments.config import make_config
from polytempo.experiments.wording import about_guards
from polytempo.experiments.world import make_simulator, poisoned
from polytempo.simulation.guards import epsilon

USUAL = {"model": "linear", "updates": 30, "epochs": 1, "lr": 0.1, "adapt_epochs": 0, "seed": 2}
ALL = {
    "dp": "clip=2,noise=0.5",
    "compress": "int8:16",
    "attack": "random:share=0.25,times=2",
    "defend": "trimmed:window=5",
}


def final(result):
    return result.simulator.strategy.model_for(0)


def test_figures_speak_of_all_four(small, tmp_path, monkeypatch):
    # plots take a while
    monkeypatch.setattr("polytempo.experiments.result_folder.can_plot", lambda: False)
    result = simulate(small, strategy="fedbuff", out=tmp_path / "a", **USUAL, **ALL)
    assert json.loads((tmp_path / "a" / "result.json").read_text())["privacy"] == result.privacy
    attackers = result.attack["clients"]
    assert len(attackers) == 2 and result.attack["share"] == 0.25
    assert set(result.simulator._there()) == set(range(8)) - set(attackers)
    assert result.defence["uploads"] == 30 and result.defence["changed"] > 0
    with (tmp_path / "a" / "privacy.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    counts = [int(row["uploads"]) for row in rows]
    assert sum(counts) == 30 and len(counts) == 8
    mechanism = make_config({"dp": ALL["dp"]}).make("dp")
    assert result.privacy["epsilon_max"] == epsilon(mechanism, max(counts))
    size = result.parameters
    assert result.messages["upload_bytes"] == 30 * (size + 4 * -(-size // 16))
    said = about_guards(result.summary)
    assert "2 clients (25%)" in said["attack"] and "of 30 updates" in said["defence"]
    row = Comparison({"fedbuff": [result]}, result.metric, 0.5, True, {}).table()[0]
    assert float(row["epsilon"].replace(",", "")) == pytest.approx(
        result.privacy["epsilon_max"], abs=0.06
    )
    plain = simulate(small, strategy="fedbuff", **USUAL)
    assert [plain.summary[name] for name in ("privacy", "attack", "defence")] == [None] * 3
    assert about_guards(plain.summary) == {}


def test_a_run_is_resumed_bit_for_bit(small, tmp_path, monkeypatch):
    monkeypatch.setattr("polytempo.experiments.result_folder.can_plot", lambda: False)
    given = {**USUAL, **ALL, "strategy": "pace", "out": tmp_path / "a"}
    simulate(small, **{**given, "updates": 14})
    resumed = simulate(small, **given, resume=True)
    whole = simulate(small, **{**given, "eval_every": resumed.simulator.eval_every, "out": None})
    assert resumed.fingerprint == whole.fingerprint
    assert torch.equal(final(resumed), final(whole))
    assert (resumed.privacy, resumed.defence) == (whole.privacy, whole.defence)
    with pytest.raises(PolytempoError, match="compress"):
        simulate(small, **{**given, "compress": "topk:0.5"}, resume=True)


def test_solvers_agree_and_workers_do_not_matter(small):
    given = {**USUAL, **ALL, "strategy": "fedbuff", "updates": 12}
    serial = simulate(small, **given, solver="torch", backend="serial")
    spread = simulate(small, **given, solver="torch", backend="processes", workers=2)
    native = simulate(small, **given, solver="native", backend="serial")
    assert spread.fingerprint == serial.fingerprint
    assert torch.equal(final(spread), final(serial))
    torch.testing.assert_close(final(native), final(serial), rtol=0, atol=1e-2)


def test_fewer_bytes_take_less_time(small):
    """Uploads alone are compressed: at 1 Mbit/s, what is not sent is not waited for."""
    given = {**USUAL, "strategy": "fedavg", "network": "uniform:low=1,high=1", "devices": "equal"}
    plain, packed = (simulate(small, **given, compress=c) for c in (None, "topk:0.1"))
    cohorts = plain.messages["dispatch"] / plain.simulator.concurrency
    saved = (4 * plain.parameters - 8 * int(np.ceil(0.1 * plain.parameters))) * 8 / 1e6
    assert plain.simulated_time - packed.simulated_time == pytest.approx(
        (cohorts - 1) * saved, rel=0.15
    )


def test_attackers_learn_from_wrong_labels_and_nobody_else_does(small):
    attack = ATTACKS.create("label-flip:share=0.25")
    wrong = poisoned(small, attack, seed=0)
    for client in range(8):
        part, tested = small.train[client], small.test[client]
        ours, theirs = small.y[part], wrong.y[part]
        assert torch.equal(theirs, 3 - ours if client in attack.clients(8, 0) else ours)
        assert torch.equal(wrong.y[tested], small.y[tested])


class Nothing(Attack):
    """Sends nothing: an attack of one's own."""

    def leaving(self, parting, moved):
        return torch.zeros_like(moved)


def test_an_attack_of_ones_own(small):
    given = {**USUAL, "strategy": "fedasync:alpha=1", "concurrency": 1, "updates": 6}
    name = f"{__name__}:Nothing:share=0.99"
    config = make_config({**given, "attack": name}, "test")
    engine = make_simulator(config, small, "linear")
    sent = []
    inner = engine.server.strategy.fold
    engine.server.strategy.fold = lambda u, s: (sent.append(u), inner(u, s))[1]
    engine.run(6)
    initial = engine.context.initial
    moved = [not torch.equal(update.vector, initial) for update in sent]
    honest = [update.client not in engine.attackers for update in sent]
    first = honest.index(True) if True in honest else len(sent)
    assert len(engine.attackers) == 7 and moved[: first + 1] == honest[: first + 1]


def test_a_defence_helps(small):
    """Loud liars undo a run; cut to the usual length, they do not."""
    given = {
        **USUAL,
        "strategy": "fedavg",
        "updates": 120,
        "attack": "sign-flip:share=0.25,times=20",
    }
    open_, shut = (simulate(small, **given, defend=d).accuracy for d in (None, "norm:times=1"))
    assert shut > open_ + 0.1


@pytest.mark.parametrize("setting", sorted(ALL))
def test_peers_have_no_use_for_them(setting, small):
    given = {**USUAL, setting: ALL[setting]}
    del given["epochs"]
    with pytest.raises(PolytempoError, match=f"{setting} = .*p2p has no server"):
        simulate(small, strategy="p2p", **given)


def test_nothing_leaves_a_client_that_is_alone(small):
    given = {**USUAL, "strategy": "standalone"}
    plain, guarded = (simulate(small, **given, **more) for more in ({}, {**ALL, "attack": None}))
    assert torch.equal(final(plain), final(guarded))
    assert guarded.privacy is None


def test_labels_must_be_labels(small):
    numbers = replace(small, y=small.y.float())
    with pytest.raises(PolytempoError, match="one label per sample"):
        poisoned(numbers, ATTACKS.create("label-flip"), 0)
