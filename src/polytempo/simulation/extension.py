"""What can be attached to a run: it watches, keeps what it has seen, and shows it afterwards.

An engine has any number of extensions. It tells each of what happens, asks each for figures, tables
and plots, and saves and restores each along with itself; it knows nothing else about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from polytempo.core.events import Event
from polytempo.core.strategy import State
from polytempo.training import Score

Row = Mapping[str, Any]
Key = tuple[float, int, int]  # time, priority, counter: what the queue is ordered by


class Extension:
    """Base of all extensions: override what you need. Nothing here may touch the run."""

    name: ClassVar[str]  # by which a checkpoint knows it

    # -- what happens --------------------------------------------------------------------------

    def started(self) -> None:
        """The run has begun, and nothing has arrived yet. Not called when it is resumed."""

    def popped(self, key: Key) -> None:
        """The queue gave out the item of this key."""

    def happened(self, event: Event) -> None:
        """Every event, in order."""

    def evaluated(self, scores: Mapping[int, Score]) -> dict[str, Any]:
        """The clients' models were tested: columns for this row of the history."""
        return {}

    def adapted(self, scores: Mapping[int, Score]) -> None:
        """So were the models that clients have fine-tuned since."""

    # -- what there is to show -----------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """For the run's summary."""
        return {}

    def tables(self) -> dict[str, Sequence[Row]]:
        """By the name of the file, without .csv; one without rows is not written."""
        return {}

    def arrays(self) -> dict[str, dict[str, Any]]:
        """Numpy arrays by name, by the name of the file, without .npz."""
        return {}

    def plots(self) -> dict[str, dict[str, Any]]:
        """By the name of the plot: what the function that draws it is called with (see `PLOTS` in
        `experiments/result_folder.py`)."""
        return {}

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> State:
        """What it must remember."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`."""
