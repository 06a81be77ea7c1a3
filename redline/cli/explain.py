"""`redline explain`: why a request went where it did, and what was expected of it beside what came."""

from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from redline.cli.admin import ask
from redline.cli.terminal import one_line
from redline.errors import ConfigError


def asked(request: str, url: str, key: str | None) -> dict[str, Any]:
    """What the admin routes tell of a request. Raises ConfigError where nobody answers, or nothing is known of it."""
    try:
        return ask("GET", url, f"/admin/requests/{quote(request, safe='')}", key).json()
    except ValueError:
        raise ConfigError(f"no admin routes at {url}; a deployment's admin_port says where they are") from None


def show(told: dict[str, Any], console: Console) -> int:
    """Prints it: 0."""
    for job in told["jobs"]:
        at = f", at {one_line(str(job['replica']))}" if "replica" in job else ""
        console.print(
            f"choice {job['choice']}: {job['prompt_tokens']:,} prompt tokens{at}", style="bold", highlight=False
        )
        for sent in job["sent"]:
            moved = f" ({one_line(sent['moved_because'])})" if sent["moved_because"] else ""
            console.print(
                f"  {sent['at_s']:.3f} s  to {sent['worker']}{moved}: {one_line(sent['why'])}", highlight=False
            )
            table = Table(
                "",
                "cached",
                "to compute",
                "waiting there",
                "forgotten for it",
                "answers",
                "first token expected",
                box=None,
            )
            for each in (sent["expected"], *sent["instead"]):
                chosen = each is sent["expected"]
                row = ("cached_tokens", "uncached_tokens", "queue_tokens", "forgotten_tokens", "answers")
                table.add_row(
                    ("> " if chosen else "  ") + one_line(str(each["worker"])),
                    *(f"{each[name]:,}" for name in row),
                    f"{each['first_token_s']:.3f} s",
                    style="" if chosen else "dim",
                )
            console.print(table)
        for line in _lines(job):
            console.print(f"  {line}", highlight=False)
    return 0


def _lines(job: dict[str, Any]) -> list[str]:
    """What came of a job."""
    found: list[str] = []
    if job["first_token_s"] is None:
        return ["no token has come" + ("" if job["finish"] is None else f"; it ended: {job['finish']}")]
    since = job["first_token_since_sent_s"]
    queued = f", {job['queued_s']:.3f} of them in the queue" if job["queued_s"] else ""
    found.append(
        f"{job['first_token_s']:.3f} s  first token, {since:.3f} s after it was sent{queued}; "
        f"{job['cached_tokens']:,} tokens were cached"
    )
    drafts = job["drafts"]
    if drafts["rounds"]:
        each = drafts["verified"] / drafts["rounds"]
        share = drafts["accepted"] / max(1, drafts["verified"])
        found.append(f"drafts: {each:.1f} in each of {drafts['rounds']:,} steps, of which {share:.0%} held")
    if job["ended_s"] is not None:
        found.append(f"{job['ended_s']:.3f} s  {job['finish']}, after {job['tokens']:,} tokens")
    return found
