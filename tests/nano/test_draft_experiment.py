"""The experiment's own arithmetic: what is counted, what is split and drawn, what another machine begins with."""

from pathlib import Path

import pytest

from nano.draft_experiment import Setup, archive, counted, restore, split, tokens_of
from nano.draft_prompts import DOMAINS, main
from nano.draft_store import pack
from redline.draft.corpus import Example, read_examples
from redline.draft.prompts import read_prompts
from redline.worker.acceptance import Round, Spoken

FOLDER = Path(__file__).parents[2] / "models/kimi-nano"


def setup_in(folder: Path) -> Setup:
    return Setup(folder, folder / "out", FOLDER, 100, 1.0, "cpu")


def test_an_answer_counts_its_rounds_and_those_of_a_perfect_drafter() -> None:
    rounds = (Round(6, 3, 3), Round(10, 3, 0), Round(11, 3, 1))
    answer = Spoken("a", "code", tuple(range(13)), 5, "stop", rounds, 3)
    found = counted(answer)
    assert (found.rounds, found.tokens) == (3, 7)
    assert (found.best_rounds, found.best_tokens) == (2, 8)  # 1 of the prompt's, then 4 and 3 and the stop's bonus
    other = counted(answer._replace(tokens=(*range(12), 99)))
    assert other.digest != found.digest


def test_base_and_pool_share_no_prompt_and_hold_as_much_of_every_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano.draft_prompts.WAVE", 1)
    setup = setup_in(tmp_path)
    for path, count in ((setup.train, "300"), (setup.held, "7")):
        main(["--out", str(path), "--count", count, "--tokenizer", str(FOLDER), "--processes", "1"])
    answer = tuple(range(10))
    examples = (
        Example(id=prompt.id, domain=prompt.domain, tokens=(1, *answer), prompt=1, finish="stop")
        for prompt in read_prompts(setup.train).prompts
    )
    pack(examples, setup.train, setup.packed)
    split(setup)
    base, pool = (read_examples(setup.corpus(name)).examples for name in ("base", "pool"))
    assert not {example.id for example in base} & {example.id for example in pool}
    for examples in (base, pool):
        tokens = tokens_of(examples)
        assert set(tokens) == set(DOMAINS)
        assert len(set(tokens.values())) == 1
    assert len(base) > 3 * len(pool)


def test_another_machine_begins_with_what_the_first_has_kept(tmp_path: Path) -> None:
    first, second = setup_in(tmp_path / "first"), setup_in(tmp_path / "second")
    first.drafter("base").mkdir(parents=True)
    (first.drafter("base") / "config.json").write_text("{}")
    first.packed.write_bytes(b"answers")
    kept = tmp_path / "kept"
    kept.mkdir()
    archive(first, "base").rename(kept / "base.tar")
    first.packed.rename(kept / first.packed.name)
    second.work.mkdir()
    restore(second, kept)
    assert (second.drafter("base") / "config.json").read_text() == "{}"
    assert second.packed.read_bytes() == b"answers"
