"""Role switches of running workers: when they are allowed, and when they are complete. See docs/routing.md.

New jobs follow the new role at once. A decode worker that becomes a prefill worker first ends its running answers:
after STAY_S the remaining ones are resumed on other workers, as when a worker is replaced. A prefill worker that
becomes a decode worker completes the prompts that it was sent.
"""

from redline.messages.news import Role
from redline.router.worker_registry import MOVE_S, WorkerHandle, WorkerRegistry

STAY_S = 3.0  # time for running answers to end in place; with the time of a move, a switch takes at most 5 s


def refusal(workers: WorkerRegistry, worker: WorkerHandle, role: Role) -> str | None:
    """Why a worker cannot switch to this role now, in one line; None if it can."""
    if worker.ready is None:
        return f"{worker.name} is not ready: {worker.lost or 'it is loading its model'}; retry once it is"
    if worker.draining:
        return f"{worker.name} is about to be restarted; retry once it is ready"
    if worker.switching_since is not None:
        return f"{worker.name} is already switching its role, to {worker.role}; retry in some seconds"
    if role != "prefill":
        return None
    if not worker.ready.area:
        return (
            f"{worker.name} has no area for parcels (KV transfer buffers), so it cannot be a prefill worker: the "
            'deployment needs a worker with role = "prefill", or [steer]'
        )
    others = [other for other in workers if other is not worker and can_answer(workers, other)]
    if not others:
        return f"{worker.name} is the last worker that answers; it can become a prefill worker only if another answers"
    unlike = next((other for other in others if other.ready and other.ready.format != worker.ready.format), None)
    if unlike is not None:
        return f"{unlike.name} reads another format of parcels (KV chunks) than {worker.name} would send"
    return None


def can_answer(workers: WorkerRegistry, worker: WorkerHandle) -> bool:
    """Whether it accepts new jobs to decode: it is ready, not about to be replaced, and responds."""
    return worker.decodes and not worker.draining and workers.silent_s(worker) <= MOVE_S


def is_done(worker: WorkerHandle, answers: int) -> bool:
    """Whether a role switch is complete. answers: number of answers that the worker still has to complete."""
    return worker.confirmed_role == worker.role and (worker.role != "prefill" or not answers)
