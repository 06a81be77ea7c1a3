"""Whether a worker can change its role while it serves, and when it has done so. See docs/fleet.md.

New jobs go by the new role at once. A worker that answered and is to compute prompts first ends what it writes: answers
have STAY_S to come to their ends, and what is left goes on with others, as it does where a worker is replaced. One that
computed prompts and is to answer computes those that it has been given to their ends.
"""

from redline.route.links import MOVE_S, Link, Links
from redline.wire.news import Role

STAY_S = 3.0  # for answers to end where they are; with what a move takes it is within 5 s


def refusal(links: Links, link: Link, role: Role) -> str | None:
    """Why a worker cannot have this role from now on, in one line; None: it can."""
    if link.ready is None:
        return f"{link.name} is not ready: {link.lost or 'it loads its model'}; ask again once it is"
    if link.draining:
        return f"{link.name} is about to be started again; ask again once it is ready"
    if link.turning is not None:
        return f"{link.name} is changing its role already, to {link.role}; ask again in some seconds"
    if role != "prefill":
        return None
    if not link.ready.area:
        return (
            f"{link.name} has no area for parcels, so it cannot compute prompts for others: the deployment needs "
            'a worker with role = "prefill", or [steer]'
        )
    others = [other for other in links if other is not link and can_answer(links, other)]
    if not others:
        return f"{link.name} is the last worker that answers; another has to answer before it can compute prompts alone"
    unlike = next((other for other in others if other.ready and other.ready.format != link.ready.format), None)
    if unlike is not None:
        return f"{unlike.name} reads parcels of another format than {link.name} would hand over"
    return None


def can_answer(links: Links, link: Link) -> bool:
    """Whether new jobs can be sent to it: it answers, is not to be replaced, and is heard of."""
    return link.answers and not link.draining and links.silent_s(link) <= MOVE_S


def is_done(link: Link, answers: int) -> bool:
    """Whether a worker that changes its role is wholly in it. answers: that it has to write as yet."""
    return link.told == link.role and (link.role != "prefill" or not answers)
