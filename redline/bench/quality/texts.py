"""Texts for `redline quantize` and `redline audit`: from users' files, or prompts from our templates."""

from collections.abc import Sequence
from pathlib import Path

from redline.chat.lines import conversation
from redline.chat.template import encode, style_of
from redline.chat.tokenizer import Tokenizer
from redline.draft.corpus.corpus import read_examples
from redline.draft.corpus.prompts import DOMAINS, PromptLine, prompts, read_prompts
from redline.errors import ConfigError
from redline.model.spec import spec_of
from redline.quant.texts import CalibrationText

OF_A_DOMAIN = 200  # prompts per domain from our templates
LONG_CHARACTERS = (2_000, 12_000)  # length range of documents in them


def read_texts(folder: Path, files: Sequence[Path]) -> list[CalibrationText]:
    """Texts, tokenized for the checkpoint in `folder`.

    files: each a corpus written by `redline draft synth`, of which only the answers are evaluated, or prompts as JSON
    lines with domain and messages. Empty: prompts from our templates.

    Raises ConfigError if a file cannot be read, or contains neither.
    """
    found: list[CalibrationText] = []
    asked: list[PromptLine] = [] if files else prompts(DOMAINS, OF_A_DOMAIN, 0, LONG_CHARACTERS)
    for path in files:
        examples = read_examples(path).examples
        found += [CalibrationText(one.domain, one.tokens, max(0, one.prompt - 1)) for one in examples]
        here = [] if examples else read_prompts(path).prompts
        asked += here
        if not examples and not here:
            raise ConfigError(f"{path}: contains no text; expected a corpus of `redline draft synth`, or prompts")
    if asked:
        tokenizer, style = Tokenizer.open(folder), style_of(folder, spec_of(folder).chat)
        found += [CalibrationText(one.domain, tuple(encode(conversation(one), tokenizer, style))) for one in asked]
    return found
