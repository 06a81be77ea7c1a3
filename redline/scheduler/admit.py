"""Admission of jobs, as pure functions: which jobs are refused, and when a waiting job can start.

The order of waiting jobs is decided in `queue`. A job starts when a slot is free and there are pages for all known
tokens that it has to compute, plus one page for each running job, so that it is not preempted at once.
"""

from redline.messages.job import PAGE_TOKENS, Job
from redline.scheduler.active import pages_for


def token_limit(job: Job, max_model_len: int) -> int:
    """Maximum number of tokens, prompt and generated, of the job."""
    return min(len(job.tokens) + job.sampling.max_tokens, max_model_len)


def refusal(job: Job, *, max_model_len: int, total_pages: int) -> str | None:
    """Why the job can never run, in one line; None if it can. total_pages: all pages of the KV cache, free or not."""
    prompt = len(job.tokens)
    if not prompt:
        return "the prompt is empty"
    if prompt + min(1, job.sampling.max_tokens) > max_model_len:
        return f"the prompt has {prompt} tokens; prompt and answer may have {max_model_len} together"
    if len(job.pages) != prompt // PAGE_TOKENS:
        return f"the job has {len(job.pages)} page hashes; a prompt of {prompt} tokens has {prompt // PAGE_TOKENS}"
    if len(job.answer) >= job.sampling.max_tokens > 0:
        return f"{len(job.answer)} tokens of the answer were already generated; max_tokens is {job.sampling.max_tokens}"
    pages = pages_for(max(token_limit(job, max_model_len) - 1, prompt))
    if pages > total_pages:
        return f"prompt and answer need {pages} pages of KV memory; there are {total_pages}"
    return None


def short_pages(*, need: int, matched_idle: int, free: int, idle: int, running: int) -> int:
    """How many more pages must become free before a job that needs `need` new pages can start. All arguments are
    numbers of pages, except `running`, a number of jobs.

    matched_idle: those of the job's cached pages that only the cache holds; they count as idle until the job starts.
    """
    return max(0, need + matched_idle + running - free - idle)
