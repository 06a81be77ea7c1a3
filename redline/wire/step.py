"""What every rank computes now, and what came of it.

The tokens of a running job live in its slot on the device: `Begin` fills the slot, sampling appends to it, and a
`Row` says which positions to run. So step n+1 can be planned and launched before the tokens of step n are read.
"""

from typing import Literal

from redline.wire.base import Message, Record
from redline.wire.job import PageId, Sampling


class Begin(Record, frozen=True):
    """A job takes a slot (for the first time, or again after pre-emption)."""

    slot: int
    tokens: tuple[int, ...]  # the prompt, then what was generated before a pre-emption
    prompt: int  # how many of them are the prompt
    pages: tuple[PageId, ...]  # cached pages, computed already: they cover tokens [0, 64 * len); but see `computed`
    sampling: Sampling
    # Tokens, prompt and answer, that the job comes to at most. The drafter has no row of the last one: so where another
    # worker goes on behind it, one more.
    limit: int
    drafting: bool = False  # the learned drafter follows the job, and `pages` carry its rows
    # Positions that `pages` hold; None: all of theirs. Else the prompt was computed elsewhere: its last page may be
    # partly filled, and another may follow for the answer.
    computed: int | None = None


class Row(Record, frozen=True):
    """Positions [start, start + count) of a slot go through the model in this step.

    A decode row goes on at the slot's last token, whose position only the device knows at launch, so its start is None.
    It verifies the slot's drafts: at most `drafts` of them, fewer where there are fewer or the job's limit is near.
    """

    slot: int
    start: int | None  # None: a decode row
    count: int  # of a decode row 1 + drafts, at most
    drafts: int = 0
    propose: int = 0  # tokens to draft behind this row, at most, for the next one
    drafting: bool = False  # the learned drafter reads the row; once it has not, it has lost the job
    new_pages: tuple[PageId, ...] = ()  # appended to the slot's page table before the step
    samples: bool = True  # false in every chunk of a prefill but the last


class Shape(Record, frozen=True):
    """The size of a recorded decode step."""

    rows: int
    positions: int  # of each row: its last token and the drafts behind it
    longest: int  # context of any row, in tokens


class Recorded(Record, frozen=True):
    """What one rank can replay now."""

    rank: int = 0
    shapes: tuple[Shape, ...] = ()


class Drawn(Record, frozen=True):
    """What the tokens of the first so many steps of a rank came to: equal on all ranks, or they have parted ways."""

    steps: int = 0
    digest: int = 0


class Step(Message, frozen=True):
    """One pass of the model. A step mixes prefill chunks, plain decode rows and verify rows."""

    number: int
    begins: tuple[Begin, ...] = ()
    rows: tuple[Row, ...] = ()  # none: an idle step
    # What its decode rows replay: it holds them and their contexts, and every rank has reported it. A row verifies no
    # more drafts than it has positions for. None: nothing that is recorded holds them, and the host leads.
    shape: Shape | None = None
    drawn: Drawn | None = None  # by rank 0, in steps that it has read; other ranks compare it with their own


class TokenLogprobs(Record, frozen=True):
    """Natural-log probabilities at one position, of the model's own distribution (before penalties and temperature)."""

    token: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # best first


Drafter = Literal["learned", "suffix", "grammar"]
"""Who makes drafts: a learned drafter, a match of the text's own past, or a grammar, which knows what must come."""


Proposer = Literal["target", "learned", "suffix", "grammar"]
"""Who proposed a token of an answer: the model itself, or who made the draft that it accepted."""


class RowResult(Record, frozen=True):
    """What a row gave. `error` ends the job that owns the row, and that job only: its client gets no `tokens` of the
    same row, which are there since other ranks may have them without an error."""

    tokens: tuple[int, ...] = ()  # none where the row does not sample
    proposed: int = 0  # drafts that were verified
    accepted: int = 0  # how many of them held; a decode row gives one token more, which is the model's own
    by: Drafter | None = None  # who made those drafts
    waiting: int | None = None  # drafts that lie behind the row for the next one; None: not known
    forced: int = 0  # tokens that come behind these in any case, since the job's grammar allows no others
    logprobs: tuple[TokenLogprobs, ...] = ()  # as many as tokens, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for positions [start + 1, start + count] that are prompt
    error: str | None = None
    refused: bool = False  # the error is the client's, since what it asked for cannot be computed


class StepResult(Record, frozen=True):
    """What came of a step: `number` is the step's."""

    number: int
    rows: tuple[RowResult, ...]  # in the order of the step's rows
    replayed: bool = False  # its decode rows, from a recorded graph; otherwise led by the host, launch by launch
    # Made by the learned drafter, for each row that it drafted for. None: all that were asked for.
    drafted: tuple[int, ...] | None = None


class Place(Message, frozen=True):
    """Before a step that is measured: where a slot stands, and the drafts that its next row verifies.

    drafts None: the slot's text is not searched for matches from now on.
    """

    slot: int
    length: int = 0
    drafts: tuple[int, ...] | None = None


class RecordMore(Message, frozen=True):
    """Every rank records the next of the shapes that the start has left."""


class Compile(Message, frozen=True):
    """Every rank compiles this grammar now, and counts it in the memory that all share: a job waits for it. The rank
    keeps it until `Forget` names its number."""

    number: int  # of this message, from 1 on
    text: str


class Forget(Message, frozen=True):
    """Rank 0 has forgotten these grammars, and no job needs them: other ranks need not keep them any more."""

    numbers: tuple[int, ...]  # of `Compile`


class Hurry(Message, frozen=True):
    """The start is over: once all ranks have heard this, they wait for one another for a short time only."""
