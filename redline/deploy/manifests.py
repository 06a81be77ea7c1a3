"""Kubernetes manifests of a deployment: a server, and for each kind of worker a set of pods with agents that join it.

Each pod with an agent counts as one machine, with one worker; the pods are managed by a LeaderWorkerSet or by Ray. A
manifest contains no secrets: keys are files of a Secret, referenced by its name; the weights are on an existing volume,
referenced by the name of its claim.
"""

import math
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from redline.deploy.config import Cluster, Handoff, KvEvents, ServeConfig, Workers
from redline.deploy.shown import as_file
from redline.errors import ConfigError
from redline.worker.config import EngineConfig, Learned

Manifest = dict[str, Any]

HTTP, JOIN = 8000, 7600  # ports of the server
DASHBOARD = 8265  # of Ray's head; anyone who reaches it can run any code
USER = 10001  # as in examples/operators/Dockerfile
ETC, SECRETS, MODELS = "/etc/redline", "/etc/redline-secrets", "/models"  # mount points in the pods
SHARED_MEMORY = "16Gi"  # limit of a pod's /dev/shm, used by ranks, NCCL and Ray; it counts as the pod's memory
END_S = 30  # grace period of a pod in addition to drain_s
SECRET_FILES = "keys_file", "admin_keys_file", "tls_cert", "tls_key"
TAKEN = "server", "join"
NOWHERE = {  # keys of files that a pod has no persistent place for
    "responses_file": "answers would be lost with the pod",
    "unix_socket": "it cannot be reached from outside the pod",
}


class Around(NamedTuple):
    """Names of existing objects of the Kubernetes cluster, which the deployment file does not contain."""

    image: str
    name: str = "redline"  # prefix of the names of all objects
    claim: str = "redline-weights"  # a PersistentVolumeClaim with the folders of the weights and the drafter
    secret: str = "redline"  # a Secret with cluster.key, and the files that the deployment names


def rendered(config: ServeConfig, kind: str, cluster: Around) -> list[Manifest]:
    """Manifests of the server, of the controllers of the workers' pods, and of the objects that both need.

    kind: "leaderworkerset": a Deployment, and a LeaderWorkerSet for each kind of worker. "kuberay": a RayJob, with a
    cluster in which Ray starts the agents. Raises ConfigError for any other kind, and for keys of the deployment that
    cannot be used in Kubernetes.
    """
    if kind not in ("leaderworkerset", "kuberay"):
        raise ConfigError(f"--kind is {kind!r}; expected leaderworkerset or kuberay")
    by_ray = kind == "kuberay"
    _check(config, cluster)
    if by_ray:
        _check_bundles(config)
        kept = [_ray_job(config, cluster)]
    else:
        sets = (_leader_worker_set(config, workers, cluster) for workers in _kinds(config))
        kept = [_deployment(config, cluster), *sets]
    file = as_file(_inside(config, cluster, by_ray=by_ray))
    return [
        _object("v1", "ConfigMap", cluster.name, cluster, data={"deployment.toml": file}),
        *_services(config, cluster, joined=not by_ray),
        _network_policy(config, cluster, by_ray=by_ray),
        *kept,
    ]


def as_yaml(manifests: list[Manifest]) -> str:
    """YAML for `kubectl apply`. Raises ConfigError if PyYAML is not installed."""
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise ConfigError("manifests need PyYAML: pip install 'redline[manifests]'") from None

    def text(dumper: Any, value: str) -> Any:  # multi-line strings as block scalars
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    def twice(*_: Any) -> bool:  # no YAML anchors: shared objects are written out at every place
        return True

    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": twice})
    yaml.add_representer(str, text, dumper)
    return yaml.dump_all(manifests, Dumper=dumper, sort_keys=False, width=110)


# ---------------------------------------------------------------------------------------------------------- checks


