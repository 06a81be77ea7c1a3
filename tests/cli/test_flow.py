"""A text that arrives in pieces, as it is shown in a terminal."""

import io
import random

import pytest
from rich.cells import cell_len

from redline.cli.flow import Flow
from redline.cli.terminal import Terminal
from tests.seeds import fresh_seed

WIDTH = 24
CODE = "let this_line = of_code(that_is, longer, than_a_line);"
TEXT = f"""The answer to this question is a sentence of several lines.

A list:
    - an item that is indented, and again of several lines
An address: https://127.0.0.1:8000/v1/chat/completions, and more words after it.
``` is no fence where ``` follows, so that words go on to the next line
```rust
{CODE}
   ~~~ {CODE}
```
And 世界你好世界你好世界你好世界你好世界你好, then words of the next few lines.
~~~
{CODE}
```
{CODE}
~~~
  Words that follow the code in lines again.   """


class Screen:
    """A terminal of WIDTH columns."""

    def __init__(self, terminal: bool = True) -> None:
        self.file = io.StringIO()
        self.flow = Flow(Terminal(file=self.file, width=WIDTH, force_terminal=terminal))

    @property
    def text(self) -> str:
        return self.file.getvalue()


def shown(*pieces: str) -> str:
    screen = Screen()
    for piece in pieces:
        screen.flow.add(piece, None)
    screen.flow.end()
    return screen.text


def test_lines_are_broken_between_words_and_only_a_longer_word_or_code_is_longer():
    lines = [line.rstrip() for line in shown(TEXT).splitlines()]
    longer = [line for line in lines if cell_len(line) > WIDTH]
    assert longer == ["https://127.0.0.1:8000/v1/chat/completions,", CODE, f"   ~~~ {CODE}", CODE, CODE]
    assert lines[:4] == ["The answer to this", "question is a sentence", "of several lines.", ""]
    assert "".join("".join(lines).split()) == "".join(TEXT.split()), "nothing is lost, nothing added"
    words = {word for line in lines for word in line.split()}
    assert {word for word in TEXT.split() if word.isascii()} <= words, "no word is broken"
    chinese = [line for line in lines if "世" in line]
    assert len(chinese) == 2, "its lines may break after each character"


def test_a_text_looks_the_same_however_it_comes():
    draw, whole = random.Random(fresh_seed()), shown(TEXT)
    for most in (1, 2, 7, 40):
        pieces, at = list[str](), 0
        while at < len(TEXT):
            size = draw.randint(1, most)
            pieces.append(TEXT[at : at + size])
            at += size
        assert shown(*pieces) == whole


def test_no_more_than_the_newest_word_is_held():
    screen = Screen()
    for count, character in enumerate(TEXT, 1):
        screen.flow.add(character, None)
        seen = "".join(screen.text.split())
        missing = "".join(TEXT[:count].split()).removeprefix(seen)
        assert TEXT[:count].rstrip().endswith(missing), "only the end is missing"
        assert len(missing) <= WIDTH
        assert TEXT[:count].split()[-1].endswith(missing), "and only a part of one word"


def test_the_word_before_a_call_or_another_style_is_shown_with_it():
    screen = Screen()
    screen.flow.add("thou", "dim")
    screen.flow.add("answ", None)
    screen.flow.add('\nget {"a": "b c d e f g h i j k l m"}', "cyan", whole=True)
    plain = screen.text
    for code in ("\x1b[2m", "\x1b[36m", "\x1b[0m"):
        plain = plain.replace(code, "")
    assert plain == 'thouansw\nget {"a": "b c d e f g h i j k l m"}'


@pytest.mark.parametrize("text", [TEXT, "no end", "an end\n"])
def test_a_file_gets_the_text_as_it_is_at_once(text: str):
    screen = Screen(terminal=False)
    for character in text:
        screen.flow.add(character, None)
    assert screen.text == text
    screen.flow.end()
    assert screen.text == text.removesuffix("\n") + "\n"
