"""Engines with pages that move to KV offload tiers and come back: answers equal those of an engine without tiers."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from redline.errors import ConfigError
from redline.messages.delta import Brought
from redline.messages.job import PAGE_TOKENS, Job, PageId
from redline.run.tiers.store import Saved
from redline.run.tiers.tables import TierRead
from redline.worker.engine import EngineCore
from tests.tiers import WAIT_S, close, open_tiers, run, tier, tiers_of, told
from tests.tiny_model import BLOCK, LEARNED, Answer, job, prompt, run_alone, tiny_model
from tests.waiting import until

FEW: dict[str, Any] = {"pages": 12, "step_tokens": 100, "max_model_len": 640}


@contextmanager
def opened(disk: Path | None = None, **engine: Any) -> Generator[EngineCore]:
    core = open_tiers(disk, **engine)
    try:
        yield core
    finally:
        close(core)


def asked(name: str, seed: int) -> Job:
    return job(name, prompt(seed, 400), max_tokens=4)


def alone(seed: int, **engine: Any) -> Answer:
    return run_alone(tiny_model(), asked("alone", seed), **FEW | engine)


def one(engine: EngineCore, name: str, seed: int) -> Answer:
    return run(engine, [asked(name, seed)])[name]


def always_fetches(engine: EngineCore) -> None:
    """Fetch every stored page; by default that depends on the machine's speed."""
    tiers_of(engine).prefills.observed = lambda *_: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "config", [{}, {"speculation": LEARNED}, {"speculation": BLOCK}], ids=["plain", "chain", "block"]
)
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_what_comes_back_gives_the_answer_of_an_engine_without_tiers(
    tmp_path: Path, on_disk: bool, config: dict[str, Any]
) -> None:
    with opened(tmp_path if on_disk else None, **config) as engine:
        always_fetches(engine)
        first = [one(engine, f"first-{seed}", seed) for seed in (1, 2, 3)]
        again = [one(engine, f"again-{seed}", seed) for seed in (1, 2, 3)]
        assert tier(engine, "host").hit_tokens > 0
    expected = [alone(seed, **config).tokens for seed in (1, 2, 3)]
    assert [answer.tokens for answer in first] == expected
    assert [answer.tokens for answer in again] == expected


