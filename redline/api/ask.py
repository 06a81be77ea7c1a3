"""A generation request in no particular API format: every API parses into it, and the gateway serves it."""

from redline.chat.constraint import Calls, Constraint
from redline.chat.conversation import Conversation
from redline.messages.base import Record
from redline.messages.job import Sampling

MOST_BIASES = 300  # tokens in `logit_bias`
WHAT_IS_LEFT = (1 << 31) - 1  # as Sampling.max_tokens: all that the context still holds

Prompt = Conversation | str | tuple[int, ...]  # a chat, raw text, or token ids


class Ask(Record, frozen=True):
    """Prompts, each to be answered `n` times; the index of a choice is (index of its prompt) * n + k.

    The gateway completes `sampling`: it sets `seed` and `seeded`, adds the model's own `stop_ids`, limits `max_tokens`
    to the room left in the context, and turns a `max_tokens` of 0 (score the prompt, generate nothing) into 1.
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    n: int = 1
    seed: int | None = None  # None: random
    stop: tuple[str, ...] = ()  # stop strings, which end an answer
    include_stop: bool = False  # include the stop string in the answer
    skip_special_tokens: bool = True  # control tokens are decoded to no text (redline.chat.decoder.Decoder)
    ignore_eos: bool = False  # the model's own stop ids do not end an answer
    timeout_s: float | None = None  # from the request's arrival to the last token; None: the deployment's limit
    salt: str = ""  # requests with different salts never share cached pages
    constraint: Constraint | None = None  # of the visible answer
    thinking_budget: int | None = None  # most tokens of reasoning; None: unlimited
    calls: Calls = Calls()  # which of the conversation's tools may be called
    reasoning: bool = True  # return the reasoning; False: it is generated and counted, but not returned
    token_ids: bool = False  # return the token ids of prompts and answers
    proposers: bool = False  # return the proposer of tokens; each piece of an answer then has only one
    param: str = "messages"  # the field of the prompts, for errors

    @property
    def choices(self) -> int:
        """Number of answers: prompts times `n`. Each is one job."""
        return len(self.prompts) * self.n
