"""schemathesis on the document of a running server: requests made from it, right and wrong, and answers held to it.

    python -m lab.schema PYTHON http://127.0.0.1:8000 --examples 50 --log run.txt

PYTHON is the interpreter of an environment that has schemathesis, which is no dependency of ours. What it looks for:
a status of 500 or more, and an answer whose status, type or body is not what `/openapi.json` says. 504 is no fault:
some requests give the server a millisecond. The exit code is its own: 0 where it finds nothing.

An answer may be as long as the context, where its request says nothing. For a run that is to end soon, let the server's
deployment say `requests.default_max_tokens` and `most_max_tokens`.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ANSWER_S = 60
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", 504]
"""


def command(python: str, config: Path, address: str, examples: int, seed: int) -> list[str]:
    """The call of schemathesis. config: a file that says `CONFIG`. address: where the server answers.

    examples: most requests of each kind a route.
    """
    words = ["run", f"{address}/openapi.json", "--checks", CHECKS, "--max-examples", str(examples)]
    words += ["--seed", str(seed), "--request-timeout", str(ANSWER_S), "--generation-database", "none", "--no-color"]
    return [python, "-m", "schemathesis.cli", "--config-file", str(config), *words]


def main(words: Sequence[str] | None = None) -> int:
    """Run it, tell what it says, and write that to the log, without the path of the interpreter."""
    parser = argparse.ArgumentParser(prog="python -m lab.schema")
    parser.add_argument("python", help="interpreter of an environment that has schemathesis")
    parser.add_argument("address", help="of the server, as http://127.0.0.1:8000")
    parser.add_argument("--examples", type=int, default=50, help="most requests of each kind a route")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="a file that gets what it says")
    how = parser.parse_args(words)
    with TemporaryDirectory() as folder:  # where it leaves its own files too
        config = Path(folder) / "schemathesis.toml"
        config.write_text(CONFIG, encoding="utf-8")
        run = subprocess.run(
            command(how.python, config, how.address.rstrip("/"), how.examples, how.seed),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    sys.stdout.write(run.stdout)
    if how.log is not None:
        how.log.write_text(run.stdout.replace(folder, "FOLDER"), encoding="utf-8")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
