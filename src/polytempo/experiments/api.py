"""What Python programs call: `polytempo.simulate`, `compare`, `sweep`, `resume`, `load`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import Strategy
from polytempo.data import Federation
from polytempo.experiments import compare as comparisons
from polytempo.experiments import run as runs
from polytempo.experiments import search as searches
from polytempo.experiments import sweep as sweeps
from polytempo.experiments.callbacks import Callback
from polytempo.experiments.compare import Comparison
from polytempo.experiments.config import FEDERATION
from polytempo.experiments.jobs import Watch
from polytempo.experiments.progress import RunProgress
from polytempo.experiments.result import RunResult
from polytempo.experiments.result_folder import read_result
from polytempo.experiments.run import in_folder, in_memory
from polytempo.experiments.run_settings import described
from polytempo.experiments.sweep import Sweep
from polytempo.experiments.world import load_federation
from polytempo.models import Model
from polytempo.report.intervals import Interval
from polytempo.strategies import STRATEGIES


def simulate(
    federation: Federation | str,
    *,
    model: Model = "auto",
    strategy: str | Strategy = "pace",
    updates: int = 400,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> RunResult:
    """Run a strategy on a federation, on a simulated clock.

    `federation` may also be the name of a data set: then its settings (`clients`, `partition`, ...)
    are among the others, and the folder is one that the command `polytempo` can resume.
    `model` is a name, an `nn.Module` factory, or `module:factory`; `settings` are those of
    `RunConfig` (`lr`, `epochs`, `concurrency`, `seed`, ...). With `out`, a folder is written. With
    `resume`, the run in this folder, if any, continues from its checkpoint, bit for bit as if
    it had never stopped: call it as before, optionally for more updates. (P2P cannot be extended:
    its learning rates depend on the number of updates.) Data, strategy and settings must be those
    of the checkpoint. Settings left open are as they were: a run that is extended keeps its
    `eval_every`, and equals one that had it, and all the updates, from the beginning.

    `callbacks`: are told of all that happens, and may end the run (see docs/callbacks.md).
    `progress`: whether there is a bar (None: in a terminal or a notebook).
    """
    chosen = copy.copy(STRATEGIES.create(strategy))  # the caller may use it again
    _given(federation, settings, "simulate")
    if "events" in settings and not out:
        raise PolytempoError("simulate: events is not a setting here; it needs out=FOLDER")
    data = None if isinstance(federation, str) else federation
    if isinstance(federation, str):
        settings["data"] = federation
    config = described({"updates": updates, **settings}, "simulate", data, model, chosen)
    federation = load_federation(config) if isinstance(federation, str) else federation
    with RunProgress(quiet=None if progress is None else not progress) as bars:
        told = [bars.watch(str(config.strategy_table["name"])), *callbacks]
        if out is None:
            if resume:
                raise PolytempoError(
                    "simulate: resume=True needs out=FOLDER, the folder of the run"
                )
            return in_memory(config, federation, model, chosen, told)
        folder = Path(out).expanduser()
        return in_folder(config, folder, federation, model, chosen, told, resume)


def resume(
    folder: str | Path,
    federation: Federation | None = None,
    *,
    updates: int | None = None,
    workers: int | None = None,
    plots: str | None = None,
    model: Model | None = None,
    strategy: Strategy | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> RunResult:
    """Resume the run in a folder from its checkpoint, optionally for more updates: bit for bit as
    if it had never stopped. `plots`: draw them as "pdf" or "svg", too.

    What the folder does not hold must be given as it was: a `federation` of your own data, a
    `model` or a `strategy` that cannot be imported by its name, `callbacks`.
    """
    place = Path(folder).expanduser()
    with RunProgress(quiet=None if progress is None else not progress) as bars:
        return runs.resume(
            place,
            updates=updates,
            workers=workers,
            plots=plots,
            callbacks=[bars.watch(place.name), *callbacks],
            federation=federation,
            model=model,
            strategy=copy.copy(strategy),
        )


def load(
    folder: str | Path,
    federation: Federation | None = None,
    *,
    model: Model | None = None,
    strategy: Strategy | None = None,
) -> RunResult:
    """The result in the folder of a run: figures, history, clients and, from its checkpoint, the
    models. These need the data and the model: those that the folder does not hold (your own) must
    be given."""
    place = Path(folder).expanduser()
    result = read_result(place)
    result.restore = lambda: runs.restored(place, federation, model, copy.copy(strategy))
    return result


def compare(
    federation: Federation | str,
    strategies: Sequence[str | Strategy],
    *,
    model: Model = "auto",
    updates: int = 400,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    target: float | str | None = None,
    fine_tuned: bool = False,
    references: bool = False,
    fairness: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Comparison:
    """Run several strategies on the same federation, devices and seeds.

    `federation`, `model` and `settings` are as for `simulate`; a federation that is named is
    divided anew for every seed, one that is given stays as it is. With `out`, a folder is written,
    and what it holds already is not run again: call it again after an interruption, or with more
    strategies or seeds. `target`: the value of the metric, or the strategy, that times are compared
    at. `fine_tuned`, `references`, `fairness`: further rows and columns, as of `polytempo compare`.
    `callbacks`: are told of one run after the other.
    """
    named, given = _objects(federation, model, settings, "compare")
    with RunProgress(quiet=None if progress is None else not progress) as bars:
        return comparisons.compare(
            strategies,
            {"updates": updates, **named},
            None if out is None else Path(out).expanduser(),
            seeds=range(seeds) if isinstance(seeds, int) else seeds,
            target=None if target is None else str(target),
            fine_tuned=fine_tuned,
            references=references,
            fairness=fairness,
            watch=lambda label, seed: bars.watch(f"{label} seed {seed}"),
            callbacks=callbacks,
            **given,
        )


def sweep(
    federation: Federation | str,
    grid: Mapping[str, Sequence[Any]],
    *,
    search: int | None = None,
    model: Model = "auto",
    updates: int = 400,
    seeds: int | Sequence[int] = 1,
    baseline: Mapping[str, Any] | None = None,
    figure: str = "handed",
    interval: Interval = "std",
    out: str | Path | None = None,
    jobs: int = 1,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Sweep:
    """Run every combination of the grid's values with every seed; or `search` them: so many trials,
    then the best point with every seed.

    `grid`: values by setting, such as `{"lr": [0.01, 0.05], "strategy": ["pace", "fedbuff"]}`;
    options of a setting are `"strategy.alpha"`. For a search it may have ranges, written
    `{"lr": "0.001..0.1:log"}`; data must be given by name, because trials are judged by a part of
    the training samples (`validation`, 0.2 if not given). The trials are in `trials` of the result.

    `federation`, `model`, `settings` and `out` are as
    for `compare`. `baseline`: values that every point is tested against, such as
    `{"strategy": "fedbuff"}`; `figure`: what is tested, or searched by (handed, best, adapted,
    worst10). `jobs`: runs at once, each in a process, if data and model are given by name, there is
    a folder, and there are no `callbacks`.
    """
    named, given = _objects(federation, model, settings, "sweep")
    if jobs > 1:
        named.setdefault("workers", 1)

    @contextmanager
    def bars(updates: int) -> Iterator[Watch]:
        quiet = None if progress is None else not progress
        with RunProgress(quiet=quiet, updates=updates) as found:
            yield found.bar

    settings, folder = (
        {"updates": updates, **named},
        None if out is None else Path(out).expanduser(),
    )
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    how: sweeps.How = {
        "figure": figure,
        "interval": interval,
        "jobs": jobs,
        "progress": bars,
        "callbacks": callbacks,
    }
    if search is None:
        return sweeps.sweep(grid, settings, folder, seeds=chosen, baseline=baseline, **how, **given)
    if baseline is not None or given["federation"] is not None:
        what = "a baseline" if baseline is not None else "a federation: name the data"
        raise PolytempoError(f"sweep: a search cannot be given {what}")
    return searches.search(
        grid, search, settings, folder, seeds=chosen, **how, model=given["model"]
    )


class _Objects(TypedDict):
    federation: Federation | None
    model: Model | None


def _objects(
    federation: Federation | str, model: Model, settings: dict[str, Any], source: str
) -> tuple[dict[str, Any], _Objects]:
    """Settings, as far as names say it, and the objects that they cannot say."""
    if "seed" in settings:
        raise PolytempoError(f"{source}: seed is not a setting here; give seeds=[...]")
    _given(federation, settings, source)
    named, given = dict(settings), _Objects(federation=None, model=None)
    if isinstance(federation, str):
        named["data"] = federation
    else:
        given["federation"] = federation
    if isinstance(model, str | Mapping):
        named["model"] = model
    else:
        given["model"] = model
    return named, given


def _given(federation: object, settings: Mapping[str, Any], source: str) -> None:
    """Data that are not named must be a federation, and settings must not say anything of them."""
    if isinstance(federation, str):
        return
    if not isinstance(federation, Federation):
        raise PolytempoError(
            f"{source}: expected a federation or the name of a data set, got "
            f"{type(federation).__name__}; make one with Federation.from_arrays([(X, y), ...])"
        )
    refuse_data(settings, source)


def refuse_data(settings: Mapping[str, Any], source: str) -> None:
    """The data are there: settings must not say anything about them."""
    for name in FEDERATION:
        if name in settings:
            raise PolytempoError(
                f"{source}: {name} is not a setting here; the federation is already given"
            )
