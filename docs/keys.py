"""Writes the tables of keys in serve.md from the declarations in the code: `python docs/keys.py`."""

import re
from pathlib import Path

from redline.deploy.settings import reference

PAGE = Path(__file__).with_name("serve.md")


def generated(page: str) -> str:
    """The page with each table between `<!-- keys of TABLE -->` and `<!-- end -->` made anew."""
    block = re.compile(r"(<!-- keys of ([\w.]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
    return block.sub(lambda found: f"{found[1]}\n{reference(found[2].removeprefix('file'))}\n\n", page)


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
