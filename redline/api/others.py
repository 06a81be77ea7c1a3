"""What the other replicas of the API have under way, as each has said last. It counts in bounds and choices."""

from collections.abc import Collection, Iterator

from redline.route.links import Link
from redline.wire.replicas import Use


class Others:
    """The newest word of each; none where the API is one process."""

    def __init__(self) -> None:
        self._uses: dict[str, Use] = {}

    def __iter__(self) -> Iterator[Use]:
        return iter(self._uses.values())

    def heard(self, use: Use) -> None:
        """Take in what one of them says."""
        self._uses[use.replica] = use

    def keep(self, names: Collection[str]) -> list[str]:
        """Forget those that are none of these, which have ended: -> their names."""
        gone = [name for name in self._uses if name not in names]
        for name in gone:
            del self._uses[name]
        return gone

    @property
    def waiting(self) -> int:
        """Jobs without a first token."""
        return sum(use.waiting for use in self)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of those, and of the jobs that are being made."""
        return sum(use.waiting_tokens for use in self)

    @property
    def running(self) -> int:
        """Jobs that have had a first token and have not ended."""
        return sum(use.running for use in self)

    @property
    def load(self) -> int:
        """Requests that are being answered or wait."""
        return sum(use.load for use in self)

    def tell(self, link: Link) -> None:
        """Tell a link how much of theirs its worker has."""
        at = [each for use in self for each in use.workers if (each.worker, each.epoch) == (link.name, link.epoch)]
        link.jobs_of_others, link.tokens_of_others = sum(each.jobs for each in at), sum(each.tokens for each in at)
