"""`polytempo view`: runs in a web page, as they go."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from polytempo.cli.console import notes, output
from polytempo.core.errors import PolytempoError
from polytempo.view.serve import Beside, require_view, serve


def view_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER ...]", help="Folders of runs, at any depth \\[runs]."),
    ] = None,
    *,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address to listen on; beyond this machine the page needs a token "
            "\\[127.0.0.1:7600].",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="POLYTEMPO_VIEW_TOKEN",
            help="Ask for this token \\[on this machine none, elsewhere a new one].",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="Write the page with its data into one file (some 5 MB) instead: a report that "
            "works anywhere, without this program.",
        ),
    ] = None,
    until_eof: Annotated[
        bool, typer.Option("--until-eof", hidden=True, help="End when standard input does.")
    ] = False,
) -> None:
    """Show runs in a web page on this machine, as they go.

    Example: polytempo view runs/compare, or polytempo view runs/compare --save report.html

    It reads the folders of simulations and of deployed servers, and never writes. Ctrl-C ends it.
    """
    require_view()
    found = folders or [Path("runs")]
    for folder in found if not until_eof else ():
        if not folder.expanduser().is_dir():
            raise PolytempoError(
                f"there is no folder {folder}; name the folder of a run, or one that holds runs"
            )
    if token is not None and not token.strip():
        raise PolytempoError("the token is empty; leave it out, and one is made where it is needed")
    if save is not None:
        from polytempo.view.save import save as save_page

        number = save_page(found, save.expanduser())
        output.print(
            f"{number} {'run' if number == 1 else 'runs'} in [bold]{escape(str(save))}[/]",
            highlight=False,
            soft_wrap=True,
        )
        return
    serve(found, listen=listen, token=token, say=_say, until_eof=until_eof)


def _say(address: str) -> None:
    """The address alone goes to standard output, where others may read it."""
    output.file.write(address + "\n")
    output.file.flush()
    if output.is_terminal:
        notes.print("open it in a browser; Ctrl-C ends the view", highlight=False)


def viewed(folder: Path, live: bool) -> AbstractContextManager[object]:
    """With --live: the view of a run, in a process of its own."""
    if not live:
        return nullcontext()
    return Beside(
        folder,
        lambda address: notes.print(f"live view: [bold]{escape(address)}[/]", soft_wrap=True),
    )
