"""Role switches of running workers: when they are allowed, and when they are complete. See docs/routing.md.

New jobs follow the new role at once. A decode worker that becomes a prefill worker first ends its running answers:
after STAY_S the remaining ones are resumed on other workers, as when a worker is replaced. A prefill worker that
becomes a decode worker completes the prompts that it was sent.
"""

from redline.messages.news import Role
from redline.router.worker_registry import MOVE_S, WorkerHandle, WorkerRegistry

STAY_S = 3.0  # time for running answers to end in place; with the time of a move, a switch takes at most 5 s


def refusal(links: WorkerRegistry, link: WorkerHandle, role: Role) -> str | None:
    """Why a worker cannot switch to this role now, in one line; None if it can."""
    if link.ready is None:
        return f"{link.name} is not ready: {link.lost or 'it is loading its model'}; retry once it is"
    if link.draining:
        return f"{link.name} is about to be restarted; retry once it is ready"
    if link.turning is not None:
        return f"{link.name} is already switching its role, to {link.role}; retry in some seconds"
    if role != "prefill":
        return None
    if not link.ready.area:
        return (
            f"{link.name} has no area for parcels (KV transfer buffers), so it cannot be a prefill worker: the "
            'deployment needs a worker with role = "prefill", or [steer]'
        )
    others = [other for other in links if other is not link and can_answer(links, other)]
    if not others:
        return f"{link.name} is the last worker that answers; it can become a prefill worker only if another answers"
    unlike = next((other for other in others if other.ready and other.ready.format != link.ready.format), None)
    if unlike is not None:
        return f"{unlike.name} reads another format of parcels (KV chunks) than {link.name} would send"
    return None


def can_answer(links: WorkerRegistry, link: WorkerHandle) -> bool:
    """Whether it accepts new jobs to decode: it is ready, not about to be replaced, and responds."""
    return link.answers and not link.draining and links.silent_s(link) <= MOVE_S


def is_done(link: WorkerHandle, answers: int) -> bool:
    """Whether a role switch is complete. answers: number of answers that the worker still has to complete."""
    return link.told == link.role and (link.role != "prefill" or not answers)
