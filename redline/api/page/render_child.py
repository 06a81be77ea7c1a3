"""The process that renders the page's Markdown: a slow block blocks only this process, which can be killed.

Each frame of standard input (`redline.frames`) is a JSON list of texts; it is answered by a frame with the list of
their HTML, null for a text that fails. markdown-it-py parses Markdown, Pygments highlights code, latex2mathml converts
TeX to MathML, and nh3 removes all elements other than those that these libraries produce. HTML in a text is shown as
text.
"""

import resource
import signal
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any

import msgspec
import nh3
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import find_lexer_class_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

from redline.frames import read_frame, write_frame

MEMORY_BYTES = 1 << 30  # address space
COLOURED_CHARS = 50_000  # of a code block; longer ones are not highlighted
MATH_CHARS = 4_000  # of a formula; longer ones are shown as TeX
CLASS = "c-"  # class prefix of highlighted code
HEADING = 2  # levels added to headings, below the page's own

MATH = {
    *("math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "msup", "msub", "msubsup", "mfrac", "msqrt", "mroot"),
    *("munder", "mover", "munderover", "mtable", "mtr", "mtd", "mpadded", "mphantom", "mstyle", "menclose"),
}
TEXT = {
    *("p", "br", "hr", "blockquote", "ul", "ol", "li", "h3", "h4", "h5", "h6", "strong", "em", "s", "a", "pre", "code"),
    *("span", "table", "thead", "tbody", "tr", "th", "td"),
}
_MATH_ATTRIBUTES = {"display", "mathvariant", "stretchy", "fence", "form", "linethickness", "columnalign", "width"}
_cleaner = nh3.Cleaner(
    tags=TEXT | MATH,
    attributes={
        "a": {"href", "title"},
        "ol": {"start"},
        "pre": {"data-language"},
        "th": {"data-align"},
        "td": {"data-align"},
        **dict.fromkeys(MATH, _MATH_ATTRIBUTES),
    },
    allowed_classes={"span": {CLASS + name for name in STANDARD_TYPES.values() if name}},
    url_schemes={"http", "https", "mailto"},
    url_relative="deny",
    set_tag_attribute_values={"a": {"target": "_blank"}},
    link_rel="noopener noreferrer",
)
_formatter = HtmlFormatter[str](nowrap=True, classprefix=CLASS)


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # SIGINT reaches the whole group; the end of stdin ends this process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while (blocks := read_frame(sys.stdin.buffer)) is not None:
        texts = msgspec.json.decode(blocks, type=list[str])
        write_frame(sys.stdout.buffer, msgspec.json.encode([attempted(text) for text in texts]))


def attempted(text: str) -> str | None:
    """Render Markdown to HTML; None if that fails."""
    try:
        return rendered(text)
    except Exception:  # any exception of a library for malformed input
        return None


def rendered(text: str) -> str:
    """Render Markdown to HTML."""
    return _cleaner.clean(_markdown.render(text))


def coloured(code: str, language: str) -> str:
    """The HTML of a code block: tokens have classes if Pygments knows the language."""
    if len(code) <= COLOURED_CHARS:
        try:
            return highlight(code, find_lexer_class_by_name(language)(stripnl=False, ensurenl=False), _formatter)
        except ClassNotFound:
            pass
    return escapeHtml(code)


def formula(tex: str, *, block: bool) -> str:
    """The MathML of a formula; its TeX as code if it cannot be parsed."""
    if len(tex) <= MATH_CHARS:
        try:
            return convert(tex, display="block" if block else "inline")
        except Exception:  # any exception for malformed TeX
            pass
    return f"<code>{escapeHtml(tex)}</code>"


# ------------------------------------------------------------------------------------------------- TeX in Markdown

_PAIRS = (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False), ("$", "$", False))


