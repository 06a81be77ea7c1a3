"""Structured output: the allowed next tokens of a slot with a grammar.

A matcher advances over its slot's tokens, and gives a mask for each position of a row: the position after the last
token, and those after each draft. If the grammar forces a text, it forces the tokens that the tokenizer would write for
it: so a forced run is known before the model has run, and drafts made of it are accepted whatever the model prefers.

W words of a mask, 32 tokens each.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from redline import clock
from redline.messages.job import Grammar
from redline.policy.grammar import GrammarBudget, parser_limits, told

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # most recently used compiled grammars kept although no job holds them
KEPT_CHARS = 2 << 20  # characters of their texts together; compiled, a schema takes up to 85 bytes per character
_log = logging.getLogger(__name__)

_EVERY = -1  # word of a mask that allows all of its tokens


class Matchers:
    """Compiles grammars in a thread of its own, and keeps those in use and the most recent ones."""

    def __init__(self, tokens: Callable[[], LLTokenizer], vocabulary: int, *, pinned: bool = False) -> None:
        """tokens: makes the vocabulary that grammars are compiled with; called once, in the thread.

        vocabulary: size of the model's logits. pinned: whether masks are in pinned memory, for asynchronous copies to a
        GPU.
        """
        self.words = -(-vocabulary // 32)
        self.pinned = pinned
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokens: Future[LLTokenizer] = self._threads.submit(tokens)  # runs while the model's memory is prepared
        self._alive: weakref.WeakValueDictionary[str, Future[LLMatcher]] = weakref.WeakValueDictionary()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # the most recently used of these
        self._chars = 0  # characters of their texts
        self._lock = threading.Lock()  # protects the three attributes above

    def begin(
        self, grammar: Grammar, generated: Sequence[int], *, least: int = 0, stop_ids: Sequence[int] = ()
    ) -> Matcher:
        """A matcher for an output with the tokens `generated` so far. The compilation is waited for only when the
        matcher is first used, or here if it has tokens to advance over.

        least: output tokens before which none of `stop_ids` may come, unless the grammar has begun.
        """
        owed = least if stop_ids else 0
        if not grammar.text:
            return Matcher(self, grammar, None, generated, owed, stop_ids)
        return Matcher(self, grammar, self.hold(grammar.text), generated, owed, stop_ids)

    def hold(self, text: str) -> Future[LLMatcher]:
        """The compilation of a grammar, started unless it was before. Its exception, if any, says why the grammar
        cannot be compiled. While the result is referenced, the grammar is not compiled again. Any thread may call
        this."""
        with self._lock:
            compiled = self._alive.get(text)
            if compiled is None:
                compiled = self._alive[text] = self._threads.submit(self._compile, text)
            if text not in self._compiled:
                self._compiled[text] = compiled
                self._chars += len(text)
                while len(self._compiled) > KEPT or (self._chars > KEPT_CHARS and len(self._compiled) > 1):
                    oldest, _ = self._compiled.popitem(last=False)
                    self._chars -= len(oldest)
            self._compiled.move_to_end(text)
            return compiled

    def compile(self, text: str, done: Callable[[], object]) -> Future[LLMatcher]:
        """As `hold`. The thread calls `done` once the grammar is compiled, in the order of these calls."""
        compiled = self.hold(text)
        self._threads.submit(done)
        return compiled

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an output when its grammar is complete; empty if the vocabulary could not be made."""
        return frozenset() if self._tokens.exception() is not None else frozenset(self._tokens.result().eos_tokens)

    def close(self) -> None:
        """Ends the thread; queued compilations are cancelled."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _compile(self, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._tokens.result(), text, log_level=0, limits=parser_limits())


class Matcher:
    """State of one output in its grammar."""

    def __init__(
        self,
        matchers: Matchers,
        grammar: Grammar,
        compiled: Future[LLMatcher] | None,
        generated: Sequence[int],
        owed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """compiled: the grammar, copied when it is first needed; None: the grammar has no text, and never begins.

        generated: output tokens so far. owed, stop_ids: `least` and `stop_ids` of `Matchers.begin`.
        """
        self._matchers = matchers
        self._grammar = grammar
        self._compiled = compiled
        self._own: LLMatcher | None = None
        self._lost = False  # the grammar cannot be compiled
        self._budget = GrammarBudget()
        self.error: str | None = None  # why the job cannot continue, in one line for its client; None: no error so far
        self._free = compiled is None or bool(grammar.after)  # the grammar has not begun
        # Tokens left of the thinking budget; None: thinking is over, or not bounded.
        self._left = None if grammar.thinking is None else max(0, grammar.thinking.most)
        self._owed = owed  # tokens to come before the output may end, while the grammar has not begun
        self._stop_ids = stop_ids
        self._ended = False  # the output has ended: later tokens are ignored
        self._forced: list[int] | None = None  # the tokens that must come next; None: not computed yet
        self._consumed: list[int] = []  # the tokens that llguidance's matcher has consumed
        self._wary = False  # a limit was reached while following drafts: no drafts are followed any more
        self.follow(generated)

    @property
    def idle(self) -> bool:
        """Whether any token may come next, because the grammar has not begun."""
        return self._free and not self._banned and self._left != 0

    @property
    def _banned(self) -> Sequence[int]:
        """The tokens that may not come before the grammar has begun."""
        return (*self._grammar.banned, *self._stop_ids) if self._owed else self._grammar.banned

    def quiet(self, tokens: int) -> bool:
        """Whether any token may come at each of the next `tokens` positions, whatever comes before it. Any thread
        may ask."""
        left = self._left  # read once: another thread may advance the matcher during this call
        return not self._grammar.text and not self._owed and (left is None or left >= tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """Advances over accepted tokens. Tokens after the output's end are ignored."""
        began = clock.thread_time()
        self.follow(tokens)
        self._spend(began, steps=0)

    def follow(self, tokens: Sequence[int]) -> None:
        """As `advance`, for tokens that were followed before: they are not charged to the time budget."""
        for token in tokens:
            if self._ended or not self._take(token):
                return

    def masks(self, drafts: Sequence[int]) -> Tensor:
        """The allowed tokens after the last token and after each draft, int32 [rows, W]: a bit for each token.

        The last row is that of the first draft which is refused, or which ends the output: no row follows it. A grammar
        that cannot continue, such as one that reaches a limit of `parser_limits`, allows no token; if it cannot
        continue after a draft, the output goes on, and no further drafts are followed. A grammar that exceeds its time
        budget gets an `error` and the same masks: ranks have clocks of their own, and must choose the same tokens.
        """
        matchers = self._matchers
        masks = torch.empty(1 + len(drafts), matchers.words, dtype=torch.int32, pin_memory=matchers.pinned)
        before = self._free, self._left, self._owed, self._ended, self._forced
        consumed, error = len(self._consumed), self.error
        rows = 0
        began = clock.thread_time()
        for draft in (*drafts, None):
            self._write(masks[rows])
            rows += 1
            began = self._spend(began)
            if rows == 1 and self._is_broken:
                return masks[:1]
            if draft is None or self._ended or self._ends(draft):
                break
            if self._wary or not self._allows(draft):
                if self._wary or self._is_broken:  # the tokens after it are not known
                    masks[rows] = 0
                    rows += 1
                break
            self._take(draft)
        self._back(consumed, error, *before)
        return masks[:rows]

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many consecutive drafts the grammar accepts before the output's end.

        While the grammar is idle, these are the drafts before it begins: so the row needs no mask at all. The draft
        after these is verified too, as the last one. A row without it would draw that token anew, and draws are
        distributed as without drafts only if the drafts before a draft decide whether it is verified.
        """
        if self.idle:
            free = _before(drafts, self._grammar.after)
            thinking = self._grammar.thinking
            if thinking is None or self._left is None or _before(drafts, thinking.ends) < self._left:
                return free
            return min(free, self._left - 1)
        if self._wary or self._is_broken:
            return 0
        before = self._free, self._left, self._owed, self._ended, self._forced
        consumed, error = len(self._consumed), self.error
        began = clock.thread_time()
        count = 0
        for draft in drafts:
            if self._ended or not self._allows(draft) or self._ends(draft):
                break
            count += 1
            self._take(draft)
        self._back(consumed, error, *before)
        self._spend(began, steps=0)
        return count

    def forced(self) -> list[int]:
        """The tokens that the grammar forces next, whatever the model prefers."""
        began = clock.thread_time()
        forced = self._ahead()
        self._spend(began, steps=0)
        return forced

    def _ahead(self) -> list[int]:
        if self._ended:
            return []
        if self._free:
            return [self._grammar.thinking.end] if self._grammar.thinking is not None and self._left == 0 else []
        if self._forced is None:
            matcher = self._matcher()
            self._forced = [] if matcher is None else matcher.compute_ff_tokens()
        return self._forced

    def forced_behind(self, drafts: Sequence[int]) -> list[int]:
        """The tokens that the grammar forces after a row that verifies these drafts, as far as is known before the
        row has run: while tokens are forced, the number of accepted drafts is known too."""
        forced = self.forced()
        held = next((place for place, (a, b) in enumerate(zip(forced, drafts, strict=False)) if a != b), len(drafts))
        return forced[held + 1 :]

    def _matcher(self) -> LLMatcher | None:
        """The matcher of this output; waits for the compilation, which the scheduler has waited for already. None if
        it has failed."""
        if self._own is None and not self._lost and self._compiled is not None:
            try:
                self._own = self._compiled.result().deep_copy()
            except Exception as error:  # fails this job only: it may choose no token
                self._lost = True
                _log.warning("a grammar cannot be compiled: %s", told(f"{type(error).__name__}: {error}"))
        return self._own

    def _spend(self, began: float, steps: int = 1) -> float:
        """Charges the time since `began`, in seconds of this thread's CPU time, to the budget. Returns the current
        time."""
        now = clock.thread_time()
        if (why := self._budget.spend(now - began, steps)) is not None:
            self._fail(f"the grammar takes too long: {why}")
        return now

    def _is_lost(self, matcher: LLMatcher) -> bool:
        """Whether the matcher has failed for good: llguidance gives the reason."""
        if matcher.is_error():
            self._fail(f"the grammar cannot be followed: {told(matcher.get_error())}")
            return True
        return False

    def _fail(self, reason: str) -> None:
        self.error = self.error or reason

    def _ends(self, token: int) -> bool:
        return not self._free and token in self._matchers.stop_ids

    def _allows(self, token: int) -> bool:
        if self._free:
            return token not in self._banned if self._left != 0 else [token] == self._ahead()
        if forced := self._ahead():
            return token == forced[0]
        matcher = self._matcher()
        return matcher is not None and matcher.validate_tokens([token]) == 1

    def _take(self, token: int) -> bool:
        """Advances by one token. False if the output has ended, or has left its grammar."""
        if self._left is not None and self._grammar.thinking is not None:
            self._left = None if token in self._grammar.thinking.ends else max(0, self._left - 1)
        self._owed = max(0, self._owed - 1)
        if self._free:
            if token not in self._grammar.after:
                return True
            self._free = False
        elif self._ends(token):
            self._ended = True
            return False
        forced = self._forced
        self._forced = forced[1:] or None if forced and forced[0] == token else None
        matcher = self._matcher()
        if matcher is None:
            return False
        if matcher.consume_token(token):
            self._consumed.append(token)
            return True
        return not self._is_lost(matcher)

    @property
    def _is_broken(self) -> bool:
        """Whether llguidance's matcher has reached a limit, which it cannot recover from."""
        return self._own is not None and self._own.is_error()

    def _back(
        self,
        consumed: int,
        error: str | None,
        free: bool,
        left: int | None,
        owed: int,
        ended: bool,
        forced: list[int] | None,
    ) -> None:
        """Rolls back drafts, to the given number of consumed tokens, error and other state."""
        matcher, taken = self._own, len(self._consumed) - consumed
        del self._consumed[consumed:]
        if matcher is not None and self._compiled is not None and self._is_broken:
            self._own = self._compiled.result().deep_copy()
            self._own.consume_tokens(self._consumed)
            self.error, self._wary = error, True
        elif matcher is not None and taken:
            matcher.rollback(taken)
        self._free, self._left, self._owed, self._ended, self._forced = free, left, owed, ended, forced

    def _write(self, mask_W: Tensor) -> None:
        """Writes one row through numpy, which costs less than a torch operation."""
        words = mask_W.numpy()
        if self._ended or (self._free and self._left != 0):
            words.fill(_EVERY)
            for token in self._banned if self._free else ():
                _clear(words, token)
            return
        forced, matcher = self._ahead(), None if self._free else self._matcher()
        if forced or matcher is None:
            words.fill(0)
            for token in forced[:1]:
                _set(words, token)
            return
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._is_lost(matcher):
            words.fill(0)


def _before(tokens: Sequence[int], ends: Sequence[int]) -> int:
    """Number of tokens before the first one that is in `ends`."""
    return next((place for place, token in enumerate(tokens) if token in ends), len(tokens))


def _bit(token: int) -> np.int32:
    return np.uint32(1 << token % 32).astype(np.int32)


def _clear(words: np.ndarray[tuple[int], np.dtype[np.int32]], token: int) -> None:
    words[token // 32] &= ~_bit(token)


def _set(words: np.ndarray[tuple[int], np.dtype[np.int32]], token: int) -> None:
    words[token // 32] |= _bit(token)


def masked(logits_NV: Tensor, masks_NW: Tensor) -> Tensor:
    """A copy of the logits with -inf for the tokens that the masks do not allow."""
    bits_NV = np.unpackbits(masks_NW.numpy().view(np.uint8), axis=1, bitorder="little")[:, : logits_NV.shape[1]]
    allowed_NV = torch.from_numpy(bits_NV).bool().to(logits_NV.device)
    return logits_NV.masked_fill(~allowed_NV, -torch.inf)
