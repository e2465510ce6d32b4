"""The benchmark of exchanges measures pairings that really take place."""

import pytest

from polytempo.bench.exchange import measure_exchange


@pytest.mark.parametrize("tls", [False, True])
def test_figures_of_an_exchange_fit_together(tls):
    found = measure_exchange(1_000, tls=tls, repeats=3)
    assert (found["megabytes"], found["tls"], found["repeats"]) == (pytest.approx(0.004), tls, 3)
    assert 0 < found["median_ms"] <= found["worst_ms"]
    assert found["mb_per_s"] == pytest.approx(2 * 0.004 / (found["median_ms"] / 1e3))