def _inline_math(state: StateInline, silent: bool) -> bool:
    r"""$a$, $$a$$, \(a\) and \[a\]. A single dollar counts only without a space inside it and without a digit after
    it, so that prices stay text."""
    absent: dict[tuple[str, str, int], int] = state.env.setdefault("absent", {})  # no closing mark follows any more
    for opening, closing, block in _PAIRS:
        if not state.src.startswith(opening, state.pos):
            continue
        start = state.pos + len(opening)
        key = closing, state.src, state.posMax
        if absent.get(key, start) < start or (end := state.src.find(closing, start, state.posMax)) < 0:
            absent.setdefault(key, start)
            continue
        if end == start:
            continue
        if opening == "$":
            within = state.src[start], state.src[end - 1]
            if any(one.isspace() for one in within) or state.src[end + 1 : end + 2].isdigit() or within[1] == "\\":
                continue
        if not silent:
            token = state.push("math_block" if block else "math", "", 0)
            token.content = state.src[start:end]
        state.pos = end + len(closing)
        return True
    return False


def _block_math(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    r"""$$ or \[ at the beginning of a line, up to the line that ends with the closing mark."""
    if state.is_code_block(first):
        return False
    begin = state.bMarks[first] + state.tShift[first]
    opening = state.src[begin : begin + 2]
    closing = {"$$": "$$", "\\[": "\\]"}.get(opening)
    if closing is None:
        return False
    for line in range(first, last):
        end = state.src.rfind(closing, begin + 2 if line == first else state.bMarks[line], state.eMarks[line])
        if end >= 0 and not state.src[end + 2 : state.eMarks[line]].strip(" \t.,;"):
            break
    else:
        return False
    if not silent:
        token = state.push("math_block", "", 0)
        lines = state.getLines(first, line + 1, state.blkIndent, False)
        token.content = lines.strip().rstrip(" \t.,;").removeprefix(opening).removesuffix(closing)
        token.map = [first, line + 1]
        state.line = line + 1
    return True


# --------------------------------------------------------------------------------------------------------- the rules

_Environment = MutableMapping[str, Any]


def _math(_: RendererHTML, tokens: Sequence[Token], place: int, *rest: Any) -> str:
    return formula(tokens[place].content, block=tokens[place].type == "math_block")


def _fence(_: RendererHTML, tokens: Sequence[Token], place: int, *rest: Any) -> str:
    token = tokens[place]
    language = token.info.split(maxsplit=1)[0] if token.info.strip() else ""
    return f'<pre data-language="{escapeHtml(language)}"><code>{coloured(token.content, language)}</code></pre>'


def _image(_: RendererHTML, tokens: Sequence[Token], place: int, *rest: Any) -> str:
    """A link to the image: displaying it would send a request to another server, which would learn about the reader."""
    token = tokens[place]
    return f'<a href="{escapeHtml(str(token.attrGet("src") or ""))}">{escapeHtml(token.content or "image")}</a>'


def _open(renderer: RendererHTML, tokens: Sequence[Token], place: int, options: Any, env: _Environment) -> str:
    token = tokens[place]
    if token.type.startswith("heading"):
        token.tag = f"h{min(6, int(token.tag[1]) + HEADING)}"
    elif style := token.attrGet("style"):  # of a table cell; the page's security policy forbids style attributes
        token.attrs = {"data-align": str(style).removeprefix("text-align:")}
    return renderer.renderToken(tokens, place, options, env)


def _made() -> MarkdownIt:
    markdown = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    markdown.inline.ruler.before("escape", "math", _inline_math)
    markdown.block.ruler.before(
        "fence", "math_block", _block_math, {"alt": ["paragraph", "reference", "blockquote", "list"]}
    )
    rules = {"math": _math, "math_block": _math, "fence": _fence, "code_block": _fence, "image": _image}
    rules |= dict.fromkeys(("heading_open", "heading_close", "th_open", "td_open"), _open)
    for name, rule in rules.items():
        markdown.add_render_rule(name, rule)
    return markdown


_markdown = _made()

if __name__ == "__main__":
    main()
