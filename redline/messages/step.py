"""The input and the result of one step, the same on every tensor parallel rank.

The tokens of a running job are kept in its slot on the device: `Begin` fills the slot, sampling appends to it, and a
`Row` names the positions to run. So step n+1 can be scheduled and launched before the tokens of step n are read.
"""

from typing import Literal

from redline.messages.base import Record, WireMessage
from redline.messages.job import PageId, Sampling


class Features(Record, frozen=True):
    """Prompt positions from `start` on are an image: their embeddings are these rows of the feature table."""

    start: int
    rows: tuple[int, ...]


class Encode(Record, frozen=True):
    """Blocks [start, start + count) of the vision encoder run for an image before the step's rows."""

    hash: bytes  # of the `ImageData`
    start: int  # 0: the image enters the encoder
    count: int
    rows: tuple[int, ...] = ()  # of the last blocks: where in the feature table the result is stored


class Begin(Record, frozen=True):
    """A job takes a slot, for the first time or again after a preemption."""

    slot: int
    tokens: tuple[int, ...]  # the prompt, then tokens generated before a preemption
    prompt: int  # number of prompt tokens
    pages: tuple[PageId, ...]  # cached pages, already computed: they cover tokens [0, 64 * len), but see `computed`
    sampling: Sampling
    # Maximum number of tokens, prompt and answer. The drafter has no row of the last one, so it is one more if another
    # worker continues after it.
    limit: int
    drafting: bool = False  # the learned drafter follows the job, and `pages` contain its rows
    # Number of positions in `pages`; None: the pages are full. Otherwise the prompt was computed by another worker: its
    # last page may be partly filled, and another page may follow for the answer.
    computed: int | None = None
    features: tuple[Features, ...] = ()  # of the images in the prompt that `pages` do not cover


class Row(Record, frozen=True):
    """Positions [start, start + count) of a slot are computed in this step.

    A decode row continues after the slot's last token, whose position only the device knows at launch, so its start is
    None. It verifies the slot's draft tokens: at most `drafts`, fewer if the slot has fewer or the job is near its
    limit.
    """

    slot: int
    start: int | None  # None: a decode row
    count: int  # for a decode row the maximum, 1 + drafts
    drafts: int = 0
    propose: int = 0  # maximum number of tokens to draft after this row, for the next one
    # A block drafter proposes a token only if it and all before it are accepted with at least this probability.
    least: float = 0.0
    # The learned drafter reads the row; after a row that it did not read, it cannot follow the job again.
    drafting: bool = False
    new_pages: tuple[PageId, ...] = ()  # appended to the slot's page table before the step
    samples: bool = True  # false for every prefill chunk but the last


class Shape(Record, frozen=True):
    """Size of a captured CUDA graph of a decode step."""

    rows: int
    positions: int  # per row: its last token and the draft tokens
    longest: int  # maximum context of a row, in tokens


class CapturedShapes(Record, frozen=True):
    """The CUDA graphs that one rank has captured so far."""

    rank: int = 0
    shapes: tuple[Shape, ...] = ()


class Drawn(Record, frozen=True):
    """Digest of the tokens sampled in the first `steps` steps of a rank: if ranks differ, they have diverged."""

    steps: int = 0
    digest: int = 0


class Step(WireMessage, frozen=True):
    """One forward pass. A step mixes prefill chunks, plain decode rows and verify rows."""

    number: int
    begins: tuple[Begin, ...] = ()
    rows: tuple[Row, ...] = ()  # empty: an idle step
    # CUDA graph to replay for the decode rows: it is large enough for the rows and their contexts, and every rank has
    # reported it. A row verifies at most as many draft tokens as the graph has positions for. None: no captured graph
    # is large enough, and the step runs eagerly.
    shape: Shape | None = None
    # Digest of rank 0, over steps that it has read; the other ranks compare it with their own.
    drawn: Drawn | None = None
    encodes: tuple[Encode, ...] = ()  # run before the rows; a step may have nothing else


class TokenLogprobs(Record, frozen=True):
    """Natural-log probabilities at one position, of the model's own distribution (before penalties and temperature)."""

    token: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # best first


Drafter = Literal["learned", "suffix", "grammar"]
"""The source of draft tokens: a learned drafter, a suffix match in the job's own text, or a grammar that allows only
one continuation."""


Proposer = Literal["target", "learned", "suffix", "grammar"]
"""The source of an answer's token: the target model itself, or the drafter of an accepted draft token."""


class RowResult(Record, frozen=True):
    """The result of a row. `error` ends the job of the row, and no other job: its client gets no `tokens` of this
    row, which are present because other ranks may have sampled them without an error."""

    tokens: tuple[int, ...] = ()  # empty if the row does not sample
    proposed: int = 0  # verified draft tokens
    accepted: int = 0  # of these, accepted; a decode row gives one more token, the model's own
    by: Drafter | None = None  # the drafter that made them
    waiting: int | None = None  # draft tokens ready for the next row; None: unknown
    forced: int = 0  # tokens that must follow these, because the job's grammar allows no others
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `tokens`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for the prompt positions in [start + 1, start + count]
    error: str | None = None
    refused: bool = False  # the error is the client's: the request cannot be computed


class StepResult(Record, frozen=True):
    """The result of the step with this `number`."""

    number: int
    rows: tuple[RowResult, ...]  # in the order of the step's rows
    replayed: bool = False  # the decode rows were replayed as a CUDA graph; otherwise they ran eagerly
    # Draft tokens made by the learned drafter, for each row that it drafted for. None: all that were requested.
    drafted: tuple[int, ...] | None = None
    failed: bool = False  # the step raised an error, which each of its rows has
    encode_s: float | None = None  # time of the step's `encodes`, or of those of an earlier step; None: unknown


class Place(WireMessage, frozen=True):
    """Set the state of a slot before a measured step: its length, and the draft tokens that its next row verifies.

    drafts None: disables suffix matching for the slot.
    """

    slot: int
    length: int = 0
    drafts: tuple[int, ...] | None = None


class RecordMore(WireMessage, frozen=True):
    """Every rank captures the next CUDA graph of those that were not captured at the start."""


class Compile(WireMessage, frozen=True):
    """Every rank compiles this grammar now, and accounts for its size in the memory that all ranks share; a job
    waits for it. The rank keeps it until a `Forget` with its number."""

    number: int  # of this message, from 1 on
    text: str


class Forget(WireMessage, frozen=True):
    """Rank 0 has dropped these grammars, and no job needs them: the other ranks may drop them too."""

    numbers: tuple[int, ...]  # of the `Compile` messages


class Hurry(WireMessage, frozen=True):
    """The start is complete: after all ranks have received this, they wait for one another with a short timeout."""