def _check(config: ServeConfig, cluster: Around) -> None:
    label, most = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"), 30
    for flag, text in (("--name", cluster.name), *(("workers.name", _name(kind)) for kind in _kinds(config))):
        if label.fullmatch(text) is None or len(text) > most:
            raise ConfigError(f"{flag} is {text!r}; Kubernetes allows a-z, 0-9 and -, at most {most} of them")
        if text in TAKEN:
            raise ConfigError(f"{flag} is {text}, a name that the manifests use themselves; choose another")
    for key in ("admin_port", "metrics_port"):
        if (port := getattr(config, key)) in (HTTP, JOIN):
            raise ConfigError(f"{key} is {port}, which the server's pod uses for HTTP ({HTTP}) or agents ({JOIN})")
    for key, why in NOWHERE.items():
        if getattr(config, key) is not None:
            raise ConfigError(f"{key}: {why}; leave it out of the file that manifests are made from")
    events = config.events
    if events is not None and any(address.startswith("ipc://") for address in (events.endpoint, events.replay or "")):
        raise ConfigError("events: pods share no file system; give tcp://*:PORT, a port of each pod")
    drafts = config.engine.speculation
    if drafts is not None and drafts.trace is not None:
        raise ConfigError("engine.speculation.trace: it would be lost with the pod; leave it out")
    if config.engine.synthetic_rates():
        raise ConfigError("engine.speculation.synthetic_acceptance is for benchmarks on loopback; leave it out")
    folders = [_folder(config.weights)] + ([_folder(drafts.drafter)] if isinstance(drafts, Learned) else [])
    if len(set(folders)) < len(folders):
        raise ConfigError(f"weights and drafter are both called {folders[0]}; on the volume their names must differ")


def _check_bundles(config: ServeConfig) -> None:
    """Raise ConfigError for kinds of workers with different resources, as Ray could place a small worker in a large pod
    and leave none for the large worker; and for `least`, as Ray keeps all pods running."""
    if any(kind.least is not None for kind in _kinds(config)):
        raise ConfigError("workers.least: Ray keeps a pod for each worker; use --kind leaderworkerset, or leave it out")
    wanted = {_name(kind): _resources(kind) for kind in _kinds(config)}
    if len({str(resources) for resources in wanted.values()}) > 1:
        each = ", ".join(f"{name} {resources}" for name, resources in wanted.items())
        raise ConfigError(
            f"[[workers]] need different pods, which Ray does not distinguish: {each}; use --kind leaderworkerset"
        )


# -------------------------------------------------------------------------------------------- the deployment's file


def _kinds(config: ServeConfig) -> tuple[Workers, ...]:
    return config.workers or (Workers(engine=config.engine),)


def _name(kind: Workers) -> str:
    return kind.name or {"both": "worker"}.get(kind.role, kind.role)


def _folder(path: str) -> str:
    return Path(path).resolve().name


def _inside(config: ServeConfig, cluster: Around, *, by_ray: bool) -> ServeConfig:
    """The deployment for the server's pod: with the pod's paths and ports, and the name of a pod as each worker's
    machine, unless Ray places the workers."""
    workers: list[Workers] = []
    for kind in _kinds(config):
        for number in range(kind.count):
            workers.append(
                Workers(
                    role=kind.role,
                    name=_name(kind) if kind.count == 1 else f"{_name(kind)}-{number}",
                    least=None if kind.least is None or number < kind.least else 0,
                    engine=_engine_inside(kind.engine),
                    at=None if by_ray else f"{cluster.name}-{_name(kind)}-{number}",
                )
            )
    handed_over = config.steer is not None or any(kind.role == "prefill" for kind in workers)
    return msgspec.structs.replace(
        config,
        weights=f"{MODELS}/{_folder(config.weights)}",
        host="0.0.0.0",
        port=HTTP,
        engine=_engine_inside(config.engine),
        handoff=Handoff(transport="nixl") if handed_over else config.handoff,  # pods do not share memory
        cluster=Cluster(listen="", key_file=f"{SECRETS}/cluster.key", kind="ray" if by_ray else "agents"),
        workers=tuple(workers),
        events=_events_inside(config.events),
        **{key: f"{SECRETS}/{Path(path).name}" for key, path in _secret_files(config)},
    )


def _engine_inside(engine: EngineConfig) -> EngineConfig:
    drafts = engine.speculation
    if not isinstance(drafts, Learned):
        return engine
    inside = msgspec.structs.replace(drafts, drafter=f"{MODELS}/{_folder(drafts.drafter)}")
    return msgspec.structs.replace(engine, speculation=inside)


def _secret_files(config: ServeConfig) -> Iterator[tuple[str, str]]:
    return ((key, path) for key in SECRET_FILES if (path := getattr(config, key)) is not None)


# --------------------------------------------------------------------------------------------------------- objects


def _labels(cluster: Around, component: str | None = None) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "redline", "app.kubernetes.io/instance": cluster.name}
    return labels if component is None else labels | {"app.kubernetes.io/component": component}


def _object(api: str, kind: str, name: str, cluster: Around, **more: Any) -> Manifest:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": _labels(cluster)}, **more}


