"""The page with its data in one file: a report to keep and to send, which needs nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from polytempo.core.errors import PolytempoError
from polytempo.files import replace_text
from polytempo.view import panels
from polytempo.view.app import PAGE, plotly_file
from polytempo.view.shelf import Shelf

SAVED = 24  # runs: as many as the curves can show


def save(folders: list[Path], path: Path) -> int:
    """Write the page as it is now, with the latest runs in these folders; how many there are."""
    shelf = Shelf(folders)
    found = dict(list(shelf.runs().items())[:SAVED])
    if not found:
        raise PolytempoError(f"there are no runs in {', '.join(map(str, folders))} to be saved")
    answers: dict[str, object] = {}
    for key, run in found.items():
        run.look()
        while run.unread:
            run.look()
        answers[f"/api/runs/{key}"] = {"have": "all", **panels.everything(run)}
        for which, arrays in (("graph", run.graph), ("similarity", run.similarity)):
            for number in range(len(arrays.value.get("matrices", ()))):
                shown = panels.matrix(run, "graph" if which == "graph" else "similarity", number)
                answers[f"/api/runs/{key}/{which}?number={number}"] = shown
    answers["/api/runs"] = {
        "runs": [{"key": key, **panels.about(run)} for key, run in found.items()],
        "left_out": len(shelf.runs()) + shelf.left_out - len(found),
        "folders": [str(root) for root in shelf.roots],
    }
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    replace_text(path, _page({"saved": now, "answers": answers}))
    return len(found)


def _page(data: object) -> str:
    """index.html with what it would load in its place."""
    text = (PAGE / "index.html").read_text(encoding="utf8")
    kept = json.dumps(data, allow_nan=False).replace(
        "<", "\\u003c"
    )  # nothing in it ends the script
    files = {
        '<link rel="icon" href="/page/icon.svg" type="image/svg+xml">': "",
        '<link rel="stylesheet" href="/page/view.css">': f"<style>{_read('view.css')}</style>",
        '<script src="/plotly.js" defer></script>': (
            f'<script type="application/json" id="saved">{kept}</script>'
            f"<script>{plotly_file().read_text(encoding='utf8')}</script>"
        ),
        '<script src="/page/view.js" type="module"></script>': (
            f'<script type="module">{_read("view.js")}</script>'
        ),
    }
    for tag, content in files.items():
        before, found, after = text.partition(tag)
        assert found, tag
        text = before + content + after
    return text


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf8")
