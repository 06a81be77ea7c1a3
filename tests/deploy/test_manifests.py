"""Manifests of a deployment: the expected files, Kubernetes' own schemas, and what must not be in them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml

from redline.cli import app
from redline.cli.deploy import ManifestsFlags, manifests
from redline.deploy.by_ray import bundle_of
from redline.deploy.config import read
from redline.deploy.manifests import Around, as_yaml, rendered
from redline.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "manifests"
GPU = "nvidia.com/gpu"
VERSIONS = "1.31", "1.37"  # versions of Kubernetes
KEY = "sk-0123456789abcdef"
KINDS = "leaderworkerset", "kuberay"

WHOLE = """
weights = "kimi-k2.6"
keys_file = "keys.txt"
admin_port = 8001
admin_keys_file = "admin.txt"
tls_cert = "cert.pem"
tls_key = "key.pem"
metrics_port = 9090
drain_s = 119.5
served_model_name = ["kimi", 'k2 "six"']
[per_key]
concurrency = 16
[requests]
timeout_s = 600.0
[engine]
ranks = 8
kv_dtype = "fp8"
[engine.speculation]
type = "learned"
drafter = "kimi-k2.6-eagle3"
[[workers]]
role = "prefill"
name = "prompts"
count = 2
devices = [0, 1, 2, 3, 4, 5, 6, 7]
engine = { step_tokens = 4096, ranks = 4 }
[[workers]]
role = "decode"
count = 3
"""

# The custom resources' own fields, from the reference of each; pod templates have Kubernetes' schema (`in_pods`).
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["replicas", "leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "leaderWorkerTemplate": {
            "type": "object",
            "additionalProperties": False,
            "required": ["workerTemplate"],
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                "workerTemplate": {"type": "object"},
            },
        },
    },
}
START = {"type": "object", "additionalProperties": {"type": "string"}}  # flags of `ray start`
RAY_JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["entrypoint", "rayClusterSpec"],
    "properties": {
        "entrypoint": {"type": "string"},
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        "rayClusterSpec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["headGroupSpec"],
            "properties": {
                "headGroupSpec": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["rayStartParams", "template"],
                    "properties": {"rayStartParams": START, "template": {"type": "object"}},
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                        "properties": {
                            "groupName": {"type": "string"},
                            "replicas": {"type": "integer", "minimum": 0},
                            "minReplicas": {"type": "integer", "minimum": 0},
                            "maxReplicas": {"type": "integer", "minimum": 0},
                            "rayStartParams": START,
                            "template": {"type": "object"},
                        },
                    },
                },
            },
        },
    },
}
OTHERS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
    ("ray.io/v1", "RayJob"): RAY_JOB,
}
ALIKE = WHOLE.replace("ranks = 4", "ranks = 8").replace("devices = [0, 1, 2, 3, 4, 5, 6, 7]\n", "")  # pods of one size


def a_deployment(folder: Path, text: str = WHOLE) -> Path:
    for name in ("keys.txt", "admin.txt", "cert.pem", "key.pem"):
        (folder / name).write_text(f"{KEY}\n")
    (folder / "deployment.toml").write_text(text)
    return folder / "deployment.toml"


def of(folder: Path, text: str = WHOLE, kind: str = "leaderworkerset", **around: Any) -> list[Any]:
    """The documents of a manifest, as kubectl reads them."""
    config = read(a_deployment(folder, text), {})
    return list(yaml.safe_load_all(as_yaml(rendered(config, kind, Around("redline:cuda", **around)))))


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod template in a manifest."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for inner in value.values():
            yield from templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)


def check(manifest: dict[str, Any], version: str) -> None:
    """Raises for a field that is unknown, missing or of a wrong type."""
    own = OTHERS.get((manifest["apiVersion"], manifest["kind"]))
    if own is None:
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest["spec"], own)
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    for template in templates(manifest):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": manifest["metadata"], "template": template}
        kubernetes_validate.validate(pod, version, strict=True)


def kinds(made: list[Any], kind: str) -> list[Any]:
    return [manifest for manifest in made if manifest["kind"] == kind]


def container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_is_rendered_as_the_file_that_is_kept(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of `redline manifests examples/pools.toml --image redline:cuda --kind KIND`."""
    manifests(ManifestsFlags(source=ROOT / "examples" / "pools.toml", image="redline:cuda", kind=kind))
    assert capsys.readouterr().out == (GOLDEN / f"{kind}.yaml").read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_object_is_one_by_its_schema(tmp_path: Path, kind: str, version: str) -> None:
    for manifest in [*of(tmp_path, ALIKE, kind), *of(tmp_path, 'weights = "w"', kind)]:
        check(manifest, version)
        for template in templates(manifest):
            container(template)["imagePullPolicie"] = "Always"
            with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
                check(manifest, version)


