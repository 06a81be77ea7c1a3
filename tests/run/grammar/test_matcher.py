"""A slot's grammar matcher: the allowed next tokens, also after drafts, and the forced tokens."""

import functools
import json
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch
from torch import Tensor

from redline.chat.vocabulary import grammar_tokens
from redline.messages.job import Grammar, Thinking
from redline.policy.grammar import AHEAD_S
from redline.run.grammar.matcher import KEPT, Matcher, Matchers, masked
from tests.clocks import FakeClock
from tests.tiny_tokenizer import TINY_VOCAB, tokenizer
from tests.waiting import LIMIT_S, until

TOKENIZER = tokenizer()
END = TOKENIZER.special("<|im_end|>")
THOUGHT = TOKENIZER.special("</think>")
STOPS = set(TOKENIZER.stop_ids)
COLOURS = Grammar(text='start: "red" | "rot" | "grün"')


@pytest.fixture(scope="module")
def matchers() -> Iterator[Matchers]:
    made = Matchers(functools.partial(grammar_tokens, TOKENIZER), TINY_VOCAB)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def masks_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks take no measured time, so a busy machine does not change the tests."""
    monkeypatch.setattr("redline.clock.thread_time", FakeClock())


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def letters(text: str) -> list[int]:
    return list(text.encode())


def allowed(mask_W: Tensor) -> set[int]:
    return {token for token in range(32 * len(mask_W)) if int(mask_W[token // 32]) >> token % 32 & 1}


def texts(matcher: Matcher, drafts: Sequence[int] = ()) -> list[set[str]]:
    return [{TOKENIZER.token_bytes(token).decode() for token in allowed(mask)} for mask in matcher.masks(drafts)]


def test_a_mask_allows_what_the_grammar_does(matchers: Matchers):
    matcher = matchers.begin(COLOURS, ())
    assert texts(matcher) == [{"r", "re", "g"}]
    matcher.advance(letters("r"))
    assert texts(matcher) == [{"e", "o"}]


def test_behind_its_end_only_a_stop_id_is_allowed_and_then_nothing_matters(matchers: Matchers):
    matcher = matchers.begin(COLOURS, letters("red"))
    assert allowed(matcher.masks(())[0]) == STOPS
    matcher.advance([END, 65, 66])
    assert matcher.masks(()).tolist() == [[-1] * matchers.words]


def test_an_answer_that_is_begun_again_stands_where_it_stood(matchers: Matchers):
    again, whole = matchers.begin(COLOURS, letters("ro")), matchers.begin(COLOURS, ())
    whole.advance(letters("r"))
    whole.advance(letters("o"))
    assert again.masks(()).tolist() == whole.masks(()).tolist()
    assert texts(again) == [{"t"}]


def test_masks_behind_drafts_end_before_the_first_that_is_refused(matchers: Matchers):
    matcher = matchers.begin(COLOURS, ())
    before = matcher.masks(()).tolist()
    assert texts(matcher, letters("rex")) == [{"r", "re", "g"}, {"e", "o"}, {"d"}]
    assert matcher.allowed(letters("rex")) == 2
    assert matcher.allowed([*letters("red"), END, 65]) == 3  # an end token is not a draft
    assert len(matcher.masks([*letters("red"), END, 65])) == 4
    assert matcher.masks(()).tolist() == before  # and the matcher's state is unchanged


def test_what_must_come_is_one_token_and_known_in_advance(matchers: Matchers):
    schema = {"type": "object", "properties": {"functions": {"const": 1}}, "required": ["functions"]}
    text = f"start: %json {json.dumps({**schema, 'additionalProperties': False})}"
    matcher = matchers.begin(Grammar(text=text), letters('{"'))
    forced = matcher.forced()
    assert forced[:2] == ids('functions"')[:2], "the tokenizer's own tokens, although single letters would be valid too"
    assert [allowed(mask) for mask in matcher.masks(forced)[:-1]] == [{token} for token in forced]
    matcher.advance(forced)
    assert len(allowed(matcher.masks(())[0])) > 1


def test_what_is_forced_behind_a_row_is_known_while_the_run_goes_on(matchers: Matchers):
    """For every number of accepted drafts of the row: it yields that many tokens of the forced run, and one more."""
    matcher = matchers.begin(Grammar(text='start: "a" "xyzxyz" /[b-d]/'), letters("a"))
    run = matcher.forced()
    assert len(run) >= 3
    assert matcher.forced_behind([]) == run[1:]
    assert matcher.forced_behind(run[:2]) == run[3:]
    assert matcher.forced_behind([run[0], 65, *run[2:]]) == run[2:]
    assert matcher.forced_behind([65]) == run[1:]
    assert matcher.forced_behind(run) == [] == matcher.forced_behind([*run, 65])
    assert matcher.forced() == run


def test_before_it_begins_all_is_free_but_what_is_banned(matchers: Matchers):
    grammar = Grammar(text=f'start: <[{THOUGHT}]> "red"', after=(THOUGHT,), banned=(END, 3))
    matcher = matchers.begin(grammar, ())
    everything = set(range(32 * matchers.words))
    assert allowed(matcher.masks(())[0]) == everything - {END, 3}
    assert matcher.forced() == []
    rows = matcher.masks([65, THOUGHT, *letters("re"), 65])
    assert [len(allowed(row)) for row in rows[:2]] == [len(everything) - 2] * 2
    assert TOKENIZER.token_bytes(min(allowed(rows[2]))) == b"re"
    assert matcher.allowed([65, END]) == 1
    assert allowed(matcher.masks(())[0]) == everything - {END, 3}, "drafts must not activate the grammar"
    matcher.advance([65, THOUGHT])
    assert 65 not in allowed(matcher.masks(())[0])


def test_a_grammar_that_cannot_be_compiled_allows_nothing(matchers: Matchers):
    matcher = matchers.begin(Grammar(text="start: nobody"), ())
    assert allowed(matcher.masks(())[0]) == set()
    assert matcher.allowed([65]) == 0
    assert str(matcher.error).startswith("the grammar cannot be followed: at 1(8): unknown name")


AMBIGUOUS = Grammar(text="start: a+\na: A | a a | a A a\nA: /[a-z ]/")


def test_a_mask_that_meets_a_bound_says_so_and_allows_nothing(matchers: Matchers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.policy.grammar.STEP_ITEMS", 300)
    matcher = matchers.begin(AMBIGUOUS, ())
    for _ in range(200):
        if not allowed(matcher.masks(())[0]):
            break
        matcher.advance(letters("b"))
    assert str(matcher.error).startswith("the grammar cannot be followed: parser error: Too many items")


def test_a_grammar_that_takes_too_long_gets_an_error_and_the_same_masks(matchers: Matchers):
    clock = FakeClock()

    def write(matcher: Matcher, mask: Tensor) -> None:
        clock.advance(seconds[0])
        written(matcher, mask)

    written, errors = Matcher._write, list[str | None]()
    seconds = [0.26, 0.24]
    with clock.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matcher, "_write", write)
        while seconds:
            matcher = matchers.begin(COLOURS, ())
            for letter in letters("red"):
                matcher.masks(())
                matcher.advance([letter])
            assert allowed(matcher.masks(())[0]) == STOPS
            errors.append(matcher.error)
            del seconds[0]
    assert errors == [
        "the grammar takes too long: one token took 260 ms to process; at most 250 ms are allowed",
        "the grammar takes too long: its tokens take more than 6 ms each to process",
    ]


@pytest.mark.parametrize("asked", ["forced", "advance", "allowed", "masks"])
def test_whatever_follows_a_grammar_is_counted_once(matchers: Matchers, asked: str):
    """The first computation of forced tokens takes 60 ms here, and is counted as part of a mask too."""
    clock, matcher = FakeClock(), matchers.begin(COLOURS, ())
    matcher.forced()  # the grammar is compiled here
    matcher = matchers.begin(COLOURS, ())
    ahead = Matcher._ahead

    def slow(matcher: Matcher) -> list[int]:
        clock.advance(0.06 if matcher._forced is None else 0.0)
        return ahead(matcher)

    calls = {
        "forced": lambda: matcher.forced(),
        "advance": lambda: matcher.advance(letters("r")),
        "allowed": lambda: matcher.allowed(letters("r")),
        "masks": lambda: matcher.masks(()),
    }
    with clock.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matcher, "_ahead", slow)
        calls[asked]()
        left = matcher._budget._left_s
    assert left == pytest.approx(AHEAD_S - (0.0 if asked == "advance" else 0.06))


def test_what_an_error_quotes_is_one_line_without_control_characters(
    matchers: Matchers, caplog: pytest.LogCaptureFixture
):
    matcher = matchers.begin(Grammar(text='start: nobody\nA: "\x1b[31m"\n\u2028\u0085'), ())
    matcher.masks(())
    assert matcher.error
    assert matcher.error.isprintable()

    def missing() -> object:
        raise FileNotFoundError("tiktoken\n\x1b[31m" + "x" * 1000)

    lost = Matchers(missing, TINY_VOCAB)  # type: ignore[arg-type]
    lost.begin(COLOURS, ()).masks(())
    lost.close()
    [record] = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 400


def test_without_a_vocabulary_nothing_is_allowed_and_nothing_is_raised():
    def missing() -> object:
        raise FileNotFoundError("tiktoken.model")

    lost = Matchers(missing, TINY_VOCAB)  # type: ignore[arg-type]
    matcher = lost.begin(COLOURS, [65])
    assert allowed(matcher.masks([66])[0]) == set()
    lost.close()


def test_texts_of_compiled_grammars_are_bounded_together(matchers: Matchers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.run.grammar.matcher.KEPT_CHARS", 1000)
    texts = [f'start: "{letter * 300}"' for letter in "abcde"]
    for text in texts:
        matchers.begin(Grammar(text=text), ())
        assert matchers._chars == sum(map(len, matchers._compiled)) <= 1000
    assert list(matchers._compiled) == texts[-3:]
    matchers.begin(Grammar(text=f'start: "{"f" * 2000}"'), ())
    assert len(matchers._compiled) == 1, "only the most recently used grammar is kept"


def test_who_asks_whether_a_grammar_is_compiled_has_it_compiled_and_waits_for_nothing():
    go = threading.Event()

    def vocabulary() -> object:
        assert go.wait(LIMIT_S)
        return grammar_tokens(TOKENIZER)

    made, done = Matchers(vocabulary, TINY_VOCAB), list[str]()  # type: ignore[arg-type]
    assert not made.hold(COLOURS.text).done()
    for text in (COLOURS.text, "start: nobody", COLOURS.text):
        made.compile(text, functools.partial(done.append, text))
    assert done == []
    go.set()
    until(lambda: len(done) == 3)
    assert done == [COLOURS.text, "start: nobody", COLOURS.text]
    assert made.hold(COLOURS.text).done()
    assert made.hold("start: nobody").done(), "a grammar that fails to compile must not block"
    made.close()


def test_the_last_grammars_are_kept_and_no_more(matchers: Matchers):
    for n in range(KEPT + 5):
        matchers.begin(Grammar(text=f'start: "{n}"'), ())
    assert len(matchers._compiled) == KEPT
    first = matchers._compiled[f'start: "{KEPT}"']
    matchers.begin(Grammar(text=f'start: "{KEPT}"'), ())
    assert matchers._compiled[f'start: "{KEPT}"'] is first


def test_masked_logits_keep_their_bits_where_they_may():
    logits = torch.randn(2, 40)
    masks = torch.tensor([[5, 0], [-1, 1 << 7]], dtype=torch.int32)
    rows = masked(logits, masks)
    assert (rows[0].isfinite().nonzero().flatten().tolist(), rows[0, 2]) == ([0, 2], logits[0, 2])
    assert rows[1].isfinite().nonzero().flatten().tolist() == [*range(32), 39]


def bounded(most: int, grammar: Grammar | None = None) -> Grammar:
    """The grammar, or none, after at most `most` tokens of thinking."""
    thinking = Thinking(most=most, end=THOUGHT, ends=(THOUGHT, 3))
    return msgspec.structs.replace(grammar or Grammar(text=""), thinking=thinking)


def test_behind_the_last_token_of_thinking_only_its_end_is_allowed(matchers: Matchers):
    matcher = matchers.begin(bounded(2), ())
    everything = set(range(32 * matchers.words))
    rows = matcher.masks([65, 66, THOUGHT, 65])
    assert [allowed(row) for row in rows] == [everything, everything, {THOUGHT}, everything, everything]
    assert len(matcher.masks([65, 66, 67, 65])) == 3
    assert (matcher.idle, matcher.quiet(2), matcher.quiet(3), matcher.forced()) == (True, True, False, [])
    assert matcher.allowed([65, 66, THOUGHT]) == 1  # so that a row without a mask ends before the bound
    assert matcher.allowed([65, THOUGHT, 66]) == 3
    matcher.advance([65, 66])
    assert (matcher.idle, matcher.quiet(1), matcher.forced()) == (False, False, [THOUGHT])
    assert matcher.allowed([THOUGHT, 65]) == 2
    matcher.advance([THOUGHT])
    assert (matcher.idle, matcher.quiet(1000), matcher.forced()) == (True, True, [])


def test_an_answer_that_owes_tokens_may_end_where_its_grammar_has_begun(matchers: Matchers):
    call = Grammar(text=f'start: <[{THOUGHT}]> "red"', after=(THOUGHT,))
    everything = set(range(32 * matchers.words))

    def begun(generated: Sequence[int]) -> Matcher:
        return matchers.begin(call, generated, least=3, stop_ids=(END, 5))

    matcher = begun(())
    assert [allowed(row) for row in matcher.masks([65, 66, 67])] == [everything - {END, 5}] * 3 + [everything]
    assert (matcher.idle, matcher.allowed([65, END]), matcher.allowed([65, 66, 67, END])) == (False, 1, 4)
    assert (begun([65, 66]).idle, begun([65, 66, 67]).idle) == (False, True)
    matcher.advance([THOUGHT, *letters("red")[:1]])
    assert matcher.idle is False
    assert allowed(begun([THOUGHT, *letters("red")]).masks(())[0]) == STOPS
    short = Grammar(text=f"start: <[{THOUGHT}]> /[ab]*/", after=(THOUGHT,))
    assert allowed(matchers.begin(short, [THOUGHT], least=9, stop_ids=(END,)).masks(())[0]) > STOPS


def test_no_budget_at_all_begins_with_the_end(matchers: Matchers):
    assert matchers.begin(bounded(0), ()).forced() == [THOUGHT]
    assert matchers.begin(bounded(1), [65]).forced() == [THOUGHT]


def test_thinking_that_ends_with_a_call_is_over(matchers: Matchers):
    assert matchers.begin(bounded(2), [3]).quiet(1000)


def test_a_bound_stands_before_a_grammar_as_well(matchers: Matchers):
    text = Grammar(text=f'start: <[{THOUGHT}]> "red"', after=(THOUGHT,), banned=(END,))
    matcher = matchers.begin(bounded(1, text), ())
    before = matcher.masks(()).tolist()
    first, bound, begun = matcher.masks([65, THOUGHT])
    assert (END in allowed(first), allowed(bound)) == (False, {THOUGHT})
    assert {TOKENIZER.token_bytes(token) for token in allowed(begun)} == {b"re"}
    assert matcher.masks(()).tolist() == before


def test_a_bound_that_is_met_behind_drafts_does_not_end_an_answer_that_goes_elsewhere(monkeypatch: pytest.MonkeyPatch):
    """Whatever was drafted: at a position after a draft for which the mask is unknown no token is allowed, and the
    answer continues.
    """
    monkeypatch.setattr("redline.policy.grammar.STEP_ITEMS", 300)
    matchers = Matchers(functools.partial(grammar_tokens, TOKENIZER), TINY_VOCAB)
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(200)}}
    text = f'start: "n" /[a-z]+/ | "y" object\nobject: %json {json.dumps({**schema, "additionalProperties": False})}'
    drafts = letters('y{"p1":1,"p')
    try:
        drafted, plain = matchers.begin(Grammar(text=text), ()), matchers.begin(Grammar(text=text), ())
        first = plain.masks(())[0].tolist()
        rows = drafted.masks(drafts)
        assert 1 < len(rows) <= len(drafts)
        assert (rows[0].tolist(), allowed(rows[-1])) == (first, set())
        assert drafted.error is None
        assert drafted.allowed(drafts) == 0, "the drafts are dropped, so that the limit is not exceeded again"
        assert [row.tolist() for row in drafted.masks(drafts)] == [first, [0] * matchers.words]
        for matcher in (drafted, plain):
            matcher.advance(letters("nab"))
        assert drafted.masks(()).tolist() == plain.masks(()).tolist()
        assert drafted.error is None
        reached = matchers.begin(Grammar(text=text), letters('y{"p1":1'))
        assert [allowed(row) for row in reached.masks(letters("1"))] == [set()]
        assert "300" in str(reached.error), "an answer that reaches the limit ends with an error"
    finally:
        matchers.close()
