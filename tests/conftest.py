"""What all tests share: one thread, patience, and a small federation that trains in no time."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from polytempo import Federation

torch.set_num_threads(1)
# Machines are shared and slow at times: an example that takes long is no failure. On a build server
# the examples are the same each time.
settings.register_profile(
    "polytempo",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("polytempo")


@pytest.fixture(scope="session")
def small() -> Federation:
    """Eight clients in two true groups, 12 features, 4 classes."""
    return Federation.load(
        "synthetic:groups=2,kind=permutation,samples=24,features=12,classes=4", clients=8, seed=1
    )
