"""The documentation: a site without a warning, pages that name all there is, a citation."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import polytempo
from polytempo.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class Prose(HTMLParser):
    """The text of a page's paragraphs, without code and words in bold."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("p", "code", "pre", "strong"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            self.open.remove(tag)

    def handle_data(self, data: str) -> None:
        if self.open == ["p"]:
            self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip('mkdocs is not installed: pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_site_builds_without_a_warning(site):
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists(), page
    assert not [*site.glob("*.py"), *site.rglob("*.pyc")]


def test_lists_and_tables_are_not_taken_for_prose(site):
    """Code hosts read some Markdown as a list or a table that the site's reader does not."""
    for page in site.rglob("*.html"):
        found = re.search(r"^(- |\d+\. |\|).*$", Prose(page.read_text(encoding="utf8")).text, re.M)
        assert not found, f"{page.name}: needs an empty line before it: {found[0]}"


def test_links_to_files_of_the_repository_work_in_the_site(site):
    page = (site / "deploy.html").read_text(encoding="utf8")
    assert 'href="repository/examples/with_numpy.py"' in page
    published = site / "repository" / "examples" / "with_numpy.py"
    assert published.read_text() == (ROOT / "examples" / "with_numpy.py").read_text()
    assert (site / "repository" / "benchmarks" / "index.html").exists()


def test_the_reference_has_every_public_name(site):
    page = (site / "reference.html").read_text(encoding="utf8")
    named = set(re.findall(r'id="polytempo\.[\w.]*?(\w+)"', page))
    named |= set(re.findall(r"<code>pt\.(\w+)</code>", page))  # registries and modules
    assert not set(polytempo.__all__) - named, "docs/reference.md lacks them"


def test_links_between_pages_work_in_the_repository():
    """What the site's strict build does not see: whatever lies outside of docs/."""
    for page in [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf8")):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_strategy_is_on_the_page_of_papers():
    page = (DOCS / "papers.md").read_text(encoding="utf8")
    named = set(re.findall(r"`([\w+-]+)`", page))
    named |= {f"{name}-async" for name in re.findall(r"`([\w-]+)`\*", page)}
    assert not set(STRATEGIES) - named
    for file in re.findall(r"`(\w+\.py)`", page):
        assert (ROOT / "src" / "polytempo" / "strategies" / file).exists(), file


def test_papers_have_titles_and_links():
    page = (DOCS / "papers.md").read_text(encoding="utf8")
    rows = [line for line in page.splitlines() if re.match(r"\| `.*: \[?\*", line)]
    bare = [row for row in rows if not re.search(r"\[\*[^*]+\*\]\(https://", row)]
    assert len(rows) > 30
    assert [row.split("`")[1] for row in bare] == ["pace", "asafl"], "no address is known"


def test_the_citation_has_what_is_required():
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["authors"] == [{"name": "The Polytempo developers"}]
    assert cited["license"] == "Apache-2.0"
    assert "version" not in cited, "pyproject.toml has it"
