"""Defences and attacks, beside what plain arithmetic says."""

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

from polytempo import Context, PolytempoError, Server, Task, Update
from polytempo.core.attacks import ATTACKS, Attack, LabelFlip, Random, Replay, Scale, SignFlip
from polytempo.core.compression import TopK
from polytempo.core.defences import DEFENCES, Direction, Norm, Trimmed
from polytempo.core.rng import rng
from polytempo.strategies import STRATEGIES

UPLOADS = torch.from_numpy(np.random.default_rng(0).normal(size=(30, 6)))


def ready(defence):
    defence.setup()
    return defence


def feed(defence, uploads):
    """What is left of each, one after the other."""
    left = []
    for moved in uploads:
        left.append(defence.limit(moved))
        defence.folded(moved, left[-1] is not moved)
    return left


def test_nobody_moves_farther_than_some_medians():
    defence = ready(Norm(times=1.2, window=4))
    lengths = UPLOADS.norm(dim=1).numpy()
    for k, left in enumerate(feed(defence, UPLOADS)):
        most = 1.2 * np.median(lengths[max(0, k - 4) : k]) if k else np.inf
        wanted = UPLOADS[k] * min(1, most / lengths[k])
        torch.testing.assert_close(left, wanted)
    assert 0 < defence.changed < defence.uploads == 30


def test_who_moves_against_the_others_is_left_where_it_was():
    ahead = UPLOADS * 0.3 + torch.tensor([5.0, 0, 0, 0, 0, 0])
    uploads = ahead.clone()
    uploads[::4] *= -10  # loud liars have no more of a say
    left = feed(ready(Direction(window=8)), uploads)
    assert all(torch.equal(left[k], uploads[k]) for k in range(8))
    for k in range(8, 30):
        assert torch.equal(left[k], torch.zeros(6) if k % 4 == 0 else uploads[k])


def test_the_mean_of_a_window_is_its_trimmed_mean():
    """Each number is looked at among the same ten: the others come before it."""
    uploads = UPLOADS[:10]
    handed = []
    for k in range(10):
        defence = ready(Trimmed(share=0.2, window=10))
        feed(defence, torch.cat([UPLOADS[20:], uploads[:k], uploads[k + 1 :]]))
        handed.append(defence.limit(uploads[k]))
    mean = torch.stack(handed).mean(0).numpy()
    np.testing.assert_allclose(mean, trim_mean(uploads.numpy(), 0.2), rtol=1e-12)


@pytest.mark.parametrize("spec", ["norm:times=1.1,window=3", "direction:window=3", "trimmed"])
def test_a_defence_goes_on_as_it_was(spec):
    defence = ready(DEFENCES.create(spec))
    feed(defence, UPLOADS[:11])
    again = ready(DEFENCES.create(spec))
    again.load_state_dict(defence.state_dict())
    ours, theirs = (feed(d, UPLOADS[11:]) for d in (defence, again))
    assert all(map(torch.equal, ours, theirs))
    assert 0 < defence.changed == again.changed


def test_a_query_changes_nothing():
    for name in DEFENCES:
        defence = ready(DEFENCES.create(name))
        feed(defence, UPLOADS)
        before = repr(defence.state_dict())
        assert torch.equal(defence.limit(-9 * UPLOADS[3]), defence.limit(-9 * UPLOADS[3]))
        assert repr(defence.state_dict()) == before


def test_the_server_folds_what_the_defence_has_left():
    """Of a model, how far it was moved counts; one that is held back comes as it was sent."""
    context = Context(torch.full((4,), 7.0), [5] * 2, Task(), seed=0)
    strategy = STRATEGIES.create("fedasync:alpha=1")
    defence = Norm(times=2.0)
    server = Server(strategy, context, concurrency=1, defence=defence)
    [sent] = server.join([0, 1])
    step = torch.tensor([1.0, 0, 0, 0])
    [sent] = server.receive(Update(sent.client, sent.number, sent.params + step, 5))
    assert torch.equal(sent.params, 7 + step)
    [sent] = server.receive(Update(sent.client, sent.number, sent.params + 50 * step, 5))
    assert torch.equal(sent.params, 7 + 3 * step)
    assert (defence.uploads, defence.changed) == (2, 1)


# -- attacks --------------------------------------------------------------------------------------


class Leaving:
    def __init__(self):
        self.memory, self.extras = {}, {}

    def stream(self, name):
        return rng(3, name)


def test_what_attackers_send():
    client, moved = Leaving(), UPLOADS[0]
    assert torch.equal(SignFlip(times=3).leaving(client, moved), -3 * moved)
    assert torch.equal(Scale().leaving(client, moved), 10 * moved)
    drawn = Random(times=2).leaving(client, moved)
    assert float(drawn.norm()) == pytest.approx(2 * float(moved.norm()))
    assert abs(float(torch.cosine_similarity(drawn, moved, dim=0))) < 0.9
    replay = Replay()
    assert torch.equal(replay.leaving(client, moved), moved)
    assert torch.equal(replay.leaving(client, UPLOADS[1]), moved)
    assert LabelFlip().targets(torch.tensor([0, 9, 4]), 10).tolist() == [9, 0, 5]
    with pytest.raises(PolytempoError, match="one label per sample"):
        LabelFlip().targets(torch.zeros(3), 10)


def test_who_attacks_is_drawn_by_the_seed():
    found = [SignFlip(share=0.3).clients(20, seed) for seed in range(5)]
    assert {len(clients) for clients in found} == {6}
    assert len(set(found)) > 1
    assert found[0] == ATTACKS.create("replay:0.3").clients(20, 0)
    assert len(SignFlip(share=0.01).clients(20, 0)) == 1
    assert len(SignFlip(share=0.99).clients(5, 0)) == 4
    with pytest.raises(PolytempoError, match="two clients"):
        SignFlip().clients(1, 0)


def test_an_attack_comes_last_but_for_compression():
    attack = SignFlip()
    steps = attack.on(Task(client_steps=(TopK(0.5),))).client_steps
    assert steps == (attack, TopK(0.5))
    assert attack.on(Task()).client_steps == (attack,)
    assert all(issubclass(ATTACKS[name], Attack) for name in ATTACKS)