def test_the_server_reads_the_deployment_with_each_worker_at_a_pod_of_its_set(tmp_path: Path) -> None:
    made = of(tmp_path)
    (config_map,) = kinds(made, "ConfigMap")
    (tmp_path / "inside").mkdir()
    file = tmp_path / "inside" / "deployment.toml"
    file.write_text(config_map["data"]["deployment.toml"])
    before, inside = read(tmp_path / "deployment.toml", {}), read(file, {"cluster.listen": "10.0.0.1:7600"})
    pods = [
        f"{each['metadata']['name']}-{number}"
        for each in kinds(made, "LeaderWorkerSet")
        for number in range(each["spec"]["replicas"])
    ]
    assert [place.at for place in inside.places] == pods
    assert len(pods) == 5
    assert inside.names == before.names
    assert (inside.drain_s, inside.per_key, inside.requests) == (before.drain_s, before.per_key, before.requests)
    for there, here in zip(inside.places, before.places, strict=True):
        assert (there.name, there.role) == (here.name, here.role)
        assert (there.engine.ranks, there.engine.step_tokens) == (here.engine.ranks, here.engine.step_tokens)
        assert there.weights == "/models/kimi-k2.6"
        assert there.engine.speculation.drafter == "/models/kimi-k2.6-eagle3"  # type: ignore[union-attr]
        assert there.transport == "nixl", "pods share no memory"


SPARES = """
weights = "kimi-k2.6"
[sla.default]
ttft_ms = 2000
[steer]
[[workers]]
count = 3
least = 1
"""


def test_workers_that_need_not_run_are_those_of_the_sets_last_pods(tmp_path: Path) -> None:
    (config_map,) = kinds(of(tmp_path, SPARES), "ConfigMap")
    (tmp_path / "inside").mkdir()
    file = tmp_path / "inside" / "deployment.toml"
    file.write_text(config_map["data"]["deployment.toml"])
    places = read(file, {"cluster.listen": "10.0.0.1:7600"}).places
    assert [(place.at, place.spare) for place in places] == [
        ("redline-worker-0", False), ("redline-worker-1", True), ("redline-worker-2", True)
    ]  # fmt: skip
    assert {place.transport for place in places} == {"nixl"}, "any of them may switch to the prefill role"


def test_ray_has_a_pod_for_each_worker_that_the_server_asks_it_for(tmp_path: Path) -> None:
    made = of(tmp_path, ALIKE, "kuberay")
    (tmp_path / "inside").mkdir()
    file = tmp_path / "inside" / "deployment.toml"
    file.write_text(kinds(made, "ConfigMap")[0]["data"]["deployment.toml"])
    inside = read(file, {"cluster.listen": "10.0.0.1:7600"})
    assert inside.cluster is not None
    assert inside.cluster.kind == "ray"
    (job,) = kinds(made, "RayJob")
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pods = [
        (int(group["rayStartParams"]["num-cpus"]), int(container(group["template"])["resources"]["limits"][GPU]))
        for group in groups
        for _ in range(group["replicas"])
    ]
    assert [(bundle.cpus, bundle.gpus) for bundle in map(bundle_of, inside.places)] == pods
    assert len(pods) == 5
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", (
        "no agent runs on the head node"
    )
    verb, path, *_ = job["spec"]["entrypoint"].removeprefix("redline ").split()
    assert (verb, path) == ("serve", "/etc/redline/deployment.toml")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_secret_is_referred_to_and_each_pod_gets_only_what_it_needs(tmp_path: Path, kind: str) -> None:
    made = of(tmp_path, ALIKE, kind, secret="ours")
    assert KEY not in as_yaml(made)
    every, one = ["cluster.key", "keys.txt", "admin.txt", "cert.pem", "key.pem"], ["cluster.key"]
    names = {"server": every, "ray-head": every, "agent": one, "ray-worker": one}
    for template in templates(made):
        secrets = next(volume["secret"] for volume in template["spec"]["volumes"] if volume["name"] == "secrets")
        assert secrets["secretName"] == "ours"
        assert secrets["defaultMode"] & 0o007 == 0, "other users cannot read it"
        assert [item["key"] for item in secrets["items"]] == names[container(template)["name"]]
        assert {entry["name"] for entry in container(template)["env"] if "value" in entry} == set()
        assert template["spec"]["automountServiceAccountToken"] is False


