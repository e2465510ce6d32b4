#!/usr/bin/env python3
"""The picture of a contest: milliseconds per client training, a panel for each batch size.

    python benchmarks/picture.py RESULTS.json [RESULTS.json] --out speed.png

Takes what `peers.py` has written. Of a contestant that is in several files (the plain loop with one
thread and with two), the fastest counts. Needs matplotlib (`pip install "polytempo[plots]"`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, OTHERS = "#d95f02", "#8da0b5"


def fastest(results: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """By batch size: the milliseconds of each contestant, by its title."""
    found: dict[int, dict[str, float]] = {}
    for result in results:
        for setting in result["settings"]:
            bars = found.setdefault(setting["batch"], {})
            for name, figures in setting["medians"].items():
                title = result["contestants"][name]["title"]
                bars[title] = min(1e3 * figures["wall"], bars.get(title, float("inf")))
    return found


def draw(found: Mapping[int, Mapping[str, float]], out: Path) -> None:
    figure, panels = plt.subplots(1, len(found), figsize=(9, 3), squeeze=False)
    for axes, (batch, bars) in zip(panels[0], found.items(), strict=True):
        titles = sorted(bars, key=lambda title: -bars[title])
        colours = [OURS if title == "Polytempo" else OTHERS for title in titles]
        drawn = axes.barh(titles, [bars[title] for title in titles], color=colours)
        axes.bar_label(drawn, fmt="%.3g", padding=3)
        axes.set(title=f"batches of {batch}", xlabel="milliseconds per client training")
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=130)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The picture of a contest.")
    parser.add_argument("results", type=Path, nargs="+", help="what peers.py has written")
    parser.add_argument("--out", type=Path, default=Path("speed.png"), help="the image")
    chosen = parser.parse_args(given)
    draw(fastest(json.loads(file.read_text()) for file in chosen.results), chosen.out)


if __name__ == "__main__":
    main()
