"""`polytempo bench`: measure speed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from polytempo.cli.console import notes, output, print_table
from polytempo.cli.options import Json
from polytempo.core.errors import PolytempoError, nearest


def bench_command(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to measure: lenet lenet-10 cnn64 mlp textcnn engine server clusters scale "
            "exchange fleet (fleet-swap fleet-upload fleet-load fleet-steady) \\[all]."
        ),
    ] = None,
    *,
    workers: Annotated[int | None, typer.Option(help="Worker processes \\[processors].")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer updates, smaller sizes: less exact.", metavar="")
    ] = False,
    clients: Annotated[int, typer.Option(min=2, help="Light clients of a fleet.")] = 1_000,
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Minutes of steady load on a fleet.")
    ] = 10.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed, alternating with a plain torch loop, and against the machine's limits.

    Example: polytempo bench lenet mlp --repeats 3 --out bench.json

    Everything takes about an hour; --quick about five minutes. Close other programs first.
    """
    # Imported here, since `polytempo bench --help` needs none of it.
    from polytempo.bench import PARTS, run_bench
    from polytempo.training.executors.processes import cores

    for part in parts or ():
        if part not in PARTS:
            raise PolytempoError(f"bench has no part {part!r}{nearest(part, PARTS)}")
    if out is not None and not out.parent.is_dir():
        raise PolytempoError(f"{out} cannot be written: there is no folder {out.parent}")
    with notes.status("measuring") as status:
        found = run_bench(
            parts or PARTS,
            workers=workers or cores(),
            repeats=repeats,
            quick=quick,
            clients=clients,
            minutes=minutes,
            watch=lambda now: status.update(f"measuring: {now}"),
        )
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf8")
    if as_json:
        output.print_json(data=found)
    else:
        _show_bench(found)


def _show_bench(found: dict[str, Any]) -> None:
    limits = found["machine"]
    output.print(
        f"{limits['processor']}, {limits['cores']} cores; one thread: matrix products "
        f"{limits['gemm_gflops']:.0f} GFLOP/s, reading {limits['read_gb_per_s']:.1f} GB/s",
        highlight=False,
    )
    for table in _tables(found):
        if table:
            print_table(table)


def _threads(count: str) -> str:
    return f"{count} thread{'s' * (count != '1')}"


