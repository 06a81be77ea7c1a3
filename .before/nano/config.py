"""Kimi-Nano's geometry: K2's architecture with K2's own attention sizes, small enough to lie in a repository."""

from dataclasses import replace

from nano.tokenizer import RANKS
from redline.chat.tokenizer import RESERVED
from redline.model.config import Unquantized
from redline.model.shapes import KIMI_NANO

# YaRN: K2.5's own factor, so that the softmax scale is K2.5's too. The original length times the factor is 65,536
# positions, and with 1,024 the ramp's ends are pairs 4 and 16 of 32: the fast pairs tell apart neighbours in the rows
# of 1,024 that most training reads, the slow ones stay within a fraction of a turn at 4,096 and serve content at any
# distance.
NANO = KIMI_NANO
assert NANO.vocab_size == RANKS + RESERVED, "the tokenizer and the geometry have the same vocabulary"
NANO_BF16 = replace(NANO, quantization=Unquantized())
MEDIA_PLACEHOLDER = RANKS + 21  # <|media_pad|>
