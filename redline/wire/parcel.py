"""What a reader is told of bytes that a peer has lent to it."""

from redline.wire.base import Record


class Ticket(Record, frozen=True):
    """Where a parcel lies in its lender's area, and how its reader can tell that it has read this one.

    id: among those that are lent at once. epoch: no other parcel of this lender has it, ever. offset, size: bytes.
    checksum: 64 bits, of its bytes under `seed`.
    """

    id: int
    epoch: int
    offset: int
    size: int
    checksum: int

    @property
    def seed(self) -> int:
        """Of the checksum."""
        return seed_of(self.id, self.epoch)


def seed_of(id: int, epoch: int) -> int:
    """Of a parcel's checksum: 64 bits. Two parcels of one lender never share it within 2^48 lent parcels."""
    return (epoch ^ id << 48) % 2**64
