"""The stages of a request, from the timings of its passage and its jobs, for profiles and spans."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from redline import clock
from redline.api.telemetry.request_span import RequestSpan
from redline.api.telemetry.request_traces import RequestTrace, Sent


class RequestStage(NamedTuple):
    """A slice of a request's lane. Times are seconds of time.perf_counter."""

    name: str
    began: float
    ended: float
    facts: dict[str, Any]


class Stages(NamedTuple):
    """A whole request, and its stages."""

    whole: RequestStage
    stages: list[RequestStage]  # within `whole`, one after another
    jobs: list[list[RequestStage]]  # of further choices: each is drawn in its own lane


def stages_of(passage: RequestSpan) -> Stages:
    """The stages of a request so far, whether it has ended or not."""
    now = clock.perf_counter()
    end = now if passage.ended is None else passage.ended
    facts: dict[str, Any] = {"id": passage.id, "status": passage.status or None, "ended": passage.ended is not None}
    jobs = [_of_job(job, end) for job in passage.jobs]
    facts["prompt_tokens"] = sum(job.prompt_tokens for job in passage.jobs)
    facts["tokens"] = sum(job.tokens for job in passage.jobs)
    first = jobs[0] if jobs else []
    parts = [
        RequestStage(part.name, part.began, part.ended, {}) for part in sorted(passage.parts, key=lambda p: p.began)
    ]
    whole = RequestStage(f"{passage.method} {passage.path}", passage.began, end, facts)
    return Stages(whole, [*parts, *first], jobs[1:])


def _of_job(job: RequestTrace, end: float) -> list[RequestStage]:
    """Stages of a job since it was sent: time in the queue, to the first token, and streaming."""
    if not job.sent:
        return []
    sent = Sent(*job.sent[0])
    at = job.began + sent.at_s
    ended = end if job.ended_s is None else min(end, job.began + job.ended_s)
    facts = {"choice": job.choice, "worker": job.worker, "moves": len(job.sent) - 1, "cached_tokens": job.cached_tokens}
    if (images := job.images) is not None:
        facts |= {"images": images["images"], "image_tokens": images["tokens"], "image_encode_s": images["encode_s"]}
    if job.first_token_s is None:
        return [RequestStage("waits for its first token", at, ended, facts)]
    first = min(ended, job.began + job.first_token_s)
    queued = min(first, at + (job.queued_s or 0.0))
    drafts = {"steps_with_drafts": job.rounds, "drafts": job.drafts, "drafts_accepted": job.accepted}
    return [
        RequestStage("queue", at, queued, facts),
        RequestStage("first token", queued, first, {"prompt_tokens": job.prompt_tokens, **facts}),
        RequestStage("stream", first, ended, {"tokens": job.tokens, "finish": job.finish, **drafts}),
    ]


def one_behind_another(stages: Sequence[RequestStage], within: RequestStage) -> list[RequestStage]:
    """The stages, cut so that they neither overlap nor exceed the request: with several prompts, one is encoded while
    others already run."""
    kept: list[RequestStage] = []
    at = within.began
    for stage in sorted(stages, key=lambda one: one.began):
        began, ended = max(at, stage.began), min(within.ended, stage.ended)
        if ended >= began:
            kept.append(stage._replace(began=began, ended=ended))
            at = ended
    return kept
