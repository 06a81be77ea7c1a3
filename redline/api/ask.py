"""A question with no dialect left in it: what every API reads into, and what the gateway answers."""

from redline.chat.constraint import Calls, Constraint
from redline.chat.conversation import Conversation
from redline.wire.base import Record
from redline.wire.job import Sampling

MOST_BIASES = 300  # tokens in `logit_bias`
WHAT_IS_LEFT = (1 << 31) - 1  # as Sampling.max_tokens: as many as the context still holds

Prompt = Conversation | str | tuple[int, ...]  # a chat, raw text, or token ids


class Ask(Record, frozen=True):
    """Prompts to answer, each `n` times; the index of a choice is (index of its prompt) * n + k.

    The gateway completes `sampling`: it sets `seed` and `seeded`, adds the model's own `stop_ids`, cuts `max_tokens` to
    the room that is left in the context, and makes it 1 where it is 0 (score the prompt, generate nothing).
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    n: int = 1
    seed: int | None = None  # None: a random one
    stop: tuple[str, ...] = ()  # strings that end an answer
    include_stop: bool = False  # what ended the answer is part of it
    skip_special_tokens: bool = True  # control tokens have no text (redline.chat.decoder.Decoder)
    ignore_eos: bool = False  # the model's own stop ids do not end an answer
    timeout_s: float | None = None  # from the request's arrival to the last token; None: as the deployment has it
    salt: str = ""  # requests with different salts never share cached pages
    constraint: Constraint | None = None  # what the visible answer has to be
    thinking_budget: int | None = None  # tokens of thinking, at most; None: as many as come
    calls: Calls = Calls()  # which of the conversation's tools may be called
    reasoning: bool = True  # it is shown; false: it is generated and counted, and not shown
    token_ids: bool = False  # of prompts and answers are told
    proposers: bool = False  # of its tokens are told; each piece of an answer then has one
    param: str = "messages"  # the field that the prompts came from, for errors

    @property
    def choices(self) -> int:
        """How many answers are asked for: prompts times `n`. Each of them is a job."""
        return len(self.prompts) * self.n
