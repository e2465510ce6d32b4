"""The world that settings describe: a federation, and the simulator on it at time 0."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import nn

from polytempo.core.attacks import Attack
from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import Kind, Strategy
from polytempo.data import Federation
from polytempo.experiments.config import FEDERATION, RunConfig
from polytempo.experiments.peer_settings import refuse_server_settings
from polytempo.models import Inputs, Model, build, tokenizer
from polytempo.models.pretrained import path_of
from polytempo.simulation import Engine, PeerSimulator, Simulator
from polytempo.simulation.engine import World
from polytempo.simulation.reference import Constants, PooledData
from polytempo.strategies import P2P, Majority, Pooled
from polytempo.training import Solver, find_device, make_executor, make_solver, try_model

SMALL = 1e10  # operations: below that, starting worker processes does not pay


def load_federation(config: RunConfig) -> Federation:
    """The clients and their data."""
    return Federation.load(
        config.data,
        clients=config.clients,
        partition=config.partition,
        shift=config.shift,
        test_fraction=config.test_fraction,
        validation=config.validation,
        seed=config.seed,
        data_dir=config.data_dir,
        limit=config.limit,
        tokenizer=tokenizer(config.model),
    )


class LastFederation:
    """Loads federations, and keeps the last one for the next run on the same data."""

    def __init__(self) -> None:
        self._wanted: tuple[Any, ...] | None = None
        self._federation: Federation | None = None

    def __call__(self, config: RunConfig) -> Federation:
        read_by = path_of(config.model)
        wanted = (config.seed, read_by, *(getattr(config, name) for name in FEDERATION))
        if self._federation is None or wanted != self._wanted:
            self._federation = None  # it may go before the next one comes
            self._federation = load_federation(config)
            self._wanted = wanted
        return self._federation


def make_simulator(
    config: RunConfig, federation: Federation, model: Model, strategy: Strategy | None = None
) -> Engine:
    """The world that the settings describe, at time 0."""
    attack = config.make("attack")
    if attack is not None:
        federation = poisoned(federation, attack, config.seed)
    module = build(model, Inputs.of(federation), config.seed, config.trainable)
    try_model(module, federation, config.problem_on(federation))
    strategy = strategy or config.make("strategy")
    parts = config.parts(strategy)
    try:
        backend = make_executor(
            module,
            federation,
            config.seed,
            parts,
            problem=config.problem_on(federation),
            solver=config.solver,
            device=find_device(config.device),
            name=config.backend,
            workers=config.workers,
            small=_arithmetic(config, federation, module) < SMALL,
        )
    except PolytempoError as error:
        if config.personal is None and strategy.personal:
            raise PolytempoError(
                f"{strategy.name} needs a model of which it can keep a part with each client, by "
                f"default {','.join(strategy.personal)}: {error}"
            ) from error
        raise
    world: World = {
        "task": config.task(),
        "devices": config.make("devices"),
        "network": config.make("network"),
        "dropout": config.make("dropout"),
        "parts": parts,
        "eval_every": config.evaluation_interval,
        "adapt_epochs": config.adapt_epochs,
        "adapt_always": config.adapt_always,
        "seed": config.seed,
        "storage": config.storage(),
        "backend": backend,
        "attack": attack,
    }
    return ENGINES[strategy.engine](config, federation, module, strategy, world)


def poisoned(federation: Federation, attack: Attack, seed: int) -> Federation:
    """The federation as the attackers take it: their training samples may have other targets."""
    if type(attack).targets is Attack.targets:
        return federation
    y = federation.y.clone()
    for client in attack.clients(federation.clients, seed):
        part = federation.train[client]
        y[part] = attack.targets(y[part], federation.outputs)
    return replace(federation, y=y)


def _with_server(
    config: RunConfig, federation: Federation, module: nn.Module, strategy: Strategy, world: World
) -> Engine:
    return Simulator(
        federation,
        module,
        strategy,
        concurrency=config.concurrency,
        refill=config.refill,
        schedule=config.make("lr_schedule"),
        steps=config.last_steps(),
        defence=config.make("defend"),
        check=config.check,
        diagnose=config.diagnose,
        **world,
    )


def _among_peers(
    config: RunConfig, federation: Federation, module: nn.Module, strategy: Strategy, world: World
) -> Engine:
    refuse_server_settings(config, strategy)
    peers = cast(P2P, strategy)  # whose engine this is
    return PeerSimulator(
        federation, module, peers, updates=config.updates, check=config.check, **world
    )


def _as_reference(
    config: RunConfig, federation: Federation, module: nn.Module, strategy: Strategy, world: World
) -> Engine:
    if isinstance(strategy, Majority):
        return Constants(federation, module, strategy, updates=config.updates, **world)

    frozen = {id(p): p for p in module.parameters() if not p.requires_grad}  # exists once

    def trainer_on(data: Federation) -> Solver:
        return make_solver(
            copy.deepcopy(module, dict(frozen)),
            data,
            config.seed,
            config.parts(strategy),
            find_device(config.device),
            config.problem_on(federation),
            name=config.solver,
        )[0]

    pooled = cast(Pooled, strategy)
    return PooledData(
        federation, module, pooled, updates=config.updates, trainer_on=trainer_on, **world
    )


Build = Callable[[RunConfig, Federation, nn.Module, Strategy, World], Engine]
ENGINES: dict[Kind, Build] = {
    "server": _with_server,
    "peers": _among_peers,
    "reference": _as_reference,
}


def _arithmetic(config: RunConfig, federation: Federation, module: nn.Module) -> float:
    """Roughly the floating-point operations of the run's training (convolutions need more)."""
    samples = sum(config.task().work(size) for size in federation.samples) / federation.clients
    return 6 * config.updates * samples * sum(p.numel() for p in module.parameters())
