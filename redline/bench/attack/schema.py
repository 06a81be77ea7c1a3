"""schemathesis on the document of a running server: requests made from it, right and wrong, and answers held to it.

    python -m redline.bench.attack.schema PYTHON http://127.0.0.1:8000 --examples 50 --log run.txt

PYTHON is the interpreter of an environment that has schemathesis, which is no dependency of ours. What it looks for:
a status of 500 or more, and an answer whose status, type or body is not what `/openapi.json` says. The exit code is its
own: 0 where it finds nothing.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ANSWER_S = 60  # an answer may be as long as the context


def command(python: str, address: str, examples: int, seed: int) -> list[str]:
    """The call of schemathesis. address: where the server answers. examples: most requests of each kind a route."""
    words = ["run", f"{address}/openapi.json", "--checks", CHECKS, "--max-examples", str(examples)]
    words += ["--seed", str(seed), "--request-timeout", str(ANSWER_S), "--generation-database", "none", "--no-color"]
    return [python, "-m", "schemathesis.cli", *words]


def main(words: Sequence[str] | None = None) -> int:
    """Run it, tell what it says, and write that to the log, without the path of the interpreter."""
    parser = argparse.ArgumentParser(prog="python -m redline.bench.attack.schema")
    parser.add_argument("python", help="interpreter of an environment that has schemathesis")
    parser.add_argument("address", help="of the server, as http://127.0.0.1:8000")
    parser.add_argument("--examples", type=int, default=50, help="most requests of each kind a route")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="a file that gets what it says")
    how = parser.parse_args(words)
    run = subprocess.run(
        command(how.python, how.address.rstrip("/"), how.examples, how.seed),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stdout.write(run.stdout)
    if how.log is not None:
        how.log.write_text(run.stdout, encoding="utf-8")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
