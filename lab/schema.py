"""schemathesis on the OpenAPI document of a running server: valid and invalid requests generated from it, and answers
checked against it.

    python -m lab.schema PYTHON http://127.0.0.1:8000 --examples 50 --log run.txt

PYTHON is the interpreter of an environment that has schemathesis, which is not a dependency of ours. It reports a
status of 500 or more, and an answer with a status, type or body that `/openapi.json` does not declare. 504 is not an
error: some requests set a timeout of a millisecond. The exit code is that of schemathesis: 0 if it finds nothing.

An answer may fill the context if its request has no limit. For a short run, set `requests.default_max_tokens` and
`most_max_tokens` in the server's deployment.
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
    """The command line of schemathesis. config: a file with `CONFIG`. address: of the server.

    examples: maximum requests of each kind for a route.
    """
    words = ["run", f"{address}/openapi.json", "--checks", CHECKS, "--max-examples", str(examples)]
    words += ["--seed", str(seed), "--request-timeout", str(ANSWER_S), "--generation-database", "none", "--no-color"]
    return [python, "-m", "schemathesis.cli", "--config-file", str(config), *words]


def main(words: Sequence[str] | None = None) -> int:
    """Run it, print its output, and write it to the log, without the path of the interpreter."""
    parser = argparse.ArgumentParser(prog="python -m lab.schema")
    parser.add_argument("python", help="interpreter of an environment that has schemathesis")
    parser.add_argument("address", help="of the server, as http://127.0.0.1:8000")
    parser.add_argument("--examples", type=int, default=50, help="maximum requests of each kind for a route")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="a file for the output")
    how = parser.parse_args(words)
    with TemporaryDirectory() as folder:  # it writes its own files there too
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
