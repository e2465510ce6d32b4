"""What privacy, attacks, defences and compression do to accuracy: the tables of docs/privacy.md.

    python benchmarks/guards.py dp
    python benchmarks/guards.py attacks sign-flip:times=3     # or another; "none": defences alone
    python benchmarks/guards.py compression

One seed; 20 clients on digits, labels by Dirichlet(0.5). Every row is what
`polytempo run` does with the options that it names.
"""

# ruff: noqa: T201  (it speaks to whoever runs it)

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import polytempo as pt

STRATEGIES = ("fedavg", "fedbuff", "pace", "descant")
PRIVATE = ("fedavg", "fedbuff", "pace", "descant:hold_out=0")  # whose clients upload one vector
NOISES = (0.05, 0.2, 0.8)
SHARES = (0.1, 0.3)
DEFENCES = (None, "norm:times=1.5", "trimmed", "direction")
PACKINGS = (None, "int8", "topk:0.1", "topk:0.01")
USUAL: dict[str, Any] = {"lr": 0.05, "adapt_epochs": 0, "backend": "serial", "seed": 0}


def digits() -> pt.Federation:
    return pt.Federation.load("digits", clients=20, partition=pt.partition.Dirichlet(0.5), seed=0)


def run(federation: pt.Federation, **settings: Any) -> pt.RunResult | None:
    """None if the training diverged."""
    print(".", end="", file=sys.stderr, flush=True)
    try:
        return pt.simulate(federation, **{**USUAL, **settings})
    except pt.PolytempoError as error:
        if "diverged" not in str(error) and "NaN" not in str(error):
            raise
        return None


def percent(result: pt.RunResult | None) -> str:
    return "diverged" if result is None else f"{100 * result.accuracy:.1f}"


def dp() -> Iterator[Sequence[str]]:
    """A small model: with noise on every number, the smaller the better."""
    federation = digits()
    yield "noise", "epsilon, most", "epsilon, median", *PRIVATE
    for noise in (None, 0.0, *NOISES):
        spec = None if noise is None else f"clip=1,noise={noise}"
        found = [
            run(federation, strategy=name, model="linear", updates=400, dp=spec) for name in PRIVATE
        ]
        spent = found[1].privacy if found[1] is not None else None
        shown = ["-", "-"]
        if spent is not None and spent["epsilon_max"] is not None:
            shown = [f"{spent[f'epsilon_{what}']:,.0f}" for what in ("max", "median")]
        label = "none" if noise is None else "clipping alone" if not noise else f"{noise:g}"
        yield label, *shown, *map(percent, found)


def attacks(attack: str) -> Iterator[Sequence[str]]:
    federation = digits()
    yield "attack", "share", "defence", *STRATEGIES
    for share in (0.0,) if attack == "none" else SHARES:
        spec = f"{attack}{',' if '=' in attack else ':'}share={share}" if share else None
        for defence in DEFENCES:
            found = [
                run(federation, strategy=name, updates=200, attack=spec, defend=defence)
                for name in STRATEGIES
            ]
            yield attack, f"{share:.0%}", defence or "none", *map(percent, found)


def compression() -> Iterator[Sequence[str]]:
    """Over slow links (0.5 to 2 Mbit/s): fewer bytes are less time, too."""
    federation = digits()
    yield "compression", "KB an upload", *(f"{s}{w}" for s in STRATEGIES for w in ("", ", time"))
    for spec in PACKINGS:
        found = [
            run(
                federation,
                strategy=name,
                compress=spec,
                network="uniform:low=0.5,high=2",
                updates=400,
            )
            for name in STRATEGIES
        ]
        first = next(result for result in found if result is not None)
        size = first.messages["upload_bytes"] / first.messages["upload"] / 1e3
        shown = [(percent(r), "-" if r is None else f"{r.simulated_time:,.0f} s") for r in found]
        yield spec or "none", f"{size:,.1f}", *(text for pair in shown for text in pair)


def main() -> None:
    parts: dict[str, Any] = {f.__name__: f for f in (dp, attacks, compression)}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=parts)
    parser.add_argument("attack", nargs="?", help="with attacks: which", default="sign-flip")
    given = parser.parse_args()
    rows = attacks(given.attack) if given.part == "attacks" else parts[given.part]()
    for number, row in enumerate(rows):
        print("| " + " | ".join(row) + " |", flush=True)
        if not number:
            print("|" + "---|" * len(row))


if __name__ == "__main__":
    main()
