"""The page of results: texts of others are escaped, nothing is loaded from elsewhere, and the data are unchanged."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from redline.bench.serving.page import render
from redline.bench.serving.sections import Heading, Plot, PlotMark, Section, Series, Table, Words

EVIL = "</script><!-- <script>alert(1)</script> \"quoted\" 'so' & so <img src=x onerror=alert(2)> \u2028 $data"


class Elements(HTMLParser):
    """Collects what a browser would parse: elements with attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in ("script", "style", "title"):
            self.texts.append((*self.elements[-1], data))

    def whole(self, tag: str, **attributes: str) -> str:
        found = "".join(text for name, given, text in self.texts if name == tag and given == attributes)
        return found.removesuffix("\n") if tag != "title" else found.strip()


def data_of(page: str) -> dict:
    return json.loads(Elements(page).whole("script", type="application/json", id="data"))


def plot(*series: Series, **more: object) -> Plot:
    return Plot(title="A plot", x_label="s", y_label="ms", series=series, **more)


def test_what_others_said_is_never_markup():
    sections: list[Section] = [
        Words(text=EVIL, warning=True),
        Heading(text=EVIL),
        Table(title=EVIL, columns=(EVIL, "b"), rows=((EVIL, "1"),), note=EVIL),
        plot(Series(name=EVIL, x=(1.0,), y=(2.0,), labels=(EVIL,)), marks=(PlotMark(text=EVIL, y=1.0),), note=EVIL),
    ]
    page = render(EVIL, sections, subtitle=EVIL, provenance=((EVIL, EVIL),))
    found = Elements(page)
    plain = Elements(render("A title", []))
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in plain.elements]
    assert found.whole("title") == EVIL
    assert "<!--" not in page
    assert page.count("</script>") == 2
    data = data_of(page)
    assert data["title"] == data["subtitle"] == EVIL
    assert data["provenance"] == [[EVIL, EVIL]]
    assert data["sections"][3]["series"][0]["labels"] == [EVIL]


def test_the_data_are_the_sections_and_what_is_not_finite_is_a_gap():
    x, y = (1.0, 2.0, 3.0, 4.0), (0.1 + 0.2, math.nan, math.inf, -math.inf)
    table = Table(title="T", columns=("a", "b"), rows=(("1", "2"), ("3", "4")))
    sections = data_of(render("t", [plot(Series(name="s", x=x, y=y, style="steps"), log_x=True), table]))["sections"]
    assert [section["type"] for section in sections] == ["Plot", "Table"]
    assert sections[0]["log_x"] is True
    assert sections[0]["series"][0]["style"] == "steps"
    assert sections[0]["series"][0]["x"] == [1, 2, 3, 4]
    assert sections[0]["series"][0]["y"] == [0.1 + 0.2, None, None, None]
    assert sections[1] == {
        "type": "Table",
        "title": "T",
        "columns": ["a", "b"],
        "rows": [["1", "2"], ["3", "4"]],
        "note": "",
    }


def test_a_series_of_nothing_and_a_page_of_nothing_are_pages():
    assert data_of(render("t", []))["sections"] == []
    assert data_of(render("t", [plot(Series(name="s", x=(), y=()))]))["sections"][0]["series"][0]["x"] == []


def test_nothing_is_loaded_from_elsewhere_and_the_policy_names_what_runs():
    page = render("t", [Words(text="said")])
    found = Elements(page)
    # a namespace, not an address that is loaded
    assert set(re.findall(r"[a-z]+://[^\s\"'`)]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bsrc=|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|import\(", page)
    assert not [attributes for _, attributes in found.elements if {"src", "href", "style"} & set(attributes)]
    policies = [dict(a)["content"] for tag, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policies[0].split("; "))
    script = page[page.index("<script>") + len("<script>") : page.rindex("</script>")]
    style = page[page.index("<style>") + len("<style>") : page.index("</style>")]
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'{hashed(script)}'",
        "style-src": f"'{hashed(style)}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def hashed(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@pytest.mark.parametrize(
    "word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("]
)
def test_the_script_writes_text_alone(word: str):
    assert word not in render("t", [])


def test_a_page_is_small():
    """Small enough to be mailed: an empty page is some tens of KB, and a number costs only its digits."""
    assert len(render("t", []).encode()) < 48_000
    many = tuple(float(at) for at in range(10_000))
    assert len(render("t", [plot(Series(name="s", x=many, y=many))]).encode()) < 48_000 + 16 * 10_000
