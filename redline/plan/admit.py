"""Who may be planned at all, and who may enter now: pure functions.

Whose turn it is, `queue` says. A job enters when a slot is free and there are pages
for all that it has to compute first, plus one page for each running job, so that it is not thrown out again at once.
"""

from redline.plan.active import pages_for
from redline.wire.job import PAGE_TOKENS, Job


def token_limit(job: Job, max_model_len: int) -> int:
    """The most tokens, prompt and generated, that the job may come to."""
    return min(len(job.tokens) + job.sampling.max_tokens, max_model_len)


def refusal(job: Job, *, max_model_len: int, total_pages: int) -> str | None:
    """Why the job can never run, in one line; None when it can. total_pages: of the KV memory, free or not."""
    prompt = len(job.tokens)
    if not prompt:
        return "the prompt is empty"
    if prompt + min(1, job.sampling.max_tokens) > max_model_len:
        return f"the prompt is {prompt} tokens; this model reads and writes {max_model_len} in all"
    if len(job.pages) != prompt // PAGE_TOKENS:
        return f"the job has {len(job.pages)} page hashes; a prompt of {prompt} tokens has {prompt // PAGE_TOKENS}"
    if len(job.answer) >= job.sampling.max_tokens > 0:
        return f"{len(job.answer)} tokens of the answer are there already; it may have {job.sampling.max_tokens}"
    pages = pages_for(max(token_limit(job, max_model_len) - 1, prompt))
    if pages > total_pages:
        return f"prompt and answer need {pages} pages of KV memory; there are {total_pages}"
    return None


def short_pages(*, need: int, matched_idle: int, free: int, idle: int, running: int) -> int:
    """How many pages have to become free before a job enters that needs `need` new ones; all but `running`, a number of
    jobs, are numbers of pages.

    `matched_idle` of its cached pages are held by the cache alone: they count as idle until it enters.
    """
    return max(0, need + matched_idle + running - free - idle)
