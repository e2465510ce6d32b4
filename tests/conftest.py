"""What all tests share: one thread, and a small federation that trains in milliseconds."""

import pytest
import torch

from polytempo import Federation

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small() -> Federation:
    """Eight clients in two true groups, 12 features, 4 classes."""
    return Federation.load(
        "synthetic:groups=2,kind=permutation,samples=24,features=12,classes=4", clients=8, seed=1
    )