def test_the_servers_probes_speak_its_protocol(tmp_path: Path) -> None:
    for text, scheme in ((WHOLE, "HTTPS"), ('weights = "w"', "HTTP")):
        (server,) = templates(kinds(of(tmp_path, text), "Deployment"))
        for probe, path in (("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", "/health")):
            assert container(server)[probe]["httpGet"] == {"path": path, "port": "http", "scheme": scheme}
            assert container(server)[probe]["timeoutSeconds"] > 1, (
                "longer than the default of 1 s, in which a busy server may not answer"
            )
        startup = container(server)["startupProbe"]
        assert startup["failureThreshold"] * startup["periodSeconds"] >= 300


@pytest.mark.parametrize("kind", KINDS)
def test_shared_memory_has_a_bound_in_every_pod(tmp_path: Path, kind: str) -> None:
    for pod in templates(of(tmp_path, ALIKE, kind)):
        (memory,) = (each["emptyDir"] for each in pod["spec"]["volumes"] if each["name"] == "memory")
        assert memory == {"medium": "Memory", "sizeLimit": "16Gi"}


def test_the_example_of_one_server_is_as_closed_as_what_is_rendered(tmp_path: Path) -> None:
    file = (ROOT / "examples" / "operators" / "kubernetes.yml").read_text()
    (example,) = (one["spec"]["template"] for one in yaml.safe_load_all(file) if one["kind"] == "Deployment")
    (ours,) = templates(kinds(of(tmp_path, ALIKE), "Deployment"))
    assert example["spec"]["securityContext"] == ours["spec"]["securityContext"]
    assert container(example)["securityContext"] == container(ours)["securityContext"]
    assert example["spec"]["automountServiceAccountToken"] is ours["spec"]["automountServiceAccountToken"] is False