def test_who_asks_is_told_what_was_read_for_it() -> None:
    with opened() as engine:
        always_fetches(engine)
        for seed in (1, 2, 3):
            one(engine, f"before-{seed}", seed)
        engine.planner.log_pages()
        deltas = told(engine, [asked("again", 1)])["again"]
        came = {each.hash: each for each in engine.planner.page_changes() if each.there}
        hits = tier(engine, "host").hit_tokens
    (note,) = [note for delta in deltas for note in delta.noted]
    assert isinstance(note, Brought)
    assert next(delta for delta in deltas if delta.tokens).noted == (note,)
    assert (note.host_tokens, note.disk_tokens) == (hits, 0)
    assert hits > 0
    assert note.read_s > 0
    assert note.predicted_s > 0
    job = asked("again", 1)
    assert [came[hash].tokens for hash in job.pages[: hits // PAGE_TOKENS]] == [
        job.tokens[start : start + PAGE_TOKENS] for start in range(0, hits, PAGE_TOKENS)
    ], "pages read from a tier are logged as computed"
    assert note.compute_s is None, "no step has measured the compute time yet"


def test_pages_on_disk_are_there_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        one(engine, "before", 1)
    with opened(tmp_path) as engine:
        assert tiers_of(engine).store.settle(60)
        always_fetches(engine)
        assert one(engine, "after", 1).tokens == alone(1).tokens
        assert tier(engine, "disk").hit_tokens == 384
        assert dict(tier(engine, "disk").counts)["found"] >= 6


def test_damaged_pages_are_counted_and_computed(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        one(engine, "before", 1)
    damage(tmp_path)
    with opened(tmp_path) as engine:
        assert tiers_of(engine).store.settle(60)
        always_fetches(engine)
        assert one(engine, "after", 1).tokens == alone(1).tokens
        assert dict(tier(engine, "disk").counts)["spoilt"] == 1
        assert tier(engine, "disk").hit_tokens == 0


def test_a_page_that_was_damaged_in_memory_is_computed_and_those_before_it_are_not() -> None:
    with opened() as engine:
        always_fetches(engine)
        for seed in (1, 2, 3):
            one(engine, f"before-{seed}", seed)
        store = tiers_of(engine).store
        kept = [hash for hash in asked("named", 1).pages if store.find([hash])]
        entry = store._tables.host.find(kept[2])
        assert entry is not None
        store._tables.host.slots.bytes_of(entry.slot)[-1] ^= 1
        assert one(engine, "after", 1).tokens == alone(1).tokens
        assert dict(tier(engine, "host").counts)["spoilt"] == 1
        assert tier(engine, "host").hit_tokens == 2 * PAGE_TOKENS
        assert not store.find([kept[2]])


def damage(folder: Path) -> None:
    """Flips the last byte of every page in the only file of a folder."""
    with opened(folder) as engine:
        assert tiers_of(engine).store.settle(60)
        disk = tiers_of(engine).store.disk
        assert disk is not None
        ends = [place.offset + disk._record_bytes - 1 for place in disk.places.values()]
    (path,) = folder.glob("*.pages")
    whole = bytearray(path.read_bytes())
    for end in ends:
        whole[end] ^= 1
    path.write_bytes(whole)


def test_a_file_that_was_cut_in_the_middle_of_a_write_loses_that_page_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        one(engine, "before", 1)
        disk = tiers_of(engine).store.disk
        assert disk is not None
        page_bytes = disk._record_bytes
    (path,) = tmp_path.glob("*.pages")
    whole = path.read_bytes()
    path.write_bytes(whole[: -page_bytes // 2])
    with opened(tmp_path) as engine:
        assert tiers_of(engine).store.settle(60)
        count = (len(whole) - 1) // page_bytes
        assert dict(tier(engine, "disk").counts)["found"] == count - 1
        always_fetches(engine)
        assert one(engine, "after", 1).tokens == alone(1).tokens


def test_pages_of_another_model_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0000000007.pages").write_bytes(b"redpages of another model" * 50)
    with opened(tmp_path) as engine:
        assert tiers_of(engine).store.settle(60)
        assert not list(tmp_path.glob("*7.pages"))
        assert one(engine, "one", 1).tokens == alone(1).tokens
    assert "removed 1 files with pages of another model" in caplog.text


def test_a_folder_that_another_worker_has_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.run.tiers.disk.LOCK_S", 0.1)
    with opened(tmp_path), pytest.raises(ConfigError, match="in use by another running worker"):
        open_tiers(tmp_path)


def test_a_disk_that_is_full_is_said_and_answers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as engine:
        monkeypatch.setattr("redline.run.tiers.disk.os.pwritev", full)
        always_fetches(engine)
        answers = [one(engine, f"{number}", seed).tokens for number, seed in enumerate((1, 2, 1))]
        tiers_of(engine).store.flush(WAIT_S)
    assert answers == [alone(seed).tokens for seed in (1, 2, 1)]
    assert "KV offload: cannot write pages to disk: No space left on device" in caplog.text


def test_memory_that_takes_long_to_be_pinned_is_made_before_it_is_needed() -> None:
    with opened() as engine:
        store = tiers_of(engine).store
        slots = store._tables.host.slots
        with store._tables.lock:  # as for a copy that is read by a GPU
            slots.ahead = 1
            store._tables.lock.notify_all()
        until(lambda: not slots.short(busy=False), "memory was not allocated")
        store.check()


def test_who_writes_its_pages_at_the_end_does_not_wait_for_memory(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        store = tiers_of(engine).store
        one(engine, "before", 1)
        assert store.settle(WAIT_S)
        engine.planner.forget_idle()
        with store._tables.lock:
            store._tables.host.slots.ahead = 1
            store._tables.host.slots.short = lambda *, busy: store._tables.host.slots.ahead is not None  # type: ignore[method-assign]
            store._tables.lock.notify_all()
        store.flush(WAIT_S)
        assert dict(tier(engine, "disk").counts)["stored"] >= 6


def test_what_is_saved_to_make_room_is_predicted_with_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of its own: saving a page takes 2 ms, which the initial estimate has four times too low, and reading
    one takes 1 ms, which the estimate has right; some reads displace pages, others none, because these were saved
    before.
    """
    now, errors, displaced = 0.0, list[float](), set[int]()
    with opened(pages=16) as engine:
        always_fetches(engine)
        tiers = tiers_of(engine)
        store = tiers.store
        save, read = store.save, store.read

        def saves(pages: Sequence[Saved]) -> int:
            nonlocal now
            count = save(pages)
            now += 0.002 * count
            return count

        def reads(reading: TierRead, pages: Sequence[PageId], seconds: float) -> None:
            nonlocal now
            read(reading, pages, 60.0)
            assert reading.ended.wait(60.0)
            now += 0.003 + 0.001 * len(pages)
            displaced.add(tiers._coming[-1].saved)

        for times in tiers.readings.values():
            times.__init__(0.003, (0.001, 0.002), 0.0005)
        monkeypatch.setattr(tiers, "_clock", lambda: now)
        monkeypatch.setattr(store, "save", saves)
        monkeypatch.setattr(store, "read", reads)
        for number in range(30):
            # every fifth prompt is new, and displaces pages without a read
            seed = number % 3 if number % 5 else 100 + number
            before = tier(engine, "host")
            one(engine, f"{number}", seed)
            after = tier(engine, "host")
            if (took := after.read_s - before.read_s) > 0:
                errors.append(abs(after.predicted_s - before.predicted_s - took) / took)
    assert len(displaced) > 1
    assert max(displaced) > 1
    assert len(errors) > 10
    later = errors[len(errors) // 2 :]
    assert median(later) <= 0.1
    assert sorted(later)[int(0.9 * (len(later) - 1))] <= 0.25
