"""A question with no dialect left in it: what every API reads into, and what the gateway answers."""

from redline.chat.conversation import Conversation
from redline.wire.base import Record
from redline.wire.job import Sampling

WHAT_IS_LEFT = (1 << 31) - 1  # as Sampling.max_tokens: as many as the context still holds

Prompt = Conversation | str | tuple[int, ...]  # a chat, raw text, or token ids


class Ask(Record, frozen=True):
    """Prompts to answer, each `n` times; choice index = prompt * n + k.

    Of `sampling`, the gateway settles `seed`, `seeded` and `stop_ids` (it adds the model's own), and `max_tokens`:
    WHAT_IS_LEFT, or 0 to score the prompt and generate nothing.
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    n: int = 1
    seed: int | None = None  # None: a random one
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # what ended the answer is part of it
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    salt: str = ""
    param: str = "messages"  # the field that the prompts came from, for errors

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n
