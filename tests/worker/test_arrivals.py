"""The share of a worker's time that goes to placing received KV chunks."""

from redline.worker.kv_transfer.receiver import ReceiveBudget

MIB = 1 << 20
PARCEL = 4 * MIB
STEP_S = 0.03


class Thread:
    """A worker's thread that runs steps and places KV chunks at `per_byte` seconds a byte."""

    def __init__(self, share: float, per_byte: float) -> None:
        self.now, self.per_byte = 0.0, per_byte
        self.budget = ReceiveBudget(share, lambda: self.now)

    def turn(self, waiting: int, *, busy: bool = True, step_s: float = STEP_S) -> int:
        """Run a step, then place KV chunks until the budget is used up; -> how many were placed."""
        self.now += step_s if busy else 0.0
        self.budget.begin(busy=busy, most=PARCEL)
        placed = 0
        while placed < waiting and self.budget.allows("place", PARCEL):
            with self.budget.spend("place", PARCEL):
                self.now += PARCEL * self.per_byte
            placed += 1
        self.budget.end()
        return placed


def test_steps_are_lengthened_by_the_share_and_no_more() -> None:
    thread = Thread(share=0.02, per_byte=0.0002 / PARCEL)
    thread.turn(1)  # measures the time per byte
    began, placed = thread.now, 0
    for _ in range(100):
        more = thread.turn(1000)
        assert more <= 4, "0.6 ms for chunks of 0.2 ms, and unused time of earlier turns"
        placed += more
    assert 0.019 <= placed * 0.0002 / (100 * STEP_S) <= 0.0201
    assert abs(thread.now - began - 100 * STEP_S - placed * 0.0002) < 1e-9


def test_a_parcel_that_takes_longer_than_a_turns_share_comes_every_few_turns() -> None:
    thread = Thread(share=0.02, per_byte=0.003 / PARCEL)
    thread.turn(1)
    placed = [thread.turn(1000) for _ in range(60)]
    assert max(placed) == 1
    assert sum(placed) in (11, 12), "one every five turns: 3 ms in 150 ms"


def test_time_that_nobody_asked_for_is_no_claim_to_many_at_once() -> None:
    thread = Thread(share=0.02, per_byte=0.0003 / PARCEL)
    thread.turn(1)
    for _ in range(100):
        thread.turn(0)
    assert thread.turn(1000) <= 3


def test_nothing_is_held_back_while_nothing_runs() -> None:
    thread = Thread(share=0.02, per_byte=0.003 / PARCEL)
    assert thread.turn(50, busy=False) == 50
    assert thread.turn(50) == 0, "the step is not charged for it, but its own share is too small"


def test_waiting_leaves_time_to_place_what_is_waited_for() -> None:
    """A turn that waits for the longest permitted time, every time, still leaves time to place a chunk."""
    thread = Thread(share=0.02, per_byte=0.003 / PARCEL)
    thread.turn(1)
    placed = 0
    for _ in range(60):
        thread.now += STEP_S
        thread.budget.begin(busy=True, most=PARCEL)
        waited = thread.budget.patience(0.002, PARCEL)
        thread.now += waited
        thread.budget.charge(waited)
        if thread.budget.allows("place", PARCEL):
            with thread.budget.spend("place", PARCEL):
                thread.now += PARCEL * thread.per_byte
            placed += 1
        thread.budget.end()
    assert placed >= 10, "one every five turns, and one at the start"


def test_a_thread_that_slept_for_a_second_owes_one_parcel() -> None:
    thread = Thread(share=0.02, per_byte=0.003 / PARCEL)
    thread.turn(1)
    thread.per_byte = 1.0 / PARCEL
    while not thread.turn(1):
        pass
    thread.per_byte = 0.003 / PARCEL
    assert sum(thread.turn(1) for _ in range(60)) >= 4, (
        "the estimate was 3 ms, so at most 12 ms are assumed for the next chunk"
    )


def test_what_a_byte_takes_is_measured_anew_all_the_time() -> None:
    thread = Thread(share=0.1, per_byte=0.003 / PARCEL)
    thread.turn(1)
    thread.per_byte /= 10  # as after another process on the machine has ended
    for _ in range(60):
        last = thread.turn(1000)
    assert 8 <= last <= 12, "3 ms for chunks of 0.3 ms"
