"""What a server tells a strategy when it sends a model, for tests that drive one by hand."""

from polytempo.core.messages import Dispatch
from polytempo.core.strategy import Strategy


def dispatch(strategy: Strategy, client: int) -> None:
    strategy.dispatched(Dispatch(client, 0, strategy.model_for(client), strategy.task(client)))
