"""/metrics on a port of its own, where no key is asked for: a scraper has none, and the network says who reaches it."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from redline.api.app import Border
from redline.api.config import ApiConfig
from redline.api.edge import Edge
from redline.api.gateway import Gateway
from redline.api.metrics import CONTENT_TYPE


def create_metrics_app(gateway: Gateway, config: ApiConfig) -> ASGIApp:
    """GET /metrics and nothing else. config: of this port, without a keys_file."""

    async def metrics(request: Request) -> Response:
        return Response(gateway.metrics.expose(), headers={"content-type": CONTENT_TYPE})

    return Border(Router([Route("/metrics", metrics)], redirect_slashes=False), Edge(config), config, gateway.metrics)
