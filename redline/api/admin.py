"""Routes for whoever runs the server, on a port and with keys of their own: its status, its end, its keys."""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from redline.api.app import Border, json_response
from redline.api.config import ApiConfig
from redline.api.edge import Edge
from redline.api.gateway import Gateway
from redline.api.stories import MOST_JOBS


def create_admin_app(
    gateway: Gateway,
    edge: Edge,
    config: ApiConfig,
    drain: Callable[[], None],
    replace: Callable[[str], bool] = lambda _: False,
) -> ASGIApp:
    """The admin routes. edge: of the server that they are about. config: of these routes, with their own keys_file.

    drain: begins the server's end. replace: a worker of that name; False where there is none. Raises ConfigError where
    the keys' file cannot be read or is empty.
    """
    admin = _Admin(gateway, edge, drain, replace)
    routes = [
        Route("/admin/status", admin.status),
        Route("/admin/requests/{id:path}", admin.request),
        Route("/admin/drain", admin.drain, methods=["POST"]),
        Route("/admin/reload", admin.reload, methods=["POST"]),
        Route("/admin/workers/{name}/replace", admin.replace, methods=["POST"]),
    ]
    return Border(Router(routes, redirect_slashes=False), Edge(config), config, gateway.metrics)


class _Admin:
    def __init__(self, gateway: Gateway, edge: Edge, drain: Callable[[], None], replace: Callable[[str], bool]) -> None:
        self._gateway = gateway
        self._edge = edge
        self._drain = drain
        self._replace = replace

    async def status(self, request: Request) -> Response:
        """The queue, each worker's rows and pages, and what each name has used and may still use."""
        gateway, keyring = self._gateway, self._edge.keyring
        jobs, tokens = gateway.waiting
        links = gateway.links
        accounts = {} if keyring is None else keyring.accounts
        return json_response(
            {
                "ready": gateway.ready is not None and links.trouble is None and self._edge.draining is None,
                "draining": self._edge.draining,
                "trouble": links.lost or links.trouble,
                "queue": {
                    "jobs": jobs,
                    "tokens": tokens,
                    "tokens_per_s": round(gateway.served_per_s, 1),
                    "retry_s": round(gateway.retry_s, 1),
                },
                "running": gateway.running,
                "workers": {
                    link.name: {
                        "role": link.role,
                        "epoch": link.epoch,
                        "pid": link.pid,
                        "at": link.at,
                        "ready": link.ready is not None,
                        "lost": link.lost,
                        "lost_before": link.before,
                        "draining": link.draining,
                        "silent_s": round(links.silent_s(link), 1),
                        "jobs": link.jobs,
                        "load": None if link.load is None else msgspec.to_builtins(link.load),
                    }
                    for link in links
                },
                "keys": {
                    name: {
                        "running": account.running,
                        "requests": account.requests,
                        "tokens": account.tokens,
                        "limits": msgspec.structs.asdict(account.limits),
                        "left": account.left(),
                    }
                    for name, account in accounts.items()
                },
            }
        )

    async def request(self, request: Request) -> Response:
        """Who got the jobs of a request, why, what was expected of it and what came."""
        id = request.path_params["id"]
        stories = self._gateway.stories.of(id)
        if not stories:
            known = f"the last {MOST_JOBS:,} jobs are kept, and none from before the start"
            return json_response({"error": f"nothing is known of request {id}: {known}"}, 404)
        return json_response({"request": id, "jobs": [story.told() for story in stories]})

    async def drain(self, request: Request) -> Response:
        """Take no new requests, let running answers end within drain_s, and end the server."""
        self._drain()
        return json_response({"status": "draining", "drain_s": self._edge.drain_s})

    async def replace(self, request: Request) -> Response:
        """Let a worker end its answers within drain_s, have another go on with the rest, and start it again."""
        name = request.path_params["name"]
        if not self._replace(name):
            known = ", ".join(link.name for link in self._gateway.links)
            return json_response({"error": f"no worker is called {name}; there are {known}"}, 404)
        return json_response({"status": "draining", "worker": name, "drain_s": self._edge.drain_s})

    async def reload(self, request: Request) -> Response:
        """Read the file of keys again."""
        return json_response({"message": self._edge.reload()})
