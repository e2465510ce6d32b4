"""The plots are real, reproducible pictures of the data, and leave matplotlib as it was."""

from __future__ import annotations

import ast
import itertools
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import polytempo.report
from polytempo.core.errors import PolytempoError
from polytempo.core.metric import ACCURACY, MetricInfo
from polytempo.report import (
    Curve,
    in_formats,
    plot_clusters,
    plot_curves,
    plot_diagnosis,
    plot_distribution,
    plot_graph,
    plot_heatmaps,
    plot_labels,
    plot_peers,
    plot_similarity,
    plot_staleness,
)
from polytempo.report.canvas import PALETTE, canvas, metric_axis
from polytempo.report.clusters import ACROSS, COLOURS, strips
from polytempo.report.curves import on_common_grid
from polytempo.report.maps import by_cluster, by_group, colour_top


def curve(*values, start=0.0, step=1.0, adapted=None):
    count = len(values)
    times = [start + step * index for index in range(count)]
    return Curve(times, list(range(count)), list(range(0, 2 * count, 2)), list(values), adapted)


def two_blocks(clients=12, seed=0):
    draw = np.random.default_rng(seed)
    groups = np.arange(clients) % 2
    weights = (groups[:, None] == groups) * (0.5 + draw.random((clients, clients)))
    return weights + np.eye(clients) * 9, groups


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def two_seeds(last):
    return {"pace": [curve(0.1, 0.4, adapted=0.9), curve(0.1, last)], "b": [curve(0.2, 0.3)]}


def panels(last):
    return {
        "a": {("0.1", "5"): 0.3, ("0.1", "30"): 0.2, ("1", "5"): 0.5},
        "b": {("0.1", "5"): last},
    }


DRAW = {
    "heatmaps": (
        lambda path: plot_heatmaps(panels(0.4), path, x="alpha", y="beta"),
        lambda path: plot_heatmaps(panels(0.41), path, x="alpha", y="beta"),
    ),
    "accuracy": (
        lambda path: plot_curves(two_seeds(0.6), ACCURACY, path),
        lambda path: plot_curves(two_seeds(0.61), ACCURACY, path),
    ),
    "staleness": (
        lambda path: plot_staleness({0: 5, 3: 2, 9: 1}, path),
        lambda path: plot_staleness({0: 5, 3: 3, 9: 1}, path),
    ),
    "graph": (
        lambda path: plot_graph(two_blocks()[0], path),
        lambda path: plot_graph(*two_blocks()[:1], path, two_blocks()[1]),
    ),
    "distribution": (
        lambda path: plot_distribution({"a": [[0.1, 0.4], [0.6]], "b": [[0.3]]}, ACCURACY, path),
        lambda path: plot_distribution({"a": [[0.1, 0.4], [0.7]], "b": [[0.3]]}, ACCURACY, path),
    ),
    "labels": (
        lambda path: plot_labels(np.eye(20, 10) * 5 + 1, path, np.arange(20) % 4, "a"),
        lambda path: plot_labels(np.eye(20, 10) * 6 + 1, path, np.arange(20) % 4, "a"),
    ),
}