def _services(config: ServeConfig, cluster: Around, *, joined: bool) -> Iterator[Manifest]:
    """The HTTP service; with `joined`, also the one through which agents find the server."""
    selector = _labels(cluster, "server")
    ports = [{"name": "http", "port": HTTP, "targetPort": "http"}]
    if config.metrics_port:
        ports.append({"name": "metrics", "port": config.metrics_port, "targetPort": config.metrics_port})
    yield _object("v1", "Service", cluster.name, cluster, spec={"selector": selector, "ports": ports})
    if not joined:
        return  # Ray passes the server's address to agents
    # The server becomes ready after its workers, which find it through this service: publish unready addresses.
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [{"name": "join", "port": JOIN, "targetPort": "join"}],
    }
    yield _object("v1", "Service", f"{cluster.name}-join", cluster, spec=spec)


def _network_policy(config: ServeConfig, cluster: Around, *, by_ray: bool) -> Manifest:
    """Pods of the deployment may reach one another at every port, since workers choose any. Others may reach HTTP only,
    except that the KubeRay operator submits the job, and pods of the namespace may subscribe to [events]."""
    ports = [{"port": port, "protocol": "TCP"} for port in ("http", config.metrics_port) if port]
    own: Manifest = {"from": [{"podSelector": {"matchLabels": _labels(cluster)}}]}
    ingress: list[Manifest] = [own, {"ports": ports}]
    if events := _event_ports(config):
        told = [{"port": first, "endPort": last, "protocol": "TCP"} for first, last in events]
        ingress.append({"from": [{"podSelector": {}}], "ports": told})
    if by_ray:
        operator = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
        jobs = {"from": [{"namespaceSelector": {}, **operator}], "ports": [{"port": DASHBOARD, "protocol": "TCP"}]}
        ingress.append(jobs)
    spec = {"podSelector": {"matchLabels": _labels(cluster)}, "policyTypes": ["Ingress"], "ingress": ingress}
    return _object("networking.k8s.io/v1", "NetworkPolicy", cluster.name, cluster, spec=spec)


def _event_ports(config: ServeConfig) -> list[tuple[int, int]]:
    """First and last port of the workers' KV cache events, and of their replay endpoints."""
    told = [place.events for place in config.places if place.events is not None]
    pairs = [(each.endpoint, each.replay) for each in (told[0], told[-1])] if told else []
    return [
        (int(first.rpartition(":")[2]), int(last.rpartition(":")[2]))
        for first, last in zip(*pairs, strict=True)
        if first is not None and last is not None
    ]


def _events_inside(events: KvEvents | None) -> KvEvents | None:
    """[events] with the same ports, bound to all addresses of each worker's pod."""
    if events is None:
        return None
    at = [None if each is None else f"tcp://*:{each.rpartition(':')[2]}" for each in (events.endpoint, events.replay)]
    return msgspec.structs.replace(events, endpoint=at[0], replay=at[1])


def _deployment(config: ServeConfig, cluster: Around) -> Manifest:
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # agents can only join one server
        "selector": {"matchLabels": _labels(cluster, "server")},
        "template": _server_pod(config, cluster),
    }
    return _object("apps/v1", "Deployment", cluster.name, cluster, spec=spec)


def _leader_worker_set(config: ServeConfig, kind: Workers, cluster: Around) -> Manifest:
    """Groups of one pod each, as a worker has one machine. A pod's name is that of its set and its number."""
    arguments = ["agent", "--join", f"tcp://{cluster.name}-join:{JOIN}", "--key-file", f"{SECRETS}/cluster.key"]
    container = _container("agent", [*arguments, "--name", "$(POD_NAME)", "--listen", "$(POD_IP)"], cluster)
    container |= {"resources": _resources(kind)}
    spec = {
        "replicas": kind.count,
        "leaderWorkerTemplate": {
            "size": 1,
            "restartPolicy": "None",  # a restarted agent joins again by itself
            "workerTemplate": _pod(config, cluster, _name(kind), container, ("cluster.key",)),
        },
    }
    name = f"{cluster.name}-{_name(kind)}"
    return _object("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, cluster, spec=spec)


def _ray_job(config: ServeConfig, cluster: Around) -> Manifest:
    """A RayJob that runs the server in the head's pod; its cluster has a group of pods for each kind of worker."""
    head = _serving_pod(config, cluster, _container("ray-head", [], cluster))
    head["spec"]["containers"][0]["ports"] += [
        {"name": name, "containerPort": port}
        for name, port in (("gcs-server", 6379), ("dashboard", DASHBOARD), ("client", 10001))
    ]
    groups = [
        {
            "groupName": _name(kind),
            "replicas": kind.count,
            "minReplicas": kind.count,
            "maxReplicas": kind.count,
            "rayStartParams": {
                "num-cpus": str(kind.engine.ranks)
            },  # those of its bundle, so that a pod fits one bundle
            "template": _pod(config, cluster, _name(kind), _ray_worker(kind, cluster), ("cluster.key",)),
        }
        for kind in _kinds(config)
    ]
    spec = {
        "entrypoint": f"redline serve {ETC}/deployment.toml --set cluster.listen=$POD_IP:{JOIN}",
        "submissionMode": "HTTPMode",  # without a submitter pod, which would need its own image
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": head},
            "workerGroupSpecs": groups,
        },
    }
    return _object("ray.io/v1", "RayJob", cluster.name, cluster, spec=spec)


