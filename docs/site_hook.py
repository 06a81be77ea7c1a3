"""A hook of MkDocs: what pages link to outside docs/ (the tour, results, models' cards) becomes a part of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TO_FOLDER = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)\)")
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def place(path: Path) -> str:
    """Where a file of the project lies in the site's sources. path: absolute."""
    docs = ROOT / "docs"
    return str(path.relative_to(docs)) if path.is_relative_to(docs) else f"project/{path.relative_to(ROOT)}"


def targets(page: Path) -> list[Path]:
    """The files of the project that a page links to. Folders and what is missing are left out."""
    found = ((page.parent / link).resolve() for link, _ in LINK.findall(page.read_text()))
    return [path for path in found if path.is_file() and path.is_relative_to(ROOT)]


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside docs/ that pages lead to, those that they lead to themselves included."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen = set(waiting)
    while waiting:
        for path in targets(waiting.pop()):
            if path in seen:
                continue
            seen.add(path)
            if place(path).startswith("project/"):
                files.append(File.generated(config, place(path), abs_src_path=str(path)))
                if path.suffix == ".md":
                    waiting.append(path)
    for file in files.documentation_pages():
        if file.src_uri.startswith("project/"):
            file.inclusion = file.inclusion.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that cross the border of docs/ lead to where the site has what they mean."""
    source = Path(page.file.abs_src_path)
    here = Path("/", place(source)).parent

    def moved(match: re.Match[str]) -> str:
        path = (source.parent / match[1]).resolve()
        if not path.is_file() or not path.is_relative_to(ROOT):
            return match[0]
        there = Path("/", place(path))
        up = "../" * (len(here.parts) - 1)
        return f"]({up}{str(there)[1:]}{match[2] or ''})"

    return LINK.sub(moved, TO_FOLDER.sub(lambda match: words_of(match, source), markdown))


def words_of(match: re.Match[str], source: Path) -> str:
    """A link to a folder, of which a site has no page, as its words alone; any other as it is."""
    return match[1] if (source.parent / match[2]).is_dir() else match[0]
