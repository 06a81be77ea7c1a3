"""Trains Kimi-Nano's vocabulary: byte-pair encoding over the training mixture, in Kimi's own file format.

    python -m nano.tokenizer --out models/kimi-nano
    python -m nano.tokenizer --out models/kimi-nano --keep      the vocabulary stays, the other files are written anew

3,840 ranks (256 bytes and 3,584 merges) and 256 reserved ids laid out as Kimi K2's are. Digits never merge: a number
is read digit by digit, which is what column arithmetic needs. The same seed gives the same files.
"""

import argparse
import base64
import heapq
import itertools
import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import regex

from nano.tokenizer_json import tokenizer_json
from redline.chat.tokenizer import RESERVED, SPLIT, Tokenizer

RANKS = 3_840
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# What `write` leaves: Kimi's two files, and what readers need that run no code of a checkpoint's folder.
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja")
SAMPLE_BYTES = 8_000_000

# Offset within the reserved ids -> (name, declared special), as in Kimi K2's tokenizer_config.json; the others are
# `<|reserved_token_{id}|>`. Tool and thinking tokens are not special there, and so stay in decoded text.
SPECIALS = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    6: ("<|start_header_id|>", True),
    7: ("<|end_header_id|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    22: ("<think>", False),
    23: ("</think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
_FORM = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
# Kimi's own list: the special tokens that are not BOS, EOS, UNK or PAD, in order.
_ADDITIONAL = [name for name, special in SPECIALS.values() if special and name[1:4] not in ("BOS", "EOS", "UNK", "PAD")]


def main() -> None:
    """The command line above: trains the vocabulary, or keeps the one that is there, and writes the four files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--bytes", type=int, default=SAMPLE_BYTES, help="size of the sample that it is trained on")
    parser.add_argument(
        "--keep", action="store_true", help="keep the vocabulary that is there; write what describes it"
    )
    arguments = parser.parse_args()
    if arguments.keep:
        tokenizer = Tokenizer.open(arguments.out)
        write(arguments.out, list(map(tokenizer.token_bytes, range(tokenizer.vocab_size - RESERVED))))
        return

    # Only this command needs the generators: whoever imports `train` brings texts along.
    from nano.data import texts

    began = time.perf_counter()
    ranks = train(_up_to(texts(arguments.seed), arguments.bytes), RANKS)
    write(arguments.out, ranks)
    print(f"{arguments.out}: {len(ranks)} ranks + {RESERVED} reserved, {time.perf_counter() - began:.0f} s")


def train(texts: Iterable[str], size: int) -> list[bytes]:
    """The first `size` ranks: all bytes, then the most frequent pair again and again; ties go to the smaller bytes.

    Gives fewer where the texts have no pair left that occurs twice.
    """
    words = Counter(piece for text in texts for piece in pieces(text))
    tokens = [bytes([value]) for value in range(256)]
    spelled = [list(word.encode()) for word in words]
    counts = list(words.values())

    pairs: Counter[tuple[int, int]] = Counter()
    holders: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for index, word in enumerate(spelled):
        for pair in itertools.pairwise(word):
            pairs[pair] += counts[index]
            holders[pair].add(index)

    def entry(pair: tuple[int, int]) -> tuple[int, bytes, bytes, tuple[int, int]]:
        return -pairs[pair], tokens[pair[0]], tokens[pair[1]], pair

    # Counts in the heap may be out of date: an entry that no longer matches is put back with its true count.
    heap = [entry(pair) for pair in pairs]
    heapq.heapify(heap)
    while heap and len(tokens) < size:
        count, _, _, pair = heapq.heappop(heap)
        if -count != pairs[pair]:
            if pairs[pair] > 1:
                heapq.heappush(heap, entry(pair))
            continue
        if -count < 2:
            break
        joined = len(tokens)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        changed: set[tuple[int, int]] = set()
        for index in holders.pop(pair):
            old = spelled[index]
            new = _join(old, pair, joined)
            for before in itertools.pairwise(old):
                pairs[before] -= counts[index]
            for after in itertools.pairwise(new):
                pairs[after] += counts[index]
                holders[after].add(index)
                if joined in after:
                    changed.add(after)
            spelled[index] = new
        for after in changed:
            heapq.heappush(heap, entry(after))
    return tokens


def pieces(text: str) -> Iterator[str]:
    """The pieces within which merges may happen: Kimi's split, with every digit on its own."""
    for piece in _PIECE.findall(text):
        if _NUMBER.fullmatch(piece):
            yield from piece
        else:
            yield piece


_PIECE = regex.compile(SPLIT, regex.VERSION1)
_NUMBER = regex.compile(r"\p{N}+")


def _join(word: list[int], pair: tuple[int, int], joined: int) -> list[int]:
    result: list[int] = []
    index = 0
    while index < len(word):
        if index + 1 < len(word) and (word[index], word[index + 1]) == pair:
            result.append(joined)
            index += 2
        else:
            result.append(word[index])
            index += 1
    return result


def write(folder: Path, ranks: list[bytes]) -> None:
    """Writes TOKENIZER_FILES into `folder`, which is made if needed. ranks: the bytes of each token, by id.

    tiktoken.model and tokenizer_config.json have the shape of Kimi K2's, but for the class that reads tokenizer.json.
    """
    first = len(ranks)
    added = {
        str(first + offset): {"content": name, **_FORM, "special": special}
        for offset, (name, special) in SPECIALS.items()
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": _ADDITIONAL,
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 65_536,
        "pad_token": "[PAD]",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
    }
    folder.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    vocabulary = json.dumps(tokenizer_json(Tokenizer.open(folder)), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(vocabulary + "\n", encoding="utf-8")
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")


def _up_to(texts: Iterable[str], size: int) -> Iterator[str]:
    for text in texts:
        if size <= 0:
            return
        size -= len(text.encode())
        yield text


if __name__ == "__main__":
    main()
