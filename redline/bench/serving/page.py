"""Sections as one HTML page that stands alone: nothing is loaded from elsewhere, nothing is sent anywhere.

The page's own script (page_numbers.js, page.js) draws what lies beside it as JSON. Whatever a server or a model has
said is in that JSON and becomes text, never markup: `<` is escaped in it, the script only ever writes text nodes, and
the page's policy allows no other script or style than the two whose hashes it names.
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
    """The page's HTML. A number that is not finite is a gap in its plot.

    subtitle: a line below the title. provenance: names and values at the page's foot, such as machine, commit, date.
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
        # In JSON `<` stands in texts alone, so neither </script> nor <!-- can be in what the parser of HTML reads.
        data=msgspec.json.encode(data).decode().replace("<", "\\u003c"),
        script=script,
    )


def _part(name: str) -> str:
    return files("redline.bench.serving").joinpath(name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    """As a policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
