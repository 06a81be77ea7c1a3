"""The site and its guides: links lead to existing headings, every page is in the nav, every command is valid."""

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from redline.cli import app

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [*sorted((ROOT / "docs").glob("**/*.md")), *sorted(ROOT.glob("*.md"))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings, if no two are equal."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def lost(page: Path) -> list[str]:
    """The page's links to headings that no page has."""
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text())
    return [f"{path}#{anchor}" for path, anchor in links if anchor not in anchors(page.parent / path if path else page)]


def wrong(line: str) -> str | None:
    """The error of a `redline` command line, None if it parses: its verb, its flags, its values."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    context = command.make_context("redline", [], resilient_parsing=True)
    while hasattr(command, "commands"):
        verb = words.pop(0) if words else ""
        if verb not in command.commands:
            return f"no verb {verb}"
        command = command.commands[verb]
        context = command.context_class(command, parent=context, info_name=verb)
    try:
        values, left, _ = command.make_parser(context).parse_args(words)
        context.resilient_parsing = True  # folders named in it need not exist
        for parameter in command.params:
            given = values.get(parameter.name)
            if parameter.opts[0].startswith("-"):
                parameter.process_value(context, given)
    except Exception as error:  # click's exception, or that of the copy of it in typer
        return str(error)
    return f"nobody reads {left}" if left else None


def test_the_guides_are_there_and_short():
    assert len(GUIDES) >= 4
    assert not [name(page) for page in GUIDES if len(page.read_text().splitlines()) > 120]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_link_to_a_heading_leads_to_one(page: Path):
    assert not lost(page)


def test_a_link_to_no_heading_is_found(tmp_path: Path):
    (tmp_path / "one.md").write_text("# A title, here\n[a](#a-title-here) [b](two.md#there) [c](#nowhere)")
    (tmp_path / "two.md").write_text("## There\n")
    assert lost(tmp_path / "one.md") == ["#nowhere"]


def test_every_page_is_in_the_nav_once():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md"))


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_every_command_of_a_guide_parses(page: Path):
    lines = [line.strip() for line in page.read_text().splitlines() if line.startswith("    redline ")]
    lines += re.findall(r"`(redline [a-z]+ [^`]+)`", page.read_text())
    assert not {line: wrong(line) for line in lines if wrong(line)}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("redline sevre X", "no verb sevre"),
        ("redline", "no verb"),
        ("redline serve X --nope", "--nope"),
        ("redline serve X --port x", "valid integer"),
        ("redline serve X Y", "nobody reads"),
    ],
)
def test_a_command_that_is_none_is_found(line: str, why: str):
    assert why in str(wrong(line))


def test_every_flag_of_ours_that_the_way_from_vllm_names_exists():
    rows = re.findall(r"^\| `.*\| (.+) \|$", (ROOT / "docs/guides/vllm.md").read_text(), re.MULTILINE)
    ours = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row)}
    command: Any = typer.main.get_command(app)
    assert len(rows) > 20
    assert ours <= {flag for option in command.commands["serve"].params for flag in option.opts}


def test_the_drawing_is_up_to_date():
    drawings = runpy.run_path(str(ROOT / "docs" / "drawings.py"))
    assert (ROOT / "docs" / "walk.svg").read_text() == drawings["walk"]()
