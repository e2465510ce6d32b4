"""What the command says of results: figures into words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytempo.experiments.result import about_clusters, percent


def about_run(summary: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """What is said of a run at its end."""
    sent = summary["messages"]
    wall = summary["wall_seconds"]
    rows = {
        "federation": summary["federation"],
        "accuracy, as handed": f"{percent(summary['accuracy'])} (best "
        f"{percent(summary['accuracy_best'])}, worst tenth {percent(summary['accuracy_worst10'])})",
        "accuracy, adapted": percent(summary["accuracy_adapted"]),
        "accuracy, newcomers": percent(summary["accuracy_newcomers"]),
        "clusters": "-" if summary["clusters"] is None else about_clusters(summary),
        "simulated time": f"{summary['simulated_time']:,.1f} s for {summary['arrivals']} "
        + ("local rounds" if "exchange" in sent else "updates"),
        "staleness": f"{summary['staleness_mean']:.1f} updates on average"
        if summary["staleness"]
        else "-",
        "messages": f"{sent['exchange']} models exchanged, {sent['claim']} claims, "
        f"{sent['announce']} announcements"
        if "exchange" in sent
        else f"{sent['dispatch']} dispatched, {sent['upload']} uploaded, "
        f"{sent['multicast']} multicast",
        "wall time": f"{wall['total']:.1f} s, of which training {wall['training']:.1f}, "
        f"server {wall['server']:.1f}, evaluation {wall['evaluation']:.1f}",
        "trained": summary["backend"],
        "fingerprint": summary["fingerprint"],
        "folder": str(folder),
    }
    if found := summary.get("diagnosis"):
        parts = sorted(("noise", "bias", "delay"), key=found.__getitem__, reverse=True)
        rows["what hurts"] = ", ".join(f"{part} {found[part]:.2g}" for part in parts) + (
            f" (squared lengths; the gradient's {found['gradient']:.2g}); see diagnosis.png"
        )
    rare = ("accuracy, newcomers", "clusters", "staleness")
    nothing = [key for key in rare if rows[key] == "-"]
    return {key: value for key, value in rows.items() if key not in nothing}


def bench_tables(found: Mapping[str, Any]) -> list[list[dict[str, str]]]:
    """The tables of a benchmark, those of parts that were not measured being empty."""
    rows = [
        {
            "one update": f"{row['case']}, {row['strategy']}",
            "plain loop": f"{row['plain_ms']:,.1f} ms",
            f"{row['workers']} workers": f"{row['ours_ms']:,.1f} ms",
            "ratio": f"{row['ratio']:.2f}",
            "from - to": f"{min(row['ratios']):.2f} - {max(row['ratios']):.2f}",
            "of GEMM speed": f"{row['share_of_gemm']:.0%}",
        }
        for row in found["training"]
    ]
    server = [
        {
            "server step of PACE": f"{row['clients']:,} x {row['parameters']:,}",
            "time": f"{row['fold_ms']:,.2f} ms",
            "reading once": f"{row['read_ms']:,.2f} ms",
            "multiple": f"{row['multiple']:.2f}",
            "rows touched": f"{row['touched']:.0%}",
        }
        for row in found["server"]
    ]
    bookkeeping = [
        {
            "bookkeeping of the server": f"{row['clients']:,} clients, {row['slots']:,} slots",
            "an arrival": f"{row['arrival_us']:,.0f} us",
            "slowest 200": f"{row['slowest_us']:,.0f} us",
            "memory": f"{row['peak_mb']:,.0f} MB",
        }
        for row in found["bookkeeping"]
    ]
    clusters = [
        {
            "server step of CASA": f"{row['clients']:,} x {row['parameters']:,}",
            "time": f"{row['fold_ms']:,.1f} ms",
            "grows as clients to the": "" if row["exponent"] is None else f"{row['exponent']:.1f}",
        }
        for row in found["clusters"]
    ]
    scale = [
        {
            "clients": f"{row['clients']:,}",
            "peak memory": f"{row['peak_mb']:,.0f} MB",
            "waiting for training": f"{row['training_ms']:.1f} ms",
            "server step": f"{row['server_ms']:.1f} ms",
            "all clients evaluated": f"{row['evaluation_s'] / 2:.1f} s",
        }
        for row in found["scale"]
    ]
    exchange = [
        {
            "pairing of two peers": f"{row['megabytes']:.2f} MB" + ", TLS" * row["tls"],
            "median": f"{row['median_ms']:,.1f} ms",
            "worst": f"{row['worst_ms']:,.1f} ms",
            "both ways": f"{row['mb_per_s']:,.0f} MB/s",
        }
        for row in found["exchange"]
    ]
    return [rows, server, bookkeeping, clusters, scale, exchange]
