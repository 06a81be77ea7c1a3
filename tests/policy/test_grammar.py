"""The permitted cost of following a grammar."""

from redline.policy.grammar import AHEAD_S, EACH_S, LONGEST_S, GrammarBudget, told


def test_steps_of_the_mean_are_paid_for_for_ever():
    budget = GrammarBudget()
    assert {budget.spend(0.9 * EACH_S) for _ in range(10_000)} == {None}


def test_slower_ones_use_up_what_an_answer_may_be_ahead():
    budget, slow = GrammarBudget(), 10 * EACH_S
    for _ in range(int(AHEAD_S / (slow - EACH_S))):
        assert budget.spend(slow) is None
    assert "more than 6 ms each" in str(budget.spend(slow))


def test_what_fast_steps_save_is_bounded():
    budget = GrammarBudget()
    for _ in range(10_000):
        budget.spend(0.0)
    assert [budget.spend(LONGEST_S) for _ in range(2)] == [None, None]
    assert budget.spend(LONGEST_S) is not None


def test_one_step_may_not_take_longer_than_all_that_is_allowed():
    assert "one token took 251 ms" in str(GrammarBudget().spend(LONGEST_S + 0.001))


def test_what_is_no_step_earns_nothing():
    budget = GrammarBudget()
    for _ in range(int(AHEAD_S / EACH_S) - 1):
        assert budget.spend(EACH_S, steps=0) is None
    assert [budget.spend(EACH_S, steps=0) for _ in range(3)][-1] is not None


def test_an_error_becomes_one_bounded_line():
    assert told("too many items <non-verbose/>") == "too many items"
    assert told("a\n  b\x1b[0m\ud800\u2028c\x00") == "a b\\x1b[0m\\ud800 c\\x00"
    assert len(told("x" * 10_000)) == 300
