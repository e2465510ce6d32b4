"""Ten real peers, killed and restarted while they learn; afterwards their logs are checked.

    make chaos        or: python tests/network/chaos.py --seconds 60 --peers 10 --out FOLDER

A peer is killed with SIGKILL every few seconds and started again a little later. `check` reads what
all incarnations of all peers wrote, and says what should not have happened.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from polytempo.core.rng import rng
from polytempo.experiments.config import make_config
from polytempo.experiments.peer_group import Group

CLAIM, EXCHANGE, SLACK = 3.0, 20.0, 10.0  # seconds; the slack is for a busy machine
LONGEST = {"Claiming": CLAIM, "Exchanging": EXCHANGE, "Granted": CLAIM + EXCHANGE}
LAST_SECONDS = 10.0  # in which every survivor must have got on


def read(folder: Path) -> dict[str, list[dict]]:
    """The events of each peer in their order; half a line, left by a kill, is not counted."""
    return {
        file.parent.name: [
            json.loads(line) for line in file.read_text().split("\n") if line.endswith("}")
        ]
        for file in sorted(folder.glob("*/events.jsonl"))
    }


def check(logs: dict[str, list[dict]], end: float | None = None) -> list[str]:
    """What went wrong. `end`: when the peers were asked to stop; survivors trained till then."""
    return [
        *grants_and_fusions(logs),
        *phases(logs),
        *progress(logs, end),
    ]


def grants_and_fusions(logs):
    """One grant a ticket; one fusion a ticket and side, by the pair alone; a claimer that has
    fused has an owner that has taken its model in; and what was taken in is fused, or discarded by
    a peer that trains no more."""
    grants, pairings, fusions = defaultdict(list), defaultdict(list), defaultdict(list)
    discarded, ended = set(), set()
    for peer, events in logs.items():
        for event in events:
            if event["event"] == "discarded":
                discarded.add((tuple(event["token"]), event["side"]))
                ended.add((peer, event["incarnation"]))
            if event["event"] == "fused" and (peer, event["incarnation"]) in ended:
                yield f"{peer} fused after it had discarded a model as one that trains no more"
            if event["event"] in ("granted", "paired", "fused"):
                token, by = tuple(event["token"]), (peer, event["incarnation"])
                kinds = {"granted": grants, "paired": pairings, "fused": fusions}
                key = token if event["event"] == "granted" else (token, event["side"])
                kinds[event["event"]][key].append((by, tuple(event.get("to", ()))))
    for token, found in grants.items():
        if len(found) > 1:
            yield f"ticket {token} was granted {len(found)} times: {found}"
        if found[0][0] != token[:2]:
            yield f"ticket {token} was granted by {found[0][0]}, who does not own it"
    for name, table in (("paired", pairings), ("fused", fusions)):
        for (token, side), found in table.items():
            if len(found) > 1:
                yield f"ticket {token} was {name} {len(found)} times by the {side}: {found}"
    for token, side in fusions:
        if (token, side) not in pairings:
            yield f"ticket {token} was fused by the {side}, who was never paired"
    for (token, side), [(by, _), *_] in pairings.items():
        claimer = by if side == "claimer" else None
        if token not in grants:
            yield f"ticket {token} was paired by the {side}, but never granted"
        elif claimer and grants[token][0][1] != claimer:
            yield f"ticket {token} was granted to {grants[token][0][1]} and paired by {claimer}"
        if side == "claimer" and (token, "owner") not in pairings:
            yield f"ticket {token}: its claimer {by} fused, its owner did not"
    for (token, side), [(by, _), *_] in pairings.items():
        last = [e["event"] for e in logs[by[0]] if e["incarnation"] == by[1]][-1:]
        settled = (token, side) in fusions or (token, side) in discarded
        if not settled and last == ["stopped"]:  # it was not killed meanwhile
            yield f"ticket {token}: {by} took a model in as {side} and never fused it"


def phases(logs):
    """Nobody claims, waits for a claimer or for an answer longer than the time-outs."""
    for peer, events in logs.items():
        since = None
        for event in events:
            if since and (event["incarnation"] != since["incarnation"]):
                since = None  # killed in that phase
            if since and event["time"] - since["time"] > LONGEST[since["phase"]] + SLACK:
                lasted = event["time"] - since["time"]
                yield f"{peer} was {since['phase']} for {lasted:.1f} s, until {event['event']}"
                since = None
            if event["event"] == "phase":
                since = event if event["phase"] in LONGEST else None


def progress(logs, end):
    """Iterations only grow while a peer lives; a restart begins where it saved last, not before;
    those that lived at the end had got on in the last seconds."""
    for peer, events in logs.items():
        saved, now, incarnation = 0, 0, None
        for event in events:
            if event["incarnation"] != incarnation:
                if incarnation is not None and event["incarnation"] < incarnation:
                    yield f"{peer} came back as {event['incarnation']}, after {incarnation}"
                if event["iteration"] < saved:
                    yield f"{peer} restarted at {event['iteration']}, having saved {saved}"
                incarnation = event["incarnation"]
            elif event["iteration"] < now:
                yield f"{peer} fell from iteration {now} to {event['iteration']}"
            now = event["iteration"]
            saved = now if event["event"] == "saved" else saved
        if end is not None:
            before = [e for e in events if end - LAST_SECONDS <= e["time"] <= end]
            mine = [e["iteration"] for e in before if e["incarnation"] == incarnation]
            if not mine or mine[-1] <= mine[0]:
                yield f"{peer} made no progress in the last {LAST_SECONDS:.0f} seconds"


def torment(folder: Path, peers: int, seconds: float, seed: int = 0) -> float:
    """Let them learn, kill and restart; when all are back, let them learn a little longer. Returns
    when they were asked to stop."""
    config = make_config(
        {
            "data": "digits",
            "clients": peers,
            "model": "mlp",
            "strategy": "p2p:target=10000000,decision=always",
            "eval_every": 200 * peers,
            "seed": seed,
        }
    )
    options = ["--save-every", "20", "--pause", "0.1"]
    with Group(config, folder, options=options) as group:
        return _torment(group, seconds, rng(seed, "chaos"))


def _torment(group: Group, seconds: float, draws: np.random.Generator) -> float:
    folder, peers = group.out, len(group.names)
    started: dict[str, float] = {}

    def start(number: int) -> None:
        started[group.names[number]] = time.time()
        group.start(number)

    def training() -> list[int]:
        """Those whose present process has saved something."""
        logs = read(folder)
        return [
            number
            for number, name in enumerate(group.names)
            if any(e["event"] == "saved" and e["time"] > started[name] for e in logs.get(name, ()))
        ]

    def wait_until_all_train() -> None:
        while len(training()) < peers:
            if any(process.poll() is not None for process in group.processes.values()):
                raise SystemExit(f"a peer did not start; see {folder}/*.log")
            time.sleep(0.5)

    kills = 0
    for number in range(peers):
        start(number)
    wait_until_all_train()
    begin = time.time()
    while time.time() < begin + seconds:
        time.sleep(float(draws.uniform(1, 3)))
        alive = training()
        if len(alive) > 3:  # a start takes long on a small machine
            number = alive[int(draws.integers(len(alive)))]
            process = group.processes[group.names[number]]
            process.kill()
            process.wait(60)
            kills += 1
            start(number)
    wait_until_all_train()
    time.sleep(LAST_SECONDS)
    end = time.time()
    sys.stderr.write(f"{kills} kills in {seconds:.0f} s\n")
    return end


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peers", type=int, default=10)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("runs/chaos"))
    chosen = options.parse_args()
    shutil.rmtree(chosen.out, ignore_errors=True)
    end = torment(chosen.out, chosen.peers, chosen.seconds, chosen.seed)
    logs = read(chosen.out)
    counts = Counter(event["event"] for events in logs.values() for event in events)
    incarnations = sum(len({e["incarnation"] for e in events}) for events in logs.values())
    sys.stdout.write(json.dumps({"incarnations": incarnations, **counts}) + "\n")
    wrong = check(logs, end)
    sys.stdout.write("\n".join([*wrong, f"{len(wrong)} violations"]) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
