"""The deployments in `examples/` are accepted as they are, on any machine."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from redline.cli import app

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_deployment_is_accepted_and_every_line_of_a_models_settings_is_explained(example: Path) -> None:
    done = CliRunner().invoke(app, ["config", str(example)])
    assert done.exit_code == 0, done.output
    if example.stem.startswith("kimi-"):
        settings = [line for line in example.read_text().splitlines() if "=" in line and not line.startswith("#")]
        bare = [line for line in settings if "#" not in line and not line.startswith(("drafter", "devices"))]
        assert settings
        assert not bare
