"""Renders sections as one self-contained HTML page, which makes no network requests.

The page's script (page_numbers.js, page.js) draws the JSON embedded in the page. Output of servers and models is in
that JSON and becomes text, never markup: `<` is escaped, the script writes text nodes only, and the page's content
security policy allows only the script and the style with its hashes.
"""

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib.resources import files
from string import Template

import msgspec

from redline.bench.serving.sections import Section


def render(
    title: str, sections: Sequence[Section], *, subtitle: str = "", provenance: Sequence[tuple[str, str]] = ()
) -> str:
    """The page's HTML. A number that is not finite becomes a gap in its plot.

    subtitle: a line below the title. provenance: names and values in the page's footer: machine, commit, date ...
    """
    style, script = _part("page.css"), _part("page_numbers.js") + _part("page.js")
    data = {"title": title, "subtitle": subtitle, "sections": list(sections), "provenance": list(provenance)}
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return Template(_part("page.html")).substitute(
        policy=policy,
        title=html.escape(title),
        style=style,
        # In JSON `<` occurs in strings only; escaped, neither </script> nor <!-- can reach the HTML parser.
        data=msgspec.json.encode(data).decode().replace("<", "\\u003c"),
        script=script,
    )


def _part(name: str) -> str:
    return files("redline.bench.serving").joinpath(name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    """The hash of an inline script or style, in the form of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
