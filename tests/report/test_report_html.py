"""The HTML report is one well-formed page that holds everything and runs nothing."""

from __future__ import annotations

import base64
from html.parser import HTMLParser

import pytest

from polytempo.core.errors import PolytempoError
from polytempo.report import plot_staleness, write_html

EVIL = '<script>alert("1 & 2")</script>'


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what a reader would see."""

    empty = frozenset({"meta", "img"})

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.images, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in self.empty:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.text.append(data)


def write(tmp_path, **given):
    path = write_html(tmp_path / "sub" / "report.html", **{"title": "A report", **given})
    return Page(path.read_text(encoding="utf-8"))


def test_everything_is_on_the_page(tmp_path):
    page = write(
        tmp_path,
        intro="First.\n\nSecond é.",
        table=[
            {"strategy": "pace", "accuracy": "78.1 ± 0.4"},
            {"strategy": "fedavg", "accuracy": "36.0", "time": "1,204 s"},
        ],
        settings={
            "clients": 20,
            "partition": {"name": "dirichlet", "alpha": 0.1},
            "data": "digits",
        },
        command="polytempo compare pace fedavg --seed 0",
    )
    for text in (
        "First.",
        "Second é.",
        "strategy",
        "78.1 ± 0.4",
        "36.0",
        "1,204 s",
        "20",
        '{"name": "dirichlet", "alpha": 0.1}',
        "digits",
        "polytempo compare pace fedavg --seed 0",
    ):
        assert text in page.text
    assert page.seen.count("h1") == 1
    assert page.seen.count("td") == 2 * 3 + 3  # a missing cell is empty, not absent


def test_nothing_that_is_given_becomes_markup(tmp_path):
    image = plot_staleness({1: 2}, tmp_path / "a.png")
    page = write(
        tmp_path,
        title=EVIL,
        intro=EVIL,
        table=[{EVIL: EVIL}],
        images=[(EVIL, image)],
        settings={EVIL: EVIL},
        command=EVIL,
    )
    assert "script" not in page.seen
    assert (
        page.text.count(EVIL) == 9
    )  # head, h1, intro, column, cell, caption, name, value, command
    assert page.images[0]["alt"] == EVIL


def test_all_images_are_embedded_unchanged_in_order(tmp_path):
    files = [plot_staleness({count: 1}, tmp_path / f"{count}.png") for count in (1, 2)]
    svg = plot_staleness({3: 1}, tmp_path / "3.svg")
    page = write(tmp_path, images=[("one", files[0]), ("two", str(files[1])), ("three", svg)])
    assert [image["alt"] for image in page.images] == ["one", "two", "three"]
    kinds = ["image/png", "image/png", "image/svg+xml"]
    for image, kind, file in zip(page.images, kinds, [*files, svg], strict=True):
        head, data = image["src"].split(",")
        assert head == f"data:{kind};base64"
        assert base64.b64decode(data) == file.read_bytes()


def test_the_page_needs_no_other_file_and_is_the_same_each_time(tmp_path):
    given = {"table": [{"a": "1"}], "settings": {"b": 2}}
    texts = []
    for name in ("a.html", "b.html"):
        texts.append(write_html(tmp_path / name, title="t", **given).read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert "prefers-color-scheme: dark" in texts[0]
    assert not {"link", "script", "iframe"} & set(Page(texts[0]).seen)
    assert "http" not in texts[0]


def test_parts_that_are_not_given_leave_no_empty_headings(tmp_path):
    assert "h2" not in write(tmp_path).seen


@pytest.mark.parametrize("name", ["missing.png", "picture.bmp"])
def test_an_image_that_cannot_be_shown_is_a_one_line_error(name, tmp_path):
    with pytest.raises(PolytempoError, match=name) as error:
        write(tmp_path, images=[("x", tmp_path / name)])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.html"))
