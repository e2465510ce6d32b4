"""Training code of a user's own, between the arrays that it sees and the vectors that travel."""

import numpy as np
import pytest
import torch

from polytempo import PolytempoError, serve
from polytempo.core.client_steps import Choose
from polytempo.core.compression import RESIDUAL, TopK
from polytempo.core.messages import Dispatch
from polytempo.core.privacy import Gaussian
from polytempo.core.task import Task
from polytempo.experiments.fleet_own import OwnAdapter, to_arrays, to_vector
from polytempo.nodes.star import Examine

LAYOUT = [["w", [2, 3], "float64"], ["b", [], "float32"]]
RECEIVED = torch.arange(7.0)


class Halves:
    """Halves everything; in steps, if it is asked to."""

    def __init__(self, steps=0):
        self.steps = steps

    def train(self, parameters, task):
        return self.stepwise(parameters) if self.steps else self.half(parameters)

    def half(self, parameters):
        return {name: value / 2 for name, value in parameters.items()}

    def stepwise(self, parameters):
        for _ in range(self.steps):
            parameters = self.half(parameters)
            fresh = yield parameters
            parameters = parameters if fresh is None else fresh

    def evaluate(self, parameters):
        return float(parameters["w"].sum())


def adapter(trainer, tmp_path, figures=("total", "value")):
    found = OwnAdapter(trainer, 10, tmp_path)
    found.welcome({"layout": LAYOUT, "figures": [*figures]})
    return found


def begin(trainer, tmp_path, **task):
    return adapter(trainer, tmp_path).begin(Dispatch(0, 5, RECEIVED, Task(**task)), 0, {})


def test_arrays_come_back_as_they_were_given():
    arrays = to_arrays(RECEIVED, LAYOUT)
    assert arrays["w"].dtype == np.float64 and arrays["w"].shape == (2, 3)
    assert arrays["b"].shape == () and to_vector(arrays, LAYOUT).equal(RECEIVED)
    arrays["w"] += 1  # the user's to change
    assert RECEIVED.equal(torch.arange(7.0))
    with pytest.raises(PolytempoError, match="other names than the run's: v; expected w, b"):
        to_vector({**arrays, "v": 1.0}, LAYOUT)
    with pytest.raises(PolytempoError, match=r"'w' has shape \(3,\), expected \(2, 3\)"):
        to_vector({**arrays, "w": np.zeros(3)}, LAYOUT)


@pytest.mark.parametrize(
    ("upload", "wanted"),
    [("model", RECEIVED / 2), ("delta", -RECEIVED / 2), ("gradient", RECEIVED / 2 / 0.5)],
)
def test_what_is_uploaded_is_what_the_strategy_asks_for(upload, wanted, tmp_path):
    training = begin(Halves(), tmp_path, upload=upload, lr=0.5)
    assert training.advance(1)
    assert training.swap(Dispatch(0, 6, RECEIVED, Task(), preempt=True)) is None  # too late
    assert training.finish()[0].equal(wanted)


def test_what_nobody_asks_for_stays_at_home(tmp_path):
    """A strategy may ask for something at first only; own code may go on giving it."""

    class Talkative(Halves):
        def train(self, parameters, task):
            return self.half(parameters), {"choice": np.array([[1]])}

    for steps, sent in (((Choose(2),), {"choice"}), ((), set())):
        training = begin(Talkative(), tmp_path, client_steps=steps)
        assert training.advance(1)
        assert training.finish()[1].keys() == sent


def test_own_code_is_compressed_and_private_like_any_other(tmp_path):
    training = begin(Halves(), tmp_path, client_steps=(Gaussian(1e9, 0.0), TopK(0.4)))
    assert training.advance(1)
    vector, extras, memory = training.finish()
    assert vector.tolist() == [-2.0, -2.5, -3.0]  # the farthest from where they were
    assert extras["places"].tolist() == [[4, 5, 6]]
    assert memory[RESIDUAL].tolist() == [0.0, -0.5, -1.0, -1.5, 0.0, 0.0, 0.0]
    private = begin(Halves(), tmp_path, client_steps=(Gaussian(1.0, 1.0),))
    assert private.advance(1)
    first, second = private.finish()[0], private.finish()[0]
    assert not first.equal(second)  # drawn anew, from where nobody else can look


def test_a_generator_continues_from_what_is_pushed_and_ends_when_asked(tmp_path):
    training = begin(Halves(4), tmp_path)
    assert not training.advance(2)
    assert training.swap(Dispatch(0, 6, 8 * RECEIVED, Task(), preempt=True)) == 2
    assert not training.advance(1)
    training.shorten()
    assert training.advance(1)
    assert training.finish()[0].equal(2 * RECEIVED)  # 8, halved twice: the last step is not taken


def test_a_generator_runs_to_its_end(tmp_path):
    training = begin(Halves(3), tmp_path)
    assert training.advance(100)
    assert training.finish()[0].equal(RECEIVED / 8)


def test_scores_are_sums(tmp_path):
    handed, adapted = adapter(Halves(), tmp_path).examine(Examine(0, RECEIVED, 1), 0, {})
    assert handed == {"total": 10.0, "value": 150.0} and adapted["value"] == 75.0
    with pytest.raises(PolytempoError, match="this server wants correct, loss, total"):
        adapter(Halves(), tmp_path, ("correct", "loss", "total")).examine(
            Examine(0, RECEIVED), 0, {}
        )


def test_what_own_code_leaves_out_is_said(tmp_path):
    with pytest.raises(PolytempoError, match="asks clients for choice as well"):
        begin(Halves(), tmp_path, client_steps=(Choose(2),)).advance(1)
    with pytest.raises(PolytempoError, match="train returned a list; expected a dictionary"):
        begin(type("L", (Halves,), {"half": lambda *_: []})(), tmp_path).advance(1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"parameters": {}}, "there are no parameters"),
        ({"parameters": {"w": np.arange(3)}}, "'w' is int64 .* expected floating-point"),
        ({"parameters": "mlp"}, "needs shape=... and outputs=..."),
        ({"parameters": {"w": np.zeros(3)}, "data": "digits"}, "the data are with the clients"),
        ({"parameters": {"w": np.zeros(3)}, "strategy": "p2p"}, "not a strategy with a server"),
        ({"parameters": {"w": np.zeros(3)}, "wait_for": 3}, "wait_for = 3: .* at most .*, 2"),
        ({"parameters": {"w": np.zeros(3)}, "limits": {"speed": 1}}, "unknown limit 'speed'"),
        ({"parameters": {"w": np.zeros(3)}, "metric": "seed"}, "means something else in results"),
    ],
)
def test_a_server_from_python_says_what_is_wrong(given, said, tmp_path):
    with pytest.raises(PolytempoError, match=said):
        serve(given.pop("parameters"), clients=2, out=tmp_path / "s", **given)
    assert not (tmp_path / "s").exists()
