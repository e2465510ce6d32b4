"""What all plots share: colours, type, and how a figure becomes a file.

Matplotlib is an extra, so it is imported only when something is drawn. Figures are made without
pyplot, and the user's own matplotlib settings neither change our files nor are changed by them.
Its objects are typed `Any`: its stubs differ from one version to the next, and may be absent.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import MetricInfo
from polytempo.files import replacing

INK, QUIET, GRID = "#1f2328", "#59636e", "#e4e7eb"
# Chosen to differ from each other for every kind of colour vision, and to stand out on white. Lines
# beyond the sixth repeat the colours with other dashes.
PALETTE = ("#0072b2", "#c44e00", "#5b8f4a", "#d0609a", "#1f2328", "#662211")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 3)))

_ORDERS = 30.0  # between the largest and the smallest value: more, and the scale is logarithmic
_TICKS = 6  # intervals of an axis of shares, at most
_MANY_DECADES = 4  # from here on only powers of ten are named

_STYLE = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.labelsize": 10.0,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.linewidth": 0.8,
    "svg.hashsalt": "polytempo",
    "pdf.fonttype": 42,  # TrueType, embedded: what publishers ask for
}
# PDF files are for papers: what is 8 inches wide on a screen is as wide as a column of text, and
# its words as large as in a caption.
_SIZE, _WORDS, _LINES = 3.5 / 8.0, 0.7, 0.6
_LETTER = 0.55  # width of a letter for its height
# What a file would otherwise say about when and by which version it was made.
_METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@contextmanager
def canvas(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """An empty figure of that size in inches, which is saved at `path` when the block ends (as
    PDF: smaller, as papers have it)."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PolytempoError(
            'plots need matplotlib, which is not installed; run: pip install "polytempo[plots]"'
        ) from error
    target = Path(path)
    if target.suffix.lower() not in _METADATA:
        raise PolytempoError(
            f"cannot draw into {str(path)!r}; end the name in {', '.join(sorted(_METADATA))}"
        )
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = matplotlib.rcParams
        settings.update(_STYLE)
        paper = target.suffix.lower() == ".pdf"
        size = (_SIZE * width, _SIZE * height) if paper else (width, height)
        figure = Figure(figsize=size, dpi=120, layout="constrained", facecolor="white")
        yield figure
        if paper:
            _for_a_paper(figure)
        target.parent.mkdir(parents=True, exist_ok=True)
        metadata = _METADATA[target.suffix.lower()]
        with replacing(target) as partial:
            figure.savefig(partial, dpi=120, metadata=metadata, format=target.suffix[1:].lower())


def _for_a_paper(figure: Any) -> None:
    """Words and lines in proportion; titles and labels longer than their axes take two lines."""
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    across, down = figure.get_size_inches()
    for text in figure.findobj(Text):
        text.set_fontsize(_WORDS * text.get_fontsize())
        inches = across if text.axes is None else across * text.axes.get_position().width
        if text.get_rotation():
            inches = 0.75 * down
        letters = int(72 * inches / (_LETTER * text.get_fontsize()))
        if len(text.get_text()) > letters > 0:
            text.set_text(textwrap.fill(text.get_text(), letters))
    for line in figure.findobj(Line2D):
        line.set_linewidth(_LINES * line.get_linewidth())
        line.set_markersize(_LINES * line.get_markersize())


def in_formats(draw: Callable[..., Path], path: Path, plots: str) -> Path:
    """Draw a plot as PNG, which reports hold, and beside it in the format `plots`; the PNG's path.
    `draw` is called with the path alone."""
    if plots != "png":
        draw(path=path.with_suffix(f".{plots}"))
    return draw(path=path)


def metric_axis(axes: Any, metric: MetricInfo, values: Iterable[float]) -> None:
    """The y axis speaks of the metric: its name, shares in per cent, and logarithmic where the
    values drawn differ by orders of magnitude, as the perplexity of an untrained model does."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    label = metric.label + (f" ({metric.direction})" if metric.better == "lower" else "")
    finite = [value for value in values if math.isfinite(value)]
    if metric.share:
        low, high = axes.get_ylim()
        ticks = MaxNLocator(_TICKS, steps=(1, 2, 5, 10)).tick_values(low, high)
        named = min((tick for tick in ticks if tick >= max(finite, default=0.0)), default=high)
        top = min(1.02, max(high, 1.01 * named))
        axes.set_ylim(top=top)  # a tick is at the best value or above it
        axes.set_yticks([tick for tick in ticks if low <= tick <= top])
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    else:
        if finite and min(finite) > 0 and max(finite) > _ORDERS * min(finite):
            axes.set_yscale("log")
            decades = math.log10(max(finite) / min(finite))
            subs = (1.0, 2.0, 5.0) if decades < _MANY_DECADES else (1.0,)
            axes.yaxis.set_major_locator(LogLocator(subs=subs))
            axes.yaxis.set_minor_locator(NullLocator())
            label += ", logarithmic"
        axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_ylabel(label)


def bare(axes: Any, grid: str | None = "y") -> None:
    """Leave only what is read: no frame, and light grid lines behind the data."""
    for side in ("top", "right", "left") if grid == "y" else ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    if grid == "y":
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    axes.tick_params(length=0 if grid is None else 3)
    axes.tick_params(axis="y", length=0)
