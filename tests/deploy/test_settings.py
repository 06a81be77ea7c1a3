"""The keys of a deployment file are described where they are declared; the docs are generated from it."""

import runpy
from pathlib import Path

from redline.deploy.settings import reference, settings
from tests.test_house import KEYS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_keys_is_the_generated_one():
    program = runpy.run_path(str(DOCS / "keys.py"))
    page = (DOCS / "serve.md").read_text()
    assert page == program["generated"](page), "run `python docs/keys.py`"
    assert page.count("<!-- keys of ") == page.count("<!-- end -->") == 11


def test_every_key_has_a_meaning_and_a_row():
    keys = set(KEYS.split()) - {"engine.speculation.type"}
    assert not [key for key in keys if not settings()[key].meaning]
    rows = {key: reference(key.rpartition(".")[0]) for key in keys}
    assert not [key for key, table in rows.items() if f"| `{key.rpartition('.')[2]} = " not in table]


def test_a_row_tells_type_default_range_and_meaning():
    rows = {line.split(" = ")[0]: line for line in reference("engine").splitlines()}
    assert rows["| `kv_memory"].startswith(
        '| `kv_memory = "8GB"` | size | a quarter of the free memory, at most 4 GiB;'
    )
    assert rows["| `max_running"] == "| `max_running = 64` | integer | `64` | 1 to 4,096 | Maximum batch size |"
    assert "| `prefill`, `decode` |" in reference("workers").replace("`both`, ", "")
