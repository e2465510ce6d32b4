"""What a model sees in a client's samples, and the directions in which it varies."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from torch import nn

from polytempo import PolytempoError, Task
from polytempo.core.client_steps import Basis, principal_directions
from polytempo.training import AutogradSolver, Job
from polytempo.training.features import last_features
from polytempo.training.solvers.native.solver import NativeSolver
from solving import needs_compiler, upload_of


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


# -- features -------------------------------------------------------------------------------------


def test_features_are_what_enters_the_last_linear_layer():
    body = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU())
    module = nn.Sequential(body, nn.Linear(5, 3), nn.LogSoftmax(1))
    x = torch.randn(4, 2, 3)
    assert torch.equal(last_features(module, x), body(x))
    assert hooks(module) == 0


def test_a_single_linear_layer_sees_the_samples_themselves():
    x = torch.randn(4, 6)
    assert torch.equal(last_features(nn.Linear(6, 3), x), x)
    images = torch.randn(4, 2, 3)
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    assert torch.equal(last_features(module, images), images.flatten(1))


class Reversed(nn.Module):
    """Its layers are named in another order than they are used in; one of them is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.body = nn.Linear(6, 5)
        self.spare = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def test_the_last_layer_is_the_one_that_is_used_last():
    module, x = Reversed(), torch.randn(4, 6)
    assert torch.equal(last_features(module, x), torch.tanh(module.body(x)))
    assert hooks(module) == 0


def test_more_than_one_vector_a_sample_is_laid_flat():
    module, x = nn.Linear(5, 3), torch.randn(4, 2, 5)
    assert torch.equal(last_features(module, x), x.flatten(1))


def test_a_module_without_a_linear_layer_is_an_error_that_names_it():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    with pytest.raises(PolytempoError, match=r"Sequential has no linear layer.*fedsac.*nn\.Linear"):
        last_features(module, torch.randn(1, 1, 5, 5))


def test_nothing_is_left_on_the_module_when_it_fails():
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with pytest.raises(RuntimeError):
        last_features(module, torch.randn(4, 7))
    assert hooks(module) == 0


# -- principal directions -------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(5, 30), st.integers(4, 8), st.integers(1, 4))
def test_directions_are_those_of_a_centred_pca(seed, samples, features, count):
    draw = np.random.default_rng(seed)
    scales = 2.0 ** -np.arange(features)  # no two variances alike
    turn = np.linalg.qr(draw.normal(size=(features, features)))[0]
    x = draw.normal(size=(samples, features)) * scales @ turn + 5 * draw.normal(size=features)
    basis = principal_directions(torch.from_numpy(x), count).numpy()
    expected = PCA(count, svd_solver="full").fit(x).components_
    np.testing.assert_allclose(np.abs(basis @ expected.T), np.eye(count), atol=1e-6)


def test_directions_by_hand():
    """Far from the origin: it is the differences that count."""
    x = torch.tensor([[100.0, 3.0, 0.0], [100.0, -3.0, 0.0], [101.0, 0.0, 0.0], [99.0, 0.0, 0.0]])
    basis = principal_directions(x, 2)
    assert basis.dtype == torch.float32
    expected = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(basis.abs(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("samples", "rank"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_directions_in_which_nothing_varies_are_zero(samples, rank, dtype):
    draw = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 3, generator=draw, dtype=torch.float64).to(dtype)
    x = torch.cat([x, torch.ones(samples, 2, dtype=dtype)], 1)  # three of five dimensions
    basis = principal_directions(x, 4)
    assert basis.shape == (4, 5) and basis.dtype == dtype
    expected = torch.zeros(4, 4, dtype=dtype)
    expected[:rank, :rank] = torch.eye(rank)
    torch.testing.assert_close(basis @ basis.T, expected, rtol=0, atol=1e-6)
    assert basis[rank:].abs().max() == 0
    if rank:
        assert basis[:rank, 3:].abs().max() < 1e-6


def test_more_directions_than_features():
    basis = principal_directions(torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), 3)
    torch.testing.assert_close(basis[:2] @ basis[:2].T, torch.eye(2))
    assert basis[2].tolist() == [0.0, 0.0]


def test_samples_that_are_all_alike_have_no_directions():
    assert principal_directions(torch.full((6, 4), 0.1), 2).abs().max() == 0
    assert principal_directions(torch.zeros(6, 4), 2).abs().max() == 0


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_features_that_are_not_finite_have_a_basis_that_is_refused(wrong):
    x = torch.randn(6, 4)
    x[2, 1] = wrong
    basis = principal_directions(x, 3)
    assert basis.shape == (3, 4) and basis.dtype == x.dtype
    assert bool(basis.isnan().all())


# -- in a trainer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solver", "dtype", "error"),
    [
        (AutogradSolver, torch.float64, 1e-6),
        pytest.param(NativeSolver, torch.float32, 1e-4, marks=needs_compiler),
    ],
)
@pytest.mark.parametrize("upload", ["model", "delta", "gradient"])
def test_extras_are_of_the_model_that_was_trained(small, solver, dtype, error, upload):
    """In evaluation mode, on the training samples of the client alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 4)).to(dtype)
    trainer = solver(module, small, 5)
    start = trainer.layout.read()
    task = Task(epochs=2, batch_size=4, lr=0.1, upload=upload, client_steps=(Basis(2),))
    job = Job(3, start + 0.1, task, ("client", 3))
    vector, extras, _ = trainer.carry_out(job)
    [(name, basis)] = extras.items()
    assert name == "basis"
    model = {"model": vector, "delta": job.params + vector, "gradient": job.params}[upload]
    x = small.x[small.train[3]].double().numpy()
    weights, biases = model[:84].numpy().reshape(7, 12), model[84:91].numpy()
    features = np.maximum(x @ weights.T + biases, 0)
    expected = PCA(2, svd_solver="full").fit(features).components_
    np.testing.assert_allclose(np.abs(basis.numpy() @ expected.T), np.eye(2), atol=error)
    assert hooks(module) == 0
    assert torch.equal(upload_of(trainer, job), vector)  # nothing is left behind


def test_a_task_without_a_basis_has_no_extras(small):
    trainer = AutogradSolver(nn.Conv1d(1, 1, 1), small, 5)  # which could not give one
    session = trainer.begin(Job(0, trainer.layout.read(), Task(), ("a",)))
    assert session.finish().extras == {}


def test_dropout_is_off_and_large_shards_are_taken_in_parts(small, monkeypatch):
    monkeypatch.setattr("polytempo.training.solvers.autograd.EVALUATION_BATCH", 5)
    module = nn.Sequential(nn.Linear(12, 7), nn.Dropout(0.5), nn.Linear(7, 4)).double()
    trainer = AutogradSolver(module, small, 5)
    start = trainer.layout.read()
    job = Job(1, start, Task(client_steps=(Basis(3),)), ("a",))
    module.train()
    basis = trainer.begin(job).finish().extras["basis"].numpy()
    with torch.no_grad():
        features = module[0](small.x[small.train[1]].double()).numpy()
    expected = PCA(3, svd_solver="full").fit(features).components_
    np.testing.assert_allclose(np.abs(basis @ expected.T), np.eye(3), atol=1e-6)
