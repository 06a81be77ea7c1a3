"""The unit for systemd and the manifests for Kubernetes: `redline serve` accepts their flags, and has time to end."""

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from redline.deploy.config import ServeConfig, read
from tests.operators.queries import EXAMPLES
from tests.test_house import flags
from tests_operators.image import instructions

WORKER_END_S = 15  # docs/guides/operate.md


def served(words: list[str]) -> None:
    """Check that `redline serve` has each flag."""
    verb, deployment, *rest = words
    assert (verb, deployment) == ("serve", "/etc/redline/deployment.toml")
    assert {word for word in rest if word.startswith("--")} <= flags()["serve"]


def test_the_unit_runs_redline_and_waits_for_its_end():
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((EXAMPLES / "redline.service").read_text())
    service = unit["Service"]
    program, *words = service["ExecStart"].split()
    assert Path(program).name == "redline"
    served(words)
    example = (EXAMPLES.parents[1] / "docs" / "guides" / "operate.md").read_text()
    drain = re.search(r"^    drain_s = (\d+)$", example, re.MULTILINE)
    assert drain is not None
    assert int(service["TimeoutStopSec"]) > int(drain[1]) + WORKER_END_S
    assert service["KillMode"] == "mixed", "SIGTERM is sent to the server only, which ends its workers"


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / "kubernetes.yml").read_text())}


@pytest.fixture
def deployment(manifests: dict[str, Any], tmp_path: Path) -> ServeConfig:
    text: str = manifests["ConfigMap"]["data"]["deployment.toml"]
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    (tmp_path / "keys.txt").write_text("alice sk-0123456789abcdef\n")
    text = text.replace("/srv/kimi-k2.6", f"{tmp_path}/weights").replace("/etc/redline-keys", str(tmp_path))
    (tmp_path / "deployment.toml").write_text(text)
    return read(tmp_path / "deployment.toml", {})


def test_the_manifests_hold_together_and_leave_time_to_drain(manifests: dict[str, Any], deployment: ServeConfig):
    pod = manifests["Deployment"]["spec"]["template"]
    spec = pod["spec"]
    (container,) = spec["containers"]
    served(container["args"])
    assert spec["terminationGracePeriodSeconds"] > deployment.drain_s + WORKER_END_S
    assert container["resources"]["limits"]["nvidia.com/gpu"] == deployment.engine.ranks
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert str(ports["http"]) == container["args"][container["args"].index("--port") + 1]
    assert ports["metrics"] == deployment.metrics_port == int(pod["metadata"]["annotations"]["prometheus.io/port"])
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/health",
    }  # fmt: skip
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    labels = pod["metadata"]["labels"]
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert manifests["Service"]["spec"]["selector"] == labels
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] in ports


def test_the_manifests_run_the_image_of_the_dockerfile_as_its_user(manifests: dict[str, Any]):
    steps = instructions((EXAMPLES / "Dockerfile").read_text())
    (user,) = (rest for name, rest in steps if name == "USER")
    assert manifests["Deployment"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == int(user)
    assert ("ENTRYPOINT", '["redline"]') in steps, "args are its arguments"
