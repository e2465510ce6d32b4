import numpy as np
import pytest
import torch

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data import SHIFTS, Federation
from polytempo.data.shift import Noise, Rotation, rotate


def images(*shape: int) -> torch.Tensor:
    return torch.from_numpy(rng(0, "images").integers(0, 256, shape, dtype=np.uint8))


@pytest.mark.parametrize(("angle", "turns"), [(0, 0), (90, 1), (180, 2), (270, 3), (-90, 3)])
def test_right_angles_move_pixels_and_change_none(angle: float, turns: int) -> None:
    x = images(3, 2, 5, 5)
    expected = np.rot90(x.numpy(), turns, axes=(2, 3))
    assert np.array_equal(rotate(x, angle).numpy(), expected)


def test_interpolated_angles_turn_the_same_way_as_right_angles() -> None:
    x = images(2, 3, 8, 8).float()
    for angle in (90, 180, 270):
        assert torch.allclose(rotate(x, angle + 1e-4), rotate(x, angle), atol=0.1)


def test_a_turn_forth_and_back_restores_the_middle_of_a_smooth_oblong_picture() -> None:
    rows, columns = torch.meshgrid(torch.arange(24.0), torch.arange(36.0), indexing="ij")
    x = (rows * 3 + columns).expand(1, 1, 24, 36)
    there = rotate(x, 30)
    assert (there - x)[..., 9:15, 14:22].abs().max() > 3
    back = rotate(there, -30)
    assert torch.allclose(back[..., 9:15, 14:22], x[..., 9:15, 14:22], atol=0.05)


def test_rotated_federation_has_even_groups_that_undo_to_the_original() -> None:
    plain = Federation.load("digits", clients=8, partition="iid")
    turned = Federation.load("digits", clients=8, partition="iid", shift="rotation")
    assert plain.groups is None
    assert np.bincount(turned.groups).tolist() == [2, 2, 2, 2]
    for client, group in enumerate(turned.groups.tolist()):
        own = slice(plain.train[client].start, plain.test[client].stop)
        back = torch.rot90(turned.x[own], -group, dims=(2, 3))
        assert torch.equal(back, plain.x[own])
    assert torch.equal(plain.y, turned.y)


def test_noise_on_pixels_is_on_the_scale_of_one_and_clipped() -> None:
    grey = torch.full((50, 1, 20, 20), 128, dtype=torch.uint8)
    noisy = Noise((0.0, 0.1))(grey, 1, rng(0))
    assert noisy.dtype == torch.uint8
    assert noisy.float().std().item() / 255 == pytest.approx(0.1, rel=0.05)
    assert torch.equal(Noise((0.0, 0.1))(grey, 0, rng(0)), grey)
    loud = Noise((5.0,))(grey, 0, rng(0))
    assert ((loud == 0) | (loud == 255)).float().mean() > 0.8


def test_noise_on_features_has_the_level_of_the_group() -> None:
    found = Noise((0.5,))(torch.zeros(2000, 9), 0, rng(0))
    assert found.std().item() == pytest.approx(0.5, rel=0.05)
    assert found.dtype == torch.float32


def test_groups_of_partition_and_shift_are_combined() -> None:
    partition = {"name": "pathological", "labels": 5, "grouped": True}
    fed = Federation.load("digits", clients=40, partition=partition, shift="noise:levels=[0,0.3]")
    labels = (fed.label_counts()[:, 5:].sum(axis=1) > 0).astype(int)
    assert len(np.unique(fed.groups)) == 4
    for group in range(4):
        assert len(np.unique(labels[fed.groups == group])) == 1
    assert fed.description == (
        "digits, 40 clients, pathological(labels=5, grouped), noise(levels=[0 0.3])"
    )


def test_what_cannot_be_shifted_is_explained() -> None:
    with pytest.raises(PolytempoError, match="rotation needs images"):
        Federation.load("synthetic", shift="rotation")
    with pytest.raises(PolytempoError, match="needs square images, got 4 x 6"):
        Rotation()(images(2, 1, 4, 6), 1, rng(0))
    with pytest.raises(PolytempoError, match="this data set is text"):
        Noise()(torch.zeros(2, 3, dtype=torch.int64), 0, rng(0))
    with pytest.raises(PolytempoError, match="4 groups of 3 clients"):
        Federation.load("digits", clients=3, partition="iid", shift="rotation")
    with pytest.raises(PolytempoError, match="levels"):
        SHIFTS.create("noise:levels=[-1]")
    with pytest.raises(PolytempoError, match="angles"):
        SHIFTS.create({"name": "rotation", "angles": []})
