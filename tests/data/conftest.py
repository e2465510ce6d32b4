import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of the real data files; what needs it is skipped, visibly, without it."""
    given = os.environ.get("POLYTEMPO_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "../shared/data"
    if not folder.is_dir():
        pytest.skip("no real data: set POLYTEMPO_DATA")
    return folder


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither data files nor a cache of the user's."""
    monkeypatch.delenv("POLYTEMPO_DATA", raising=False)
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path / "cache"))