@pytest.mark.parametrize("name", DRAW)
def test_a_plot_is_a_png_that_shows_the_data_and_nothing_else(name, tmp_path):
    draw, draw_other = DRAW[name]
    first, again, other = tmp_path / "a.png", tmp_path / "sub" / "b.png", tmp_path / "c.png"
    assert draw(first) == first
    assert draw(str(again)) == again
    draw_other(other)
    width, height = size(first)
    assert 700 < width < 1300 and 400 < height < 1200
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_the_users_matplotlib_settings_neither_matter_nor_change(tmp_path):
    import matplotlib

    draw = DRAW["staleness"][0]
    draw(tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        draw(tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 30
        assert matplotlib.rcParams["axes.facecolor"] == "red"
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(("suffix", "begins"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_vector_files_are_reproducible_too(suffix, begins, tmp_path):
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        DRAW["staleness"][0](file)
    assert files[0].read_bytes().startswith(begins)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_pdf_is_as_wide_as_a_column_and_embeds_its_fonts(tmp_path):
    data = DRAW["accuracy"][0](tmp_path / "a.pdf").read_bytes()
    left, bottom, right, top = map(float, re.search(rb"MediaBox \[([^]]*)", data)[1].split())
    assert (right - left) / 72 == pytest.approx(3.5) and 1.5 < (top - bottom) / 72 < 3
    assert b"/FontFile2" in data and b"/Type3" not in data  # TrueType
    assert b"CreationDate" not in data


def test_a_long_title_takes_several_lines_in_a_pdf(tmp_path):
    from matplotlib.text import Text

    for path, lines in ((tmp_path / "a.pdf", 3), (tmp_path / "a.png", 1)):
        with canvas(path, 8.0, 5.0) as figure:
            figure.add_subplot().set_title("mean over clients and seeds; " * 4)
        [title] = [t for t in figure.findobj(Text) if t.get_text()[:4] == "mean"]
        assert len(title.get_text().strip().splitlines()) == lines


def test_a_plot_comes_in_the_format_that_is_wanted_beside_the_png(tmp_path):
    draw = DRAW["staleness"][0]
    assert in_formats(draw, tmp_path / "a.png", "png") == tmp_path / "a.png"
    assert in_formats(draw, tmp_path / "b.png", "pdf") == tmp_path / "b.png"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "b.pdf", "b.png"]


@pytest.mark.parametrize(("interval", "factor"), [("std", 1.0), ("ci95", 12.7062 / 2**0.5)])
def test_the_band_is_the_interval_around_the_mean(interval, factor, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    tops = []
    monkeypatch.setattr(
        Axes, "fill_between", lambda axes, x, low, high, **look: tops.append(high.tolist())
    )
    runs = {"a": [curve(0.1, 0.4), curve(0.1, 0.6)]}
    plot_curves(runs, ACCURACY, tmp_path / "a.png", interval=interval)
    assert tops == [pytest.approx([0.1, 0.5 + factor * 0.02**0.5], rel=1e-4)]


@pytest.mark.parametrize(
    ("metric", "values", "end"),
    [
        (ACCURACY, (0.1, 0.3, 0.8, 0.85, 0.9, 0.91), 0.79),
        (ACCURACY, (0.1, 0.3, 0.4, 0.6, 0.8, 0.91), 0.06),  # all of it
        (MetricInfo("loss", "loss", "lower", False), (9.0, 5.0, 0.9, 0.6, 0.5, 0.5), 0.93),
    ],
)
def test_the_axis_leaves_out_a_first_rise_that_would_flatten_the_rest(
    metric, values, end, tmp_path, monkeypatch
):
    limits = []

    def axis(axes, *given):
        metric_axis(axes, *given)
        limits.extend(axes.get_ylim())

    monkeypatch.setattr("polytempo.report.curves.metric_axis", axis)
    plot_curves({"a": [curve(*values)]}, metric, tmp_path / "a.png")
    assert limits[0 if metric.better == "higher" else 1] == pytest.approx(end, abs=0.01)


def test_the_right_end_of_a_long_label_stays_inside_the_picture(tmp_path):
    from matplotlib.image import imread

    labels = [f"a-rather-long-strategy-name-{index}" for index in range(6)]
    runs = {label: [curve(0.1, 0.7, adapted=0.8)] for label in labels}
    picture = imread(plot_curves(runs, ACCURACY, tmp_path / "a.png"))
    assert (picture[:, -2:, :3] == 1).all()
    assert not (picture[:, -60:, :3] == 1).all()


def test_large_and_tiny_data_can_be_drawn(tmp_path):
    draw = np.random.default_rng(0)
    many = {f"s{index}": [curve(0.1, draw.random())] for index in range(33)}
    assert size(plot_curves(many, ACCURACY, tmp_path / "many.png", x="messages"))[1] > 700
    size(plot_curves({"one": [curve(0.5)]}, ACCURACY, tmp_path / "one.png", x="updates"))
    size(plot_staleness({0: 1}, tmp_path / "zero.png"))
    size(plot_staleness({5000: 1, 3: 2}, tmp_path / "far.png"))
    size(plot_labels(draw.integers(0, 9, (100, 47)), tmp_path / "labels.png", np.arange(100) % 30))
    size(plot_labels(np.zeros((3, 2)), tmp_path / "empty.png"))
    for clients in (1, 2, 100):
        size(plot_graph(draw.random((clients, clients)), tmp_path / "graph.png"))
    size(plot_graph(np.eye(5), tmp_path / "alone.png"))


@pytest.mark.parametrize(("peers", "lines"), [(3, 3), (7, 8)])
def test_few_peers_are_named_and_many_have_a_mean(peers, lines, tmp_path):
    """Each with times of its own; the mean is of those that hold at a time."""
    given = {f"ann{k}": ([0.0, 1.0 + k, 20.0 + k], [0.1, 0.2, k / 10]) for k in range(peers)}
    text = plot_peers(given, ACCURACY, tmp_path / "a.svg", clock="seconds").read_text()
    assert text.count("ann") == (peers if peers == lines else 0)
    assert ("mean: 30.0%" in text) == (peers != lines)
    steps = r'<path d="M(?:[^"]*L){4,}[^"]*" clip-path'  # a line of the grid has one L
    assert len(re.findall(steps, text)) == lines
    assert "seconds" in text and "simulated" not in text


@pytest.mark.parametrize(("long", "logarithmic"), [(4.0, False), (40.0, True)])
def test_time_is_logarithmic_if_one_takes_far_longer(long, logarithmic, tmp_path):
    runs = {"fast": [curve(0.1, 0.5, 0.9)], "slow": [curve(0.1, 0.2, 0.7, step=long)]}
    text = plot_curves(runs, ACCURACY, tmp_path / "a.svg").read_text()
    assert ("simulated time (s), logarithmic" in text) == logarithmic
    assert (
        "logarithmic"
        not in plot_curves(runs, ACCURACY, tmp_path / "b.svg", x="updates").read_text()
    )


MSE = MetricInfo("mse", "mean squared error", "lower", False)


def test_the_axis_names_the_metric_and_only_shares_are_in_per_cent(tmp_path):
    runs = {"a": [curve(0.9, 0.5, adapted=0.25)]}
    text = plot_curves(runs, MSE, tmp_path / "a.svg").read_text()
    assert "mean squared error (lower is better)" in text
    assert "a: 0.5000, \N{WHITE DIAMOND} 0.2500" in text and "%" not in drawn_text(text)
    text = plot_curves(runs, ACCURACY, tmp_path / "b.svg").read_text()
    assert "<!-- accuracy -->" in text and "better" not in text
    assert "a: 50.0%, \N{WHITE DIAMOND} 25.0%" in text
    peers = {"ann": ([0.0, 1.0], [0.9, 0.5])}
    text = plot_peers(peers, MSE, tmp_path / "c.svg").read_text()
    assert "mean squared error (lower is better)" in text and "ann: 0.5000" in text


@pytest.mark.parametrize(
    ("metric", "values", "logarithmic"),
    [
        (MSE, (90.0, 3.1), False),
        (MSE, (100.0, 3.0), True),
        (MSE, (100.0, 0.0), False),  # has no logarithm
        (ACCURACY, (0.9, 0.01), False),  # a share is read from 0 to 1
    ],
)
def test_values_of_several_orders_of_magnitude_are_on_a_logarithmic_axis(
    metric, values, logarithmic, tmp_path
):
    text = plot_curves({"a": [curve(*values)]}, metric, tmp_path / "a.svg").read_text()
    assert (", logarithmic" in drawn_text(text)) == logarithmic


def drawn_text(svg: str) -> str:
    """The words of a plot: matplotlib notes each beside its outlines."""
    return " ".join(re.findall(r"<!-- (.*?) -->", svg))


def test_a_value_holds_until_the_next_evaluation_of_the_same_seed():
    runs = [curve(0.1, 0.5, step=2.0), curve(0.2, 0.4, 0.6, start=1.0, step=3.0)]
    grid, values = on_common_grid([(run.time, run.values) for run in runs])
    assert grid.tolist() == [1.0, 2.0, 4.0, 7.0]
    assert values.tolist() == [[0.1, 0.5, 0.5, 0.5], [0.2, 0.2, 0.4, 0.6]]


def test_clustering_puts_clients_that_work_together_side_by_side():
    weights, groups = two_blocks(20)
    in_order = groups[by_cluster(weights)]
    assert np.count_nonzero(np.diff(in_order)) == 1
    assert np.count_nonzero(np.diff(groups)) == 19


def test_groups_keep_the_clients_order_inside():
    assert by_group(np.array([1, 0, 1, 0]), 4).tolist() == [1, 3, 0, 2]


def test_the_colour_scale_follows_the_weights_between_clients():
    assert colour_top(np.arange(101.0)) == (99.0, "99th percentile")
    assert colour_top(np.array([0.0] * 500 + [0.25])) == (0.25, "maximum")
    assert colour_top(np.zeros(6)) == (1.0, "maximum")


# What the three kinds of colour blindness make of linear RGB (Machado et al. 2009, severity 1).
VISION = {
    "full": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [
        [0.3673, 0.8606, -0.2280],
        [0.2801, 0.6725, 0.0474],
        [-0.0118, 0.0429, 0.9689],
    ],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    parts = np.array([int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour, vision):
    light = TO_XYZ @ np.clip(np.asarray(vision) @ linear(colour), 0, 1) / [0.9505, 1.0, 1.089]
    x, y, z = np.where(light > 0.008856, np.cbrt(light), 7.787 * light + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_colour_stands_out_on_white():
    assert min(1.05 / (TO_XYZ[1] @ linear(colour) + 0.05) for colour in PALETTE) >= 3


@pytest.mark.parametrize("kind", VISION)
def test_every_pair_of_colours_differs_for_every_kind_of_vision(kind):
    seen = [lab(colour, VISION[kind]) for colour in PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda path: plot_curves({}, ACCURACY, path), "no curves"),
        (lambda path: plot_curves({"pace": []}, ACCURACY, path), "pace"),
        (
            lambda path: plot_curves({"a": [curve(0.1)]}, ACCURACY, path, x="tme"),
            "did you mean 'time'",
        ),
        (lambda path: plot_curves({"a": [curve(0.1)]}, ACCURACY, path.with_suffix(".doc")), ".png"),
        (lambda path: Curve([1.0], [1, 2], [1], [0.5]), "1, 2, 1, 1"),
        (lambda path: Curve([], [], [], []), "at least one"),
        (lambda path: Curve([1.0], [1], [1], [0.5], versions=[1, 2]), "1, 1, 1, 1, 2"),
        (
            lambda path: plot_curves({"a": [curve(0.5)]}, ACCURACY, path, x="versions"),
            "does not have it",
        ),
        (lambda path: plot_heatmaps({"a": {}}, path, x="", y=""), "run something first"),
        (lambda path: plot_staleness({}, path), "no staleness"),
        (lambda path: plot_staleness({3: 0}, path), "no staleness"),
        (lambda path: plot_graph(np.zeros((2, 3)), path), r"\(2, 3\)"),
        (lambda path: plot_graph(np.full((2, 2), np.nan), path), "not finite"),
        (lambda path: plot_graph(np.eye(3), path, [0, 1]), "3 clients"),
        (lambda path: plot_labels(np.zeros(3), path), r"\(3,\)"),
        (lambda path: plot_labels(-np.ones((3, 2)), path), "negative"),
        (lambda path: plot_labels(np.ones((3, 2)), path, [1]), "3 clients"),
    ],
)
def test_what_cannot_be_drawn_is_a_one_line_error(draw, says, tmp_path):
    with pytest.raises(PolytempoError, match=says) as error:
        draw(tmp_path / "a.png")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["accuracy", "staleness", "graph", "labels"])
def test_without_matplotlib_the_error_says_what_to_install(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PolytempoError) as error:
        DRAW[name][0](tmp_path / "a.png")
    assert 'pip install "polytempo[plots]"' in str(error.value)
    assert "\n" not in str(error.value)


def test_drawing_does_without_pyplot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    size(DRAW["staleness"][0](tmp_path / "a.png"))


def test_no_module_of_the_report_imports_matplotlib_until_it_draws():
    files = sorted(Path(polytempo.report.__file__).parent.glob("*.py"))
    text = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    at_import = [node for tree in text for node in tree.body]
    ever = [node for tree in text for node in ast.walk(tree)]

    def mention(nodes):
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        return ["matplotlib" in ast.unparse(node) for node in imports]

    assert any(mention(ever))
    assert not any(mention(at_import))


def test_a_diagnosis_is_drawn_and_nothing_to_draw_is_an_error(tmp_path):
    terms = {"noise": 0.0, "bias": 0.3, "delay": 0.02, "gradient": 0.5}
    rows = [{"updates": 10 * k, **terms} for k in range(1, 4)]
    path = plot_diagnosis(rows, [0.5, 0.3, 0.2], tmp_path / "diagnosis.png")
    assert path.stat().st_size > 10_000
    with pytest.raises(PolytempoError, match="nothing was diagnosed"):
        plot_diagnosis([], [1.0], tmp_path / "none.png")


SPLIT = [(0, 0.0, 0, 0), (0, 0.0, 1, 0), (3, 0.5, 1, 1), (4, 0.7, 2, 1), (8, 2.0, 0, 2)]


def test_strips_follow_the_changes():
    assert strips(SPLIT, 3, 8).tolist() == [
        [0, 0, 0, 0, 0, 0, 0, 2],
        [0, 0, 1, 1, 1, 1, 1, 1],
        [-1, -1, -1, 1, 1, 1, 1, 1],
    ]
    long = strips(SPLIT, 3, 80_000)  # each column: 100 updates
    assert long.shape == (3, ACROSS)
    assert [set(row.tolist()) for row in long] == [{2}, {1}, {1}]


def test_every_client_has_the_colour_of_its_cluster(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    changes = [(0, 0.0, client, client // 2) for client in range(24)]
    path = plot_clusters(changes, 24, 10, tmp_path / "clusters.png", np.arange(24) % 4)
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    there = {"#" + bytes(pixel.tolist()).hex() for pixel in np.unique(pixels, axis=0)}
    assert set(COLOURS) <= there  # and the two others are grey


def test_clusters_are_drawn_without_true_groups_too(tmp_path):
    assert size(plot_clusters(SPLIT, 3, 8, tmp_path / "clusters.png"))[0] > 1000
    with pytest.raises(PolytempoError, match="no clusters to draw"):
        plot_clusters([], 3, 8, tmp_path / "none.png")


@pytest.mark.parametrize("count", [1, 3, 12])
def test_likeness_is_drawn_a_few_times(tmp_path, count):
    matrix, groups = two_blocks()
    matrix[0, 3] = np.nan
    kept = [(10 * k, 1.0 * k, matrix) for k in range(count)]
    width, height = size(plot_similarity(kept, tmp_path / "similarity.png", groups))
    assert 200 < height < width < 1500
    assert size(plot_similarity(kept, tmp_path / "plain.png")) == (width, height)
    with pytest.raises(PolytempoError, match="no similarities to draw"):
        plot_similarity([], tmp_path / "none.png")


def test_the_best_values_of_a_share_lie_below_a_named_tick():
    from matplotlib.figure import Figure

    for best in (0.31, 0.958, 0.987, 1.0):
        axes = Figure().add_subplot()
        axes.plot([0, 1], [0.03, best])
        metric_axis(axes, ACCURACY, [0.03, best])
        low, high = axes.get_ylim()
        assert max(tick for tick in axes.get_yticks() if low <= tick <= high) >= best
        assert high <= 1.02
