"""Texts for `redline quantize` and `redline audit`: users' files, or prompts of our own templates."""

from collections.abc import Sequence
from pathlib import Path

from redline.chat.lines import conversation
from redline.chat.template import encode, style_of
from redline.chat.tokenizer import Tokenizer
from redline.draft.corpus.corpus import read_examples
from redline.draft.corpus.prompts import DOMAINS, Prompt, prompts, read_prompts
from redline.errors import ConfigError
from redline.quant.texts import Text

OF_A_DOMAIN = 200  # prompts of our templates
LONG_CHARACTERS = (2_000, 12_000)  # of a document among them


def read_texts(folder: Path, files: Sequence[Path]) -> list[Text]:
    """Texts as the checkpoint in `folder` reads them.

    files: each a corpus that `redline draft synth` has written, whose answers alone are judged, or prompts, one JSON a
    line with domain and messages; none: our own templates' prompts.

    Raises ConfigError where a file cannot be read, or has neither in it.
    """
    found: list[Text] = []
    asked: list[Prompt] = [] if files else prompts(DOMAINS, OF_A_DOMAIN, 0, LONG_CHARACTERS)
    for path in files:
        examples = read_examples(path).examples
        found += [Text(one.domain, one.tokens, max(0, one.prompt - 1)) for one in examples]
        here = [] if examples else read_prompts(path).prompts
        asked += here
        if not examples and not here:
            raise ConfigError(f"{path}: no text in it; expected what `redline draft synth` writes, or prompts")
    if asked:
        tokenizer, style = Tokenizer.open(folder), style_of(folder)
        found += [Text(one.domain, tuple(encode(conversation(one), tokenizer, style))) for one in asked]
    return found
