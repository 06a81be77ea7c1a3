"""Two workers in one process that hand prompts over through NIXL, with the driver's book in the place of a GPU's."""

from redline.transport.base import MemoryRange
from redline.transport.nixl import NixlTransport
from redline.worker.parcel_memory import HostParcels
from redline.worker.transfer_paths import Carrier
from tests.handoff import Pair
from tests.tiny_model import BOTH, open_engine, tiny_model
from tests.transport.books import Book
from tests.worker.test_exchange_over_peer import LateParcels, alone, asked, finished, told


class BookParcels(LateParcels):
    """As a GPU's memory over NIXL: pieces that the driver exports, and what is launched ends some looks later."""

    def __init__(self, book: Book, looks: int) -> None:
        super().__init__(looks)
        self._chip = book.gpu()

    def make(self, size: int) -> MemoryRange:
        exported = self._chip.export(size)
        return MemoryRange(exported.address, size, self._chip.device, owner=exported)


def over_nixl(book: Book) -> list[Carrier]:
    memory = BookParcels(book, looks=2)
    best = Carrier("nixl-gpu", NixlTransport(make=memory.make), memory)
    return [best, Carrier("nixl", NixlTransport(), HostParcels())]


def test_a_prompt_travels_in_memory_that_a_driver_exports() -> None:
    book = Book()
    engines = [open_engine(tiny_model(), speculation=BOTH, step_tokens=100) for _ in range(2)]
    both = Pair(*engines, carriers=lambda: over_nixl(book))
    try:
        answers = both.run([asked(), asked("other", seed=2)])
        assert both.answers.exchange.counts == {"taken over": 2}
        assert both.answers.engine.planner.load().prompt_tokens == 0
        pieces = [HostParcels().tensor(memory) for memory in book.exported.values()]
        assert sum(bool(piece_B.any()) for piece_B in pieces) == 2, "the area of the one, the landing of the other"
        finished(both)
    finally:
        both.close()
    for one in (asked(), asked("other", seed=2)):
        assert told(answers[one.id]) == alone(one)