def _tables(found: Mapping[str, Any]) -> list[list[dict[str, str]]]:
    """The tables of a benchmark; parts that were not measured have empty ones."""
    rows = [
        {
            "one update": f"{row['case']}, {row['strategy']}"
            + (f", bank {row['bank']}" if row["bank"] != "memory" else ""),
            **{
                f"plain loop, {_threads(count)}": f"{time:,.1f} ms"
                for count, time in row["plain_ms"].items()
            },
            f"{row['workers']} workers": f"{row['ours_ms']:,.1f} ms",
            **{
                f"ratio to {_threads(count)}": f"{row['ratio'][count]:.1f} "
                f"({min(ratios):.1f} - {max(ratios):.1f})"
                for count, ratios in row["ratios"].items()
            },
            "of GEMM speed": f"{row['share_of_gemm']:.0%}",
        }
        for row in found["training"]
    ]
    engine = [
        {
            f"engine, linear model, {row['steps']} steps": row["strategy"],
            "per update": f"{row['update_us']:,.0f} us",
            "training": f"{row['training_us']:,.0f} us",
            "server": f"{row['server_us']:,.0f} us",
            "bookkeeping": f"{row['bookkeeping_us']:,.0f} us",
            "evaluation, apart": f"{row['evaluation_us']:,.0f} us",
            "updates per second": f"{row['updates_per_s']:,.0f}",
        }
        for row in found["engine"]
    ]
    crowd = [
        {
            "engine, many clients": f"{row['strategy']}, {row['clients']:,} clients, "
            f"concurrency {row['concurrency']:,}",
            "per update": f"{row['update_us']:,.0f} us",
            "updates per second": f"{row['updates_per_s']:,.0f}",
            "start": f"{row['start_s']:.1f} s",
            "memory": f"{row['peak_mb']:,.0f} MB",
        }
        for row in found["crowd"]
    ]
    server = [
        {
            "server step of PACE": f"{row['clients']:,} x {row['parameters']:,}, {row['bank']}",
            **{
                f"{way}, {_threads(count)}": f"{time:,.2f} ms"
                for way in ("torch", "compiled")
                for count, time in row[f"{way}_ms"].items()
            },
            "reading 32 bits once": f"{row['read_ms']:,.2f} ms",
            "rows touched": f"{row['touched']:.0%}",
            "memory": f"{row['peak_mb']:,.0f} MB",
        }
        for row in found["server"]
    ]
    bookkeeping = [
        {
            "bookkeeping of the server": f"{row['clients']:,} clients, "
            f"concurrency {row['concurrency']:,}",
            "per arrival": f"{row['arrival_us']:,.0f} us",
            "slowest 200": f"{row['slowest_us']:,.0f} us",
            "memory": f"{row['peak_mb']:,.0f} MB",
        }
        for row in found["bookkeeping"]
    ]
    clusters = [
        {
            "server step of CASA": f"{row['clients']:,} x {row['parameters']:,}",
            "time": f"{row['fold_ms']:,.1f} ms",
            "a full spectrum": f"{row['spectrum_ms']:,.1f} ms",
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
    return [
        *(rows, engine, crowd, server, bookkeeping, clusters, scale, exchange),
        *_fleet_tables(found),
    ]


def _fleet_tables(found: Mapping[str, Any]) -> list[list[dict[str, str]]]:
    swap = [
        {
            "pushed to a client in training": f"{row['what']}, {row['megabytes']:.2f} MB",
            "pushes": f"{row['swaps']:.0f}",
            "overtaken": f"{row['overtaken']:.0f}",
            **_percentiles(row),
        }
        for row in found["fleet-swap"]
    ]
    upload = [
        {
            "upload to acknowledgement": f"{row['megabytes']:.2f} MB, "
            + ("fsync" if row["fsync"] else "no fsync"),
            "uploads": f"{row['repeats']}",
            "of which log": f"{row['commit_ms']:,.1f} ms",
            **_percentiles(row),
        }
        for row in found["fleet-upload"]
    ]
    load = [
        {
            "light clients": f"{row['clients']:,} x {row['megabytes']:.2f} MB, {row['strategy']}"
            + (f", rest {row['rest_s']:g} s" if row["rest_s"] else ""),
            "updates per second": f"{row['updates_per_s']:,.0f}",
            "server CPU per update": f"{row['server_cpu_ms']:.2f} ms",
            "of which fold": f"{row['fold_cpu_ms']:.2f} ms",
            "cores busy": f"{row['cores_busy']:.2f}",
            "updates per fsync": f"{row['per_commit']:.1f}",
            "memory": f"{row['memory_mb']:,.0f} MB ({row['empty_mb']:,.0f} empty)",
            **_percentiles(row),
            "all connected": f"{row['connect_s']:.1f} s",
        }
        for row in found["fleet-load"]
    ]
    steady = [
        {
            "steady load": f"{row['clients']:,} clients, {row['strategy']}, "
            f"{row['minutes']:g} minutes",
            "updates per second": f"{row['updates_per_s']:,.0f}",
            "memory, median of each fifth": " ".join(f"{mb:,.0f}" for mb in row["fifths_mb"])
            + " MB",
            "peak": f"{row['peak_mb']:,.0f} MB",
            "trend": f"{row['mb_per_minute']:+.2f} MB per minute",
            **_percentiles(row),
        }
        for row in found["fleet-steady"]
    ]
    return [swap, upload, load, steady]


def _percentiles(row: Mapping[str, Any]) -> dict[str, str]:
    return {"p50": f"{row['p50_ms']:,.1f} ms", "p99": f"{row['p99_ms']:,.1f} ms"}