def test_ray_and_a_service_find_the_head_alone(tmp_path: Path) -> None:
    made = of(tmp_path, ALIKE, "kuberay")
    pods = [(container(each)["name"], each["metadata"]["labels"].items()) for each in templates(made)]
    (service,) = kinds(made, "Service")
    assert [name for name, labels in pods if service["spec"]["selector"].items() <= labels] == ["ray-head"]
    (policy,) = kinds(made, "NetworkPolicy")
    *_, everybody, operator = policy["spec"]["ingress"]
    assert 8265 not in [port["port"] for port in everybody["ports"]], "only KubeRay submits jobs"
    assert [port["port"] for port in operator["ports"]] == [8265]
    assert operator["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    assert all(policy["spec"]["podSelector"]["matchLabels"].items() <= labels for _, labels in pods)


def test_selectors_find_the_pods_that_they_mean(tmp_path: Path) -> None:
    made = of(tmp_path, name="k2")
    pods = [(container(each)["name"], each["metadata"]["labels"].items()) for each in templates(made)]
    for service in kinds(made, "Service"):
        assert [name for name, labels in pods if service["spec"]["selector"].items() <= labels] == ["server"]
    (deployment,) = kinds(made, "Deployment")
    assert deployment["spec"]["selector"]["matchLabels"].items() <= dict(pods)["server"]
    (policy,) = kinds(made, "NetworkPolicy")
    assert all(policy["spec"]["podSelector"]["matchLabels"].items() <= labels for _, labels in pods)
    assert [port["port"] for port in policy["spec"]["ingress"][1]["ports"]] == ["http", 9090]
    join = next(service for service in kinds(made, "Service") if service["metadata"]["name"] == "k2-join")
    assert join["spec"]["publishNotReadyAddresses"], "workers join a server that is not ready"
    assert "tcp://k2-join:7600" in container(next(templates(kinds(made, "LeaderWorkerSet"))))["args"]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_of_the_namespace_are_told_the_workers_events(tmp_path: Path, kind: str) -> None:
    text = ALIKE + '[events]\nendpoint = "tcp://127.0.0.1:5557"\nreplay = "tcp://127.0.0.1:6557"\n'
    made = of(tmp_path, text, kind)
    (policy,) = kinds(made, "NetworkPolicy")
    pods = policy["spec"]["ingress"][2]
    assert pods["from"] == [{"podSelector": {}}]
    workers = len(read(tmp_path / "deployment.toml", {}).places)
    assert workers > 1
    ports = [(port["port"], port["endPort"]) for port in pods["ports"]]
    assert ports == [(5557, 5556 + workers), (6557, 6556 + workers)]
    for manifest in made:
        check(manifest, VERSIONS[-1])
    (config_map,) = kinds(made, "ConfigMap")
    (tmp_path / "inside.toml").write_text(config_map["data"]["deployment.toml"])
    inside = read(tmp_path / "inside.toml", {"cluster.listen": "10.0.0.1:7600"})
    told = [place.events for place in inside.places]
    assert [each and (each.endpoint, each.replay) for each in told] == [
        (f"tcp://*:{5557 + number}", f"tcp://*:{6557 + number}") for number in range(workers)
    ]


def test_containers_are_told_flags_that_there_are(tmp_path: Path) -> None:
    verbs: Any = typer.main.get_command(app)
    for template in templates(of(tmp_path)):
        verb, *arguments = container(template)["args"]
        known = {flag for parameter in verbs.commands[verb].params for flag in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= known


@pytest.mark.parametrize(
    ("text", "resources"),
    [
        (WHOLE, [{"limits": {"nvidia.com/gpu": "4"}}, {"limits": {"nvidia.com/gpu": "8"}}]),
        ('weights = "w"', [{"limits": {"nvidia.com/gpu": "1"}}]),
        ('weights = "w"\n[engine]\ndevice = "cpu"\n[[workers]]\ncores = [0, 1]', [{"requests": {"cpu": "2"}}]),
    ],
)
def test_a_worker_gets_the_gpus_of_its_ranks(tmp_path: Path, text: str, resources: list[Any]) -> None:
    sets = kinds(of(tmp_path, text), "LeaderWorkerSet")
    assert [container(template)["resources"] for template in templates(sets)] == resources


def test_a_pod_has_as_long_to_end_as_its_answers_and_then_some(tmp_path: Path) -> None:
    assert {template["spec"]["terminationGracePeriodSeconds"] for template in templates(of(tmp_path))} == {150}


@pytest.mark.parametrize(
    ("text", "around", "why"),
    [
        ('weights = "w"\nresponses_file = "r"', {}, "responses_file: answers would be lost with the pod"),
        ('weights = "w"\nunix_socket = "s"', {}, "unix_socket: it cannot be reached from outside the pod"),
        ('weights = "w"\n[[workers]]\nname = "A"', {}, "workers.name is 'A'; Kubernetes allows a-z"),
        ('weights = "w"\n[[workers]]\nname = "join"', {}, "workers.name is join, a name that the manifests use"),
        ('weights = "w"\nmetrics_port = 7600', {}, "metrics_port is 7600, which the server's pod uses"),
        ('weights = "w"', {"name": "a" * 31}, "--name is 'a+'; Kubernetes allows"),
        ('weights = "w"\n[events]\nendpoint = "ipc:///run/e"', {}, "events: pods share no file system; give tcp"),
        ('weights = "w"', {"kind": "helm"}, "--kind is 'helm'; expected leaderworkerset or kuberay"),
        (SPARES, {"kind": "kuberay"}, "workers.least: Ray keeps a pod for each worker"),
        (WHOLE, {"kind": "kuberay"}, "need different pods, which Ray does not distinguish: prompts .*4.*, decode .*8"),
        (
            'weights = "a/w"\n[engine.speculation]\ntype = "learned"\ndrafter = "b/w"',
            {},
            "weights and drafter are both called w",
        ),
        (
            'weights = "w"\n[engine.speculation]\ntype = "suffix"\ntrace = "t"',
            {},
            "engine.speculation.trace: it would be lost",
        ),
    ],
)
def test_what_a_deployment_cannot_have_there_is_said(tmp_path: Path, text: str, around: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        of(tmp_path, text, **around)
