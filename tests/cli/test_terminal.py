"""What is printed for people: others' words are text, whatever they hold."""

import io

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from redline.cli.terminal import Terminal, one_line

CONTROLS = [chr(code) for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"]


def shown(*printed: object, style: str | None = None) -> str:
    screen = io.StringIO()
    Terminal(file=screen, width=200).print(*printed, style=style)
    return screen.getvalue()


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[/red]", "redline[draft]", ":smile: :100:", "[link=file:///]x"])
def test_brackets_and_colons_are_text(text: str):
    assert shown(text) == f"{text}\n"
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    assert shown(table).count(text) == 3


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_no_control_character_reaches_the_terminal_but_newline_and_tab(control: str):
    table = Table("column")
    table.add_row(f"in a {control} table")
    for printed in (f"a{control}b\nc", Text(f"a{control}b\nc", "bold"), table):
        assert not set(CONTROLS) & set(shown(printed)), f"{printed!r}"
    assert "\\x1b[2J" in shown("\x1b[2J"), "and what was there is seen"


def test_our_own_styles_and_bars_still_reach_it():
    screen = io.StringIO()
    console = Terminal(file=screen, force_terminal=True, width=80)
    console.print("warning", style="red")
    with Progress(console=console, transient=True) as bar:
        bar.add_task("loading", total=2)
    assert "\x1b[31mwarning" in screen.getvalue()
    assert "\x1b[2K" in screen.getvalue(), "a bar that is gone at the end"


def test_one_line_is_one_line_and_short():
    assert one_line(" a\nb\t c\r\n") == "a b c"
    assert one_line("x" * 1000, 10) == "x" * 10 + "..."
