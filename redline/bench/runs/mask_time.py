"""Where the time of slow masks goes: strings of few characters, with several slicings of the vocabulary.

    python -m redline.bench.runs.mask_time FOLDER_WITH_A_TOKENIZER [--schemas 60]

llguidance keeps the tokens of each slice apart, and takes a slice as a whole where a string may go on with any of them;
it tries the others one by one. First: a mask of a string of which so many characters are left, for each slicing, the
least of four, and what the same mask takes again later in the same text's twin. Then: all masks of texts that fit
random schemas, each text with every slicing in turns. Microseconds of the thread's own time.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.constrained import drawn
from redline.bench.runs.schemas import schemas
from redline.chat.constraint import Calls, Constraint, compose
from redline.chat.tokenizer import Tokenizer
from redline.chat.vocabulary import grammar_tokens
from redline.run.grammar.matcher import Matcher, Matchers
from redline.wire.job import Grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

WHITE, CHARACTER = r"[\x20\x0A\x0D\x09]+", r'[^"\\\x00-\x1F\x7F]'
LEFT = 12  # characters of a string, at most
TRIES = 4


def slicings() -> dict[str, list[str]]:
    """By name, the regular expressions of slices; "as served" is what llguidance has by itself."""
    from llguidance import LLTokenizer

    def up_to(*lengths: int) -> list[str]:
        return [WHITE, *(f"{CHARACTER}{{1,{length}}}" for length in lengths), f"{CHARACTER}+"]

    return {
        "as served": LLTokenizer.general_slices(),
        "none": [],
        "up to 1 to 10, 30": up_to(*range(1, 11), 30),
        "up to 3, 6, 10, 30": up_to(3, 6, 10, 30),
    }


def _grammar(schema: dict[str, Any], tokenizer: Tokenizer) -> Grammar:
    constraint = Constraint(kind="json_schema", text=json.dumps(schema), param="schema")
    composed = compose(constraint, Calls(), None, tokenizer, thinks=False)
    assert composed is not None, "there is a constraint"
    return composed.grammar


def _mask(matcher: Matcher) -> float:
    began = clock.thread_time()
    matcher.masks(())
    return (clock.thread_time() - began) * 1e6


def by_characters_left(tokens: "LLTokenizer", tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Microseconds of a string's masks with LEFT characters left, one fewer, and so on to none.

    "first": in a grammar that was just compiled; "twin": in another text of the same grammar behind it.
    """
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": LEFT}}, "required": ["a"]}
    form, (letter,), found = _grammar(schema, tokenizer), tokenizer.encode("x"), list[list[float]]()
    for _ in range(TRIES):
        matchers = Matchers(lambda: tokens, tokenizer.vocab_size)
        for _ in ("first", "twin"):
            matcher = matchers.begin(form, tokenizer.encode('{"a":"'))
            matcher.forced()
            found.append([])
            for _ in range(LEFT + 1):
                found[-1].append(_mask(matcher))
                matcher.advance((letter,))
        matchers.close()
    least = (map(min, zip(*found[place::2], strict=True)) for place in range(2))
    return {name: [round(us) for us in column] for name, column in zip(("first", "twin"), least, strict=True)}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with a tokenizer")
    parser.add_argument("--schemas", type=count, default=60, help="how many")
    parser.add_argument("--out", type=output, default="runs/mask-time.json", help="the JSON to write")
    asked = parser.parse_args()
    tokenizer = Tokenizer.open(asked.folder)
    tokens, took = grammar_tokens(tokenizer), dict[str, list[float]]()
    sliced = {name: tokens.with_slices(slices) for name, slices in slicings().items()}
    result: dict[str, Any] = {
        "what": "microseconds of masks of strings of few characters, by slicing of the vocabulary",
        **provenance("llguidance"),
        "load_average": round(os.getloadavg()[0], 1),
        "vocabulary": tokenizer.vocab_size,
        "slicings": slicings(),
        "by_characters_left": {name: by_characters_left(one, tokenizer) for name, one in sliced.items()},
    }
    made = [schema for schema in schemas(asked.schemas) if "odd" not in schema["properties"]]
    drawing, generator = Matchers(lambda: tokens, tokenizer.vocab_size), torch.Generator().manual_seed(0)
    timing = {name: Matchers(lambda one=one: one, tokenizer.vocab_size) for name, one in sliced.items()}
    for schema in made:
        form = _grammar(schema, tokenizer)
        text = drawn(tokenizer, drawing.begin(form, ()), generator)
        for name, matchers in timing.items():
            matcher = matchers.begin(form, ())
            matcher.forced()  # waits for the compilation
            for token in text:
                took.setdefault(name, []).append(_mask(matcher))
                matcher.advance((token,))
    for matchers in (drawing, *timing.values()):
        matchers.close()
    result["texts"] = {}
    for name, times in took.items():
        times.sort()
        parts = {f"p{share}": round(times[len(times) * share // 100], 1) for share in (50, 95, 99)}
        result["texts"][name] = {"masks": len(times), "mean": round(statistics.fmean(times), 1), **parts}
    asked.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    program(main)
