"""Bars and points beside published figures."""

import pytest

from polytempo.core.errors import PolytempoError
from polytempo.report import Bar, plot_bars, plot_tradeoff


def test_bars_are_drawn_with_whatever_is_known(tmp_path):
    bars = {"all": Bar(0.5, 0.6, 0.7), "low": Bar(0.01), "paper only": Bar(None, None, 0.4)}
    path = plot_bars(bars, tmp_path / "bars.png", "a title")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_many_points_are_told_apart(tmp_path):
    points = {f"method {k}": (0.1 * k, 0.5) for k in range(20)}
    path = plot_tradeoff(points, tmp_path / "points.svg", "a title")
    assert all(f"method {k}" in path.read_text() for k in range(20))


@pytest.mark.parametrize("plot", [plot_bars, plot_tradeoff])
def test_nothing_to_draw_is_an_error(plot, tmp_path):
    with pytest.raises(PolytempoError, match="run something first"):
        plot({}, tmp_path / "empty.png", "a title")
