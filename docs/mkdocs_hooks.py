"""What the site needs beside mkdocs.yml.

Links from a page to a file of the repository (`../examples/with_numpy.py`) work in the site, too:
such files are published below `repository/`; a folder is named, without a link. And docstrings are
plain text, in which a line `name: description` describes a parameter: in the reference, a list.
"""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTWARD = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([\w./-]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.docs_dir).parent
    for page in list(files.documentation_pages()):
        for _, name in OUTWARD.findall(page.content_string):
            uri = f"repository/{name}"
            if files.get_file_from_path(uri) is None and (root / name).is_file():
                files.append(File.generated(config, uri, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    up = "../" * page.file.src_uri.count("/")

    def inward(link: re.Match[str]) -> str:
        text, name = link.groups()
        uri = f"repository/{name}"
        if files.get_file_from_path(uri):
            return f"[{text}]({up}{uri})"
        return text if (Path(config.docs_dir).parent / name).is_dir() else link[0]

    return OUTWARD.sub(inward, markdown)


class Parameters(griffe.Extension):
    """Lines `name, another: description` of a docstring become items of a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            lines = re.sub(r"(?m)^([a-z_]+(?:, [a-z_]+)*): ", r"- `\1`: ", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)^(?!-|    )(.+)\n(?=- `)", r"\1\n\n", lines)
