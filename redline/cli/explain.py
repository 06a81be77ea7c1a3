"""`redline explain`: why a request was routed as it was, with expected and measured latencies."""

from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from redline.cli.admin import ask, no_admin_routes
from redline.cli.terminal import one_line


def asked(request: str, url: str, key: str | None) -> dict[str, Any]:
    """The admin route's data on a request. Raises ConfigError if there is no server, or if the request is unknown."""
    try:
        return ask("GET", url, f"/admin/requests/{quote(request, safe='')}", key).json()
    except ValueError:
        raise no_admin_routes(url, "the answer is not JSON") from None


def show(told: dict[str, Any], console: Console) -> int:
    """Print the data; returns the exit code, 0."""
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
                "evicted for it",
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
    """The lines on a job's progress and result."""
    found: list[str] = []
    if (brought := job["brought"]) is not None:
        found.append(_of_tiers(brought))
    if (images := job["images"]) is not None:
        found.append(_of_images(images))
    pauses = list(zip(job["paused"], [*job["paused"], None][1:], strict=True))
    early = [each for each in pauses if not each[0]["after_tokens"]]  # during prefill
    found += [_of_pause(*each, job["tokens"]) for each in early]
    if job["first_token_s"] is None:
        return [*found, "no token yet" + ("" if job["finish"] is None else f"; it ended: {job['finish']}")]
    since = job["first_token_since_sent_s"]
    queued = f", {job['queued_s']:.3f} of them in the queue" if job["queued_s"] else ""
    found.append(
        f"{job['first_token_s']:.3f} s  first token, {since:.3f} s after it was sent{queued}; "
        f"{job['cached_tokens']:,} tokens were cached"
    )
    if (untold := job["preemptions"] - len(job["paused"])) > 0:
        found.append(f"pre-empted {untold:,} times before the latest {len(job['paused'])}")
    found += [_of_pause(*each, job["tokens"]) for each in pauses if each[0]["after_tokens"]]
    drafts = job["drafts"]
    if drafts["rounds"]:
        each = drafts["verified"] / drafts["rounds"]
        share = drafts["accepted"] / max(1, drafts["verified"])
        found.append(
            f"drafts: {each:.1f} in each of {drafts['rounds']:,} steps, {share:.0%} of them accepted{_of_steps(job)}"
        )
    if job["ended_s"] is not None:
        found.append(f"{job['ended_s']:.3f} s  {job['finish']}, after {job['tokens']:,} tokens")
    return found


def _of_tiers(brought: dict[str, Any]) -> str:
    tokens = " and ".join(
        f"{brought[name]:,} tokens from {where}"
        for name, where in (("host_tokens", "the host's memory"), ("disk_tokens", "the disk"))
        if brought[name]
    )
    compute = brought["compute_expected_s"]
    instead = "" if compute is None else f"; computing them was expected to take {compute:.3f}"
    return f"read {tokens} in {brought['read_s']:.3f} s, expected {brought['read_expected_s']:.3f}{instead}"


def _of_images(images: dict[str, Any]) -> str:
    count, cached = images["images"], images["cached"]
    line = f"{count} image{'s' * (count > 1)} of {images['tokens']:,} tokens"
    if cached == count:
        return f"{line}, encoded for an earlier request"
    of_cached = f"; {cached} encoded for an earlier request" if cached else ""
    return f"{line}, encoded in {images['encode_s']:.3f} s{of_cached}"


def _of_pause(paused: dict[str, Any], following: dict[str, Any] | None, tokens: int) -> str:
    """One preemption: time, reason, cost. following: the next one. tokens: of the whole answer; 0 until it has
    ended."""
    by = "its own" if paused["by"] is None else f"job {one_line(paused['by'])}"
    expected_s = paused["wait_expected_s"] + paused["again_expected_s"]
    line = (
        f"{paused['at_s']:.3f} s  pre-empted on {one_line(paused['worker'])} after {paused['after_tokens']:,} tokens, "
        f"for a page of {by}: all {paused['pages']:,} were in use, and it began last of {paused['running'] + 1}; "
        f"expected to resume in {expected_s:.3f} s ({paused['wait_expected_s']:.3f} until pages are free, "
        f"{paused['again_expected_tokens']:,} tokens to recompute)"
    )
    if paused["again_tokens"] is None:
        if (tokens if following is None else following["after_tokens"]) > paused["after_tokens"]:
            return f"{line}; it resumed on another worker"
        return f"{line}; it has not" if following is None else f"{line}; it was pre-empted again before"
    if paused["paused_s"] is None:
        return f"{line}; it did, with {paused['again_tokens']:,} tokens recomputed"
    return (
        f"{line}; it did in {paused['paused_s']:.3f} ({paused['waited_s'] or 0.0:.3f} until pages were free, "
        f"{paused['again_tokens']:,} tokens recomputed)"
    )


def _of_steps(job: dict[str, Any]) -> str:
    """The duration of steps with drafts, compared with the expected one."""
    steps, drafts = job["steps_with_drafts"], job["drafts"]
    if steps is None:
        return ""
    gives = 1 + drafts["accepted"] / drafts["rounds"]
    return (
        f"; {steps['timed']:,} of these took {1e3 * steps['step_s']:.2f} ms each, expected "
        f"{1e3 * steps['step_expected_s']:.2f}, and without drafts {1e3 * steps['step_without_expected_s']:.2f}: for "
        f"{gives:.2f} tokens each"
    )
