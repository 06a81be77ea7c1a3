"""/metrics on its own port, without keys: scrapers have none, and the network controls who reaches the port."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from redline.api.app import ErrorMiddleware
from redline.api.auth.auth_state import AuthState
from redline.api.config import ApiConfig
from redline.api.telemetry.metrics import CONTENT_TYPE, Metrics


def create_metrics_app(
    metrics: Metrics, config: ApiConfig, scrape: Callable[[], Awaitable[bytes]] | None = None
) -> ASGIApp:
    """GET /metrics and nothing else. config: of this port, without a keys_file. metrics: counts this port's requests.

    scrape: returns the text; None: `metrics` does.
    """

    async def text(request: Request) -> Response:
        return Response(metrics.expose() if scrape is None else await scrape(), headers={"content-type": CONTENT_TYPE})

    return ErrorMiddleware(
        Router([Route("/metrics", text)], redirect_slashes=False), AuthState(config), config, metrics
    )
