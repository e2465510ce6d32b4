"""What is known of a metric without its data: its name, its direction, and how it is written.

Tables, plots and results read from a folder need no more than this; how the figure is computed from
a model's outputs is the business of `training/problem.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from polytempo.core.errors import PolytempoError

Direction = Literal["higher", "lower"]
RESERVED = (  # columns of a history, keys of result.json and attributes of a result beside metrics
    *("time", "updates", "version", "messages", "dispatch", "upload", "multicast", "exchange"),
    *("announce", "claim", "peer", "iteration", "factor", "iterations", "fusion_effect"),
    *("announcements", "fusions", "seconds", "id", "run", "target", "client", "failed"),
    *("strategy", "options", "seed", "complete", "federation", "metric", "simulated_time"),
    *("clusters", "unclustered", "cluster_purity", "cluster_ari", "diagnosis", "peers", "time_to"),
    *("convergence_time", "arrivals", "staleness_mean", "staleness", "parameters"),
    *("wall_seconds", "backend", "trained_in_vain", "peak_rss_mb", "fingerprint"),
    *("summary", "history", "simulator", "interrupted", "value", "adapted", "final", "curve"),
    *("plot", "model", "fine_tuned", "adaptation_time", "clock", "seconds_taken", "extensions"),
    *("all_extensions", "clients", "rows", "name", "group", "samples", "tested", "slowdown"),
    *("updates", "restore", "save_model", "frame", "attack", "privacy", "defence", "stopped"),
)
_SMALL, _LARGE = 1e-4, 1e7  # beyond these, numbers are written with an exponent


@dataclass(frozen=True)
class MetricInfo:
    """name: in results and on the command line; label: on axes and in captions.
    better: the direction; share: whether it lies in 0..1 and is shown in per cent.
    """

    name: str
    label: str
    better: Direction
    share: bool

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in RESERVED:
            why = "means something else in results" if self.name in RESERVED else "is not a word"
            raise PolytempoError(
                f"invalid metric name: {self.name!r} {why}; use letters, digits and underscores, "
                "as in macro_f1"
            )

    @property
    def about(self) -> dict[str, Any]:
        """For result.json; `MetricInfo(**about)` is the metric again."""
        return {
            "name": self.name,
            "label": self.label,
            "better": self.better,
            "share": self.share,
        }

    @property
    def heading(self) -> str:
        """The label as the beginning of a sentence."""
        return self.label[:1].upper() + self.label[1:]

    @property
    def direction(self) -> str:
        return f"{self.better} is better"

    def reaches(self, value: float, target: float) -> bool:
        """Whether the value is as good as the target, or better."""
        return value >= target if self.better == "higher" else value <= target

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.better == "higher" else min(values)

    def worst(self, values: Iterable[float]) -> float:
        return min(values) if self.better == "higher" else max(values)

    def text(self, value: float | None, spread: float | None = None) -> str:
        """The value as people read it: a share in per cent, anything else to four digits; with
        the spread over several runs, if there is one."""
        if value is None or math.isnan(value):
            return "-"
        scale, unit = (100.0, "%") if self.share else (1.0, "")
        size = abs(value)
        if self.share:
            form = ",.1f"
        elif not math.isfinite(size) or size >= _LARGE or 0 < size < _SMALL:
            form = ".4g"
        else:
            form = f",.{max(0, 3 - math.floor(math.log10(size))) if size else 3}f"
        text = f"{scale * value:{form}}"
        return text + (unit if spread is None else f" ± {scale * spread:{form}}{unit}")


def finite(value: Any) -> Any:
    """The value as JSON knows it: None in the place of infinity (which is what the perplexity of a
    model gone astray may be) and NaN, in lists and dictionaries too."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


LOSS = MetricInfo("loss", "loss", "lower", False)
ACCURACY = MetricInfo("accuracy", "accuracy", "higher", True)  # what papers are compared by
