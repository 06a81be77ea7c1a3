"""Output for people: text from others is printed literally, whatever it contains."""

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
    assert "\\x1b[2J" in shown("\x1b[2J"), "the control character is shown as an escape"


def test_our_own_styles_and_bars_still_reach_it():
    screen = io.StringIO()
    console = Terminal(file=screen, force_terminal=True, width=80)
    console.print("warning", style="red")
    with Progress(console=console, transient=True) as bar:
        bar.add_task("loading", total=2)
    assert "\x1b[31mwarning" in screen.getvalue()
    assert "\x1b[2K" in screen.getvalue(), "a transient bar is erased at the end"


def test_one_line_is_one_line_and_short():
    assert one_line(" a\nb\t c\r\n") == "a b c"
    assert one_line("x" * 1000, 10) == "x" * 10 + "..."


def wide(columns: int) -> Table:
    table = Table(title="a title", caption="a caption")
    table.add_column("domain")
    for number in range(columns):
        table.add_column(f"k{number}", justify="right")
    for row in range(2):
        table.add_row(f"row {row}", *(f"1,234,{row}{number:02}.5" for number in range(columns)))
    return table


@pytest.mark.parametrize("columns", [3, 12])
def test_no_digit_is_lost_in_eighty_columns(columns: int):
    screen = io.StringIO()
    Terminal(file=screen, width=80).print(wide(columns))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for row in range(2):
        for number in range(columns):
            assert sum(f"1,234,{row}{number:02}.5" in line for line in lines) == 1
    assert screen.getvalue().count("a title") == screen.getvalue().count("a caption") == 1
    assert screen.getvalue().count("row 0") == (1 if columns == 3 else 3), "each part repeats the name of the row"


def test_a_long_line_is_broken_between_words_and_a_path_stays_whole():
    screen = io.StringIO()
    path = "/" + 60 * "long" + "/file"
    terminal = Terminal(file=screen, width=80, force_terminal=True)
    terminal.print(20 * "some words " + path, highlight=False, soft_wrap=True)
    lines = screen.getvalue().splitlines()
    assert sum(path in line for line in lines) == 1
    assert all(len(line) <= 80 for line in lines if path not in line)
    assert " ".join(screen.getvalue().split()) == 20 * "some words " + path


def test_a_line_that_is_no_terminals_stays_one():
    screen = io.StringIO()
    Terminal(file=screen, width=80).print(30 * "words ", soft_wrap=True)
    assert len(screen.getvalue().splitlines()) == 1
