"""The experiment's own arithmetic: counts, splits, random draws, and the starting state on another machine."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nano.draft_experiment import (
    Setup,
    archive,
    counted,
    prompts_of,
    restore,
    score,
    scores_of,
    split,
    tokens_of,
    write,
)
from nano.draft_measure import Answered
from nano.draft_prompts import DOMAINS, main
from nano.draft_store import pack
from redline.draft.corpus.corpus import Example, read_examples
from redline.draft.corpus.prompts import read_prompts
from redline.draft.mine.difficulty import Scores
from redline.worker.acceptance import DraftRound, Spoken

FOLDER = Path(__file__).parents[2] / "models/kimi-nano"


def setup_in(folder: Path) -> Setup:
    return Setup(folder, folder / "out", FOLDER, 100, 1.0, "cpu")


def test_an_answer_counts_its_rounds_and_those_of_a_perfect_drafter() -> None:
    rounds = (DraftRound(6, 3, 3), DraftRound(10, 3, 0), DraftRound(11, 3, 1))
    answer = Spoken("a", "code", tuple(range(13)), 5, "stop", rounds, 3)
    found = counted(answer)
    assert (found.rounds, found.tokens) == (3, 7)
    assert (found.best_rounds, found.best_tokens) == (2, 8)  # 1 from the prompt, then 4 and 3 and the bonus of the stop
    other = counted(answer._replace(tokens=(*range(12), 99)))
    assert other.digest != found.digest


def test_base_and_pool_share_no_prompt_and_hold_as_much_of_every_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano.draft_prompts.WAVE", 1)
    setup = setup_in(tmp_path)
    setup.corpus("own").parent.mkdir()
    own = ["--own", str(setup.corpus("own")), "--seed", "3"]
    for path, count, more in ((setup.train, "300", []), (setup.own, "60", own), (setup.held, "7", [])):
        main(["--out", str(path), "--count", count, "--tokenizer", str(FOLDER), "--processes", "1", *more])
    answer = tuple(range(10))
    examples = (
        Example(id=prompt.id, domain=prompt.domain, tokens=(1, *answer), prompt=1, finish="stop")
        for prompt in read_prompts(setup.train).prompts
    )
    pack(examples, setup.train, setup.packed)
    own = read_examples(setup.corpus("own")).examples
    most = 12_000  # prompts contain text of this Python's own: answered ones take 4,700 to 10,600, and own text 9,300
    monkeypatch.setattr("nano.draft_experiment.BASE_TOKENS", most)
    split(setup)
    base, pool = (read_examples(setup.corpus(name)).examples for name in ("base", "pool"))
    assert not {example.id for example in base} & {example.id for example in pool}
    answered = [example for example in base if not example.id.startswith("train-3")]
    for examples in (answered, pool):
        tokens = tokens_of(examples)
        assert set(tokens) == set(DOMAINS)
        assert len(set(tokens.values())) == 1
    added = len(base) - len(answered)
    assert base[-added:] == own[:added]
    assert 0 < added < len(own)
    assert sum(len(example.tokens) for example in base) <= most


def test_scores_come_back_in_the_order_of_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_in(tmp_path)
    pool = [Example(id=f"{n}", domain="code", tokens=tuple(range(n + 4)), prompt=1, finish="stop") for n in range(5)]
    write(setup.corpus("pool"), pool)

    def found(example: Example) -> Scores:
        rows = len(example.tokens) - 2
        ones = np.full((rows, 3), len(example.tokens), np.float32)
        return Scores(np.arange(rows), ones / 2, ones, ones > 0, ones > 0)

    teacher_forcing = SimpleNamespace(scores=lambda examples, steps, serving: map(found, examples))
    monkeypatch.setattr("nano.draft_experiment.TeacherForcing.open", lambda *given: teacher_forcing)
    for number in (1, 0):
        score("cpu", "", "", str(setup.corpus("pool")), f"{number}/2", str(tmp_path / f"scores/{number}-2.npz"))
    back = scores_of(setup, 5)
    assert [float(one.gap_R[0]) for one in back] == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert [len(one.position_R) for one in back] == [2, 3, 4, 5, 6]


def test_arms_answer_the_first_prompts_that_gave_the_base_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano.draft_experiment.ROUNDS", 25)
    domains = ["code", "chat"] * 10
    answers = [Answered(f"values-2-{d}-{n}", d, "", 5 if d == "code" else 1, 9, 1, 4) for n, d in enumerate(domains)]
    found = prompts_of(answers[::-1])
    assert {one for one in found if "code" in one} == {f"values-2-code-{n}" for n in range(0, 10, 2)}
    assert sum("chat" in one for one in found) == 10


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
