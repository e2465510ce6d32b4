"""Settings of a run that peers have no use for: they are refused, with what there is instead.

Each setting of `RunConfig`, other than `strategy`, is in one of the four groups below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import Strategy
from polytempo.experiments.config import FEDERATION, RunConfig, make_config
from polytempo.strategies.p2p import P2P

PEER_SETTINGS = (  # those that a peer on a network has options for
    *FEDERATION,
    *("model", "problem", "buffers", "personal", "freeze", "trainable", "updates", "messages"),
    *("batch_size", "lr", "optimizer", "momentum", "weight_decay", "eval_every", "solver"),
    *("device", "seed"),
)
WORLD = (  # a simulated world, and what is measured in it: on a network, reality takes its place
    *("devices", "network", "dropout", "concurrency", "backend", "workers"),
    *("adapt_epochs", "adapt_always", "check", "events", "plots"),
)
LOCAL = "a local round has p2p:local_steps=5 mini-batch steps"
SERVER = {  # what p2p has instead of that which a server asks for or keeps
    "epochs": LOCAL,
    "steps": LOCAL,
    "keep_optimizer": "a peer always keeps the moments of its optimizer",
    "lr_schedule": "set p2p:milestones=[0.5,0.75],gamma=0.1",
    "refill": "all peers train all the time",
    "bank": "every peer holds its own model",
    "diagnose": "there are no steps of a server to measure",
    **dict.fromkeys(("dp", "compress", "attack", "defend"), "models go from peer to peer"),
}
END = "a peer ends at its target (--updates or p2p:target=500) or budget (--messages)"
SIMULATED = {  # what peers on a network have instead
    "versions": END,
    "until": END,
    "stop": END,
    "log": "every peer writes its own history",
}
# Of a comparison's settings, which are the same for all strategies: meant for those with a server.
NOT_SHARED = ("epochs", "steps", "keep_optimizer", "bank")


def refuse_server_settings(config: RunConfig, strategy: Strategy) -> None:
    """What is about a server must not be set for a run without one."""
    why = "is for strategies with a server, but p2p has no server"
    refuse(config, SERVER, why, refill=strategy.refill)


def networked(config: RunConfig) -> P2P:
    """The strategy of peers on a network, if the settings are for such."""
    strategy = config.make("strategy")
    if strategy.engine != "peers":
        name = config.strategy_table["name"]
        raise PolytempoError(f"peers on a network need the strategy p2p, not {name}")
    refuse_server_settings(config, strategy)
    refuse(config, SIMULATED, "is for simulations, not for peers on a network")
    if strategy.score_fusions:
        raise PolytempoError(
            "p2p:score_fusions=true is for simulations, not for peers on a network: omit it"
        )
    return cast(P2P, strategy)


def of_comparison(config: RunConfig, strategy: Strategy | None = None) -> RunConfig:
    """The settings of one strategy among several that are given the same: those that mean something
    to the others only are as if they had not been given."""
    if (strategy or config.make("strategy")).engine != "peers":
        return config
    defaults = make_config({})
    return config.model_copy(update={name: getattr(defaults, name) for name in NOT_SHARED})


def refuse(config: RunConfig, names: Mapping[str, str], why: str, **also: str) -> None:
    """Settings of these names must have their default, or the value that `also` allows."""
    defaults = make_config({})
    for name, instead in names.items():
        value = getattr(config, name)
        if value not in (getattr(defaults, name), also.get(name)):
            raise PolytempoError(f"{name} = {value!r} {why}: {instead}; omit {name}")
