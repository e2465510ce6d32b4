"""How long clients in training have been waited for, and who is waited for in vain."""

from __future__ import annotations

import math
from collections.abc import Iterator

from polytempo.core.strategy import State
from polytempo.nodes.plan import Patience

PAST = 5  # trainings of a client by which its deadline is set


class Deadlines:
    """Of every client in training, when it began. `late` says who has missed its deadline; to give
    it up is a decision that is written down elsewhere."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.since: dict[int, float] = {}  # by client in training: when it was started
        self.past: dict[int, list[float]] = {}  # by client: seconds of its last trainings
        self.longest = 0.0  # of all trainings
        self.missed: dict[int, int] = {}  # by client: deadlines in a row, while it was there
        # By client that is not connected: since when. Not saved: whoever is not named here has been
        # away since the server was started, at `_up`.
        self._away: dict[int, float] = {}
        self._up = 0.0

    def restart(self, now: float) -> None:
        """The server is up again; the clients could do nothing meanwhile."""
        self.since = dict.fromkeys(self.since, now)
        self._away, self._up = {}, now

    def away(self, client: int, now: float) -> None:
        """The client is not connected any more."""
        self._away[client] = now

    def begin(self, client: int, now: float) -> None:
        self.since[client] = now

    def end(self, client: int) -> None:
        """Whatever has come of its training."""
        del self.since[client]

    def folded(self, client: int, now: float) -> None:
        """Its training has come to a good end."""
        seconds = now - self.since[client]
        self.longest = max(self.longest, seconds)
        self.past[client] = [*self.past.get(client, ()), seconds][-PAST:]
        self.missed.pop(client, None)

    def miss(self, client: int) -> None:
        """It was connected, and took too long."""
        self.missed[client] = self.missed.get(client, 0) + 1

    def seconds(self, client: int) -> float:
        """That this client may train before it is given up."""
        own, missed = self.past.get(client, ()), self.missed.get(client, 0)
        return self._patience.seconds(own, self.longest, missed)

    def late(self, now: float) -> Iterator[int]:
        """Clients that take too long."""
        return (
            client for client, since in self.since.items() if now - since > self.seconds(client)
        )

    def gone(self, client: int, now: float) -> bool:
        """Whether this client, which is not connected, has been away for too long for others to go
        without its slot."""
        since = max(self.since[client], self._away.get(client, self._up))
        return now - since > self._patience.away and not math.isinf(self.seconds(client))

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> State:
        return {
            "since": [list(pair) for pair in self.since.items()],
            "past": [[client, list(seconds)] for client, seconds in self.past.items()],
            "longest": self.longest,
            "missed": [list(pair) for pair in self.missed.items()],
        }

    def load(self, state: State) -> None:
        self.since, self.missed = dict(state["since"]), dict(state["missed"])
        self.past = {client: list(found) for client, found in state["past"]}
        self.longest = state["longest"]
