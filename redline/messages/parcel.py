"""Location and checksum of a buffer that a peer has lent for reading."""

from redline.messages.base import Record


class Ticket(Record, frozen=True):
    """Location of a parcel in its lender's area, and the values that verify it.

    id: unique among the parcels lent at one time. epoch: unique among all parcels of this lender, ever. offset, size:
    bytes. checksum: 64 bits, of the bytes under `seed`.
    """

    id: int
    epoch: int
    offset: int
    size: int
    checksum: int

    @property
    def seed(self) -> int:
        """Seed of the checksum."""
        return seed_of(self.id, self.epoch)


def seed_of(id: int, epoch: int) -> int:
    """Seed of a parcel's checksum: 64 bits. Two parcels of one lender never share it within 2^48 lent parcels."""
    return (epoch ^ id << 48) % 2**64