# ------------------------------------------------------------------------------------------------------------ pods


def _ray_worker(kind: Workers, cluster: Around) -> Manifest:
    return _container("ray-worker", [], cluster) | {"resources": _resources(kind)}


def _server_pod(config: ServeConfig, cluster: Around) -> Manifest:
    arguments = ["serve", f"{ETC}/deployment.toml", "--set", f"cluster.listen=$(POD_IP):{JOIN}"]
    container = _container("server", arguments, cluster)
    scheme = "HTTP" if config.tls_cert is None else "HTTPS"
    live, health = ({"path": path, "port": "http", "scheme": scheme} for path in ("/live", "/health"))
    # Liveness of the process: loading a model takes minutes, and must not cause a restart.
    container["startupProbe"] = {"httpGet": live, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 30}
    container["livenessProbe"] = {"httpGet": live, "periodSeconds": 10, "timeoutSeconds": 5}
    # Readiness of the model: no requests before it is loaded, and none while the server drains.
    container["readinessProbe"] = {"httpGet": health, "periodSeconds": 5, "timeoutSeconds": 5}
    return _serving_pod(config, cluster, container)


def _serving_pod(config: ServeConfig, cluster: Around, container: Manifest) -> Manifest:
    """A pod with the deployment file and all its secrets."""
    container["ports"] = [{"name": "http", "containerPort": HTTP}, {"name": "join", "containerPort": JOIN}]
    container["volumeMounts"].append({"name": "config", "mountPath": ETC, "readOnly": True})
    files = ("cluster.key", *(Path(path).name for _, path in _secret_files(config)))
    pod = _pod(config, cluster, "server", container, files)
    pod["spec"]["volumes"].append({"name": "config", "configMap": {"name": cluster.name}})
    return pod


def _container(name: str, arguments: list[str], cluster: Around) -> Manifest:
    """arguments: of `redline`; empty: the pod's controller sets the command."""
    return {
        "name": name,
        "image": cluster.image,
        **({"args": arguments} if arguments else {}),
        "env": [_of_the_pod("POD_NAME", "metadata.name"), _of_the_pod("POD_IP", "status.podIP")],
        "volumeMounts": [
            {"name": "weights", "mountPath": MODELS, "readOnly": True},
            {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": "/home/redline/.cache"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _of_the_pod(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _pod(
    config: ServeConfig, cluster: Around, component: str, container: Manifest, secrets: tuple[str, ...]
) -> Manifest:
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": math.ceil(config.drain_s) + END_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "weights", "persistentVolumeClaim": {"claimName": cluster.claim, "readOnly": True}},
            {
                "name": "secrets",
                "secret": {
                    "secretName": cluster.secret,
                    "defaultMode": 0o440,  # readable by the pod's group: a world-readable key is refused
                    "items": [{"key": name, "path": name} for name in dict.fromkeys(secrets)],
                },
            },
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
            {"name": "cache", "emptyDir": {}},
        ],
    }
    return {"metadata": {"labels": _labels(cluster, component)}, "spec": spec}


def _resources(kind: Workers) -> Manifest:
    """GPUs by `devices`, else by `ranks`; with device = "cpu", CPUs by `cores`, else by `ranks`."""
    if kind.engine.device == "cpu":
        return {"requests": {"cpu": str(len(kind.cores) or kind.engine.ranks)}}
    gpus = len(kind.devices) // kind.count or kind.engine.ranks
    return {"limits": {"nvidia.com/gpu": str(gpus)}}
