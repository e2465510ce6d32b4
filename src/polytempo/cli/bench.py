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
            "exchange \\[all]."
        ),
    ] = None,
    *,
    workers: Annotated[int | None, typer.Option(help="Worker processes \\[processors].")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer updates, smaller sizes: less exact.", metavar="")
    ] = False,
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


def _tables(found: Mapping[str, Any]) -> list[list[dict[str, str]]]:
    """The tables of a benchmark; parts that were not measured have empty ones."""
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
            f"{row['slots']:,} slots",
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
                f"{way}, {threads} thread{'s' * (threads != '1')}": f"{time:,.2f} ms"
                for way in ("torch", "compiled")
                for threads, time in row[f"{way}_ms"].items()
            },
            "reading 32 bits once": f"{row['read_ms']:,.2f} ms",
            "rows touched": f"{row['touched']:.0%}",
            "memory": f"{row['peak_mb']:,.0f} MB",
        }
        for row in found["server"]
    ]
    bookkeeping = [
        {
            "bookkeeping of the server": f"{row['clients']:,} clients, {row['slots']:,} slots",
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
    return [rows, engine, crowd, server, bookkeeping, clusters, scale, exchange]
