"""Writes the drawing of ARCHITECTURE.md: `python docs/drawings.py`. A test holds the drawing equal to it."""

from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
WALK = (
    ("api", "HTTP to request", "Ask"),
    ("chat", "text to tokens", "Job"),
    ("router", "choose a worker", "Job"),
    ("scheduler", "schedule a step", "Step"),
    ("run", "execute it", "rows"),
    ("model", "Kimi K2", "ops"),
    ("kernels", "CPU or GPU", ""),
)
WIDTH, GAP, HEIGHT = 128, 46, 62


def walk() -> str:
    """An SVG of the packages that a request passes, the types between them, and the way back."""
    shapes: list[str] = []
    for place, (room, question, passes) in enumerate(WALK):
        x = 10 + place * (WIDTH + GAP)
        middle = x + WIDTH / 2
        shapes += [
            f'<rect x="{x}" y="40" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eaf1f8" stroke="#1b4f8a"/>',
            f'<text x="{middle}" y="66" font-size="16" font-weight="bold">{room}</text>',
            f'<text x="{middle}" y="88">{escape(question)}</text>',
        ]
        if passes:
            shapes += [
                f'<path d="M{x + WIDTH} 71 h{GAP - 4}" stroke="#1b4f8a" marker-end="url(#head)"/>',
                f'<text x="{x + WIDTH + GAP / 2}" y="62" font-size="11">{passes}</text>',
            ]
    width = 20 + len(WALK) * (WIDTH + GAP) - GAP
    worker = 10 + 3 * (WIDTH + GAP) - 14
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 172" font-family="sans-serif" '
            'font-size="12" text-anchor="middle" fill="#1a1a1a">',
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#1b4f8a"/></marker></defs>',
            f'<rect width="{width}" height="172" fill="#ffffff"/>',
            f'<rect x="{worker}" y="12" width="{width - worker - 4}" height="104" rx="8" fill="none" '
            'stroke="#888888" stroke-dasharray="5 4"/>',
            f'<text x="{(worker + width) / 2}" y="30">worker process</text>',
            *shapes,
            f'<path d="M{width - 74} 104 v36 H74 v-34" fill="none" stroke="#b5432e" marker-end="url(#head)"/>',
            f'<text x="{width / 2}" y="158">back: StepResult, Delta, Event, and the answer in the dialect of the '
            "client</text>",
            "</svg>\n",
        )
    )


if __name__ == "__main__":
    (DOCS / "walk.svg").write_text(walk())
