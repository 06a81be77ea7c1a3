"""What Kimi-Nano learns from: the mixture of all generators, rendered with Kimi's template and packed into rows.

Worker processes each draw their own stream from the seed, encode it and pack whole documents into rows: half of them
make rows of 1,024 tokens, half rows of 4,096, much of it long recall. A token is one uint16: 12 bits of id, two of
loss, one that marks the start of a document. The trainer takes rows from a `Pool`, which does not let it wait.
"""

import importlib
import multiprocessing
import os
import queue
import random
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nano.sample import Document, Sample, Split
from nano.substitute import substitute, vocabulary_pieces
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.chat.template import render
from redline.chat.tokenizer import RESERVED, Piece, Special, Tokenizer

ROW = 1_024
LONG_ROW = 4_096

# Share of tokens by module, in short rows and in long ones.
MIXTURE = {
    "tools": 0.26,
    "numbers": 0.20,
    "words": 0.15,
    "recall": 0.12,
    "json": 0.10,
    "code": 0.09,
    "chat": 0.07,
    "python": 0.01,
}
LONG_MIXTURE = {name: share * (0.55 / (1 - MIXTURE["recall"])) for name, share in MIXTURE.items()} | {"recall": 0.45}

# A share of these samples comes after an exchange about something else. Earlier answers are rendered without their
# thinking, so they are of modules whose answers need none.
LAST, EARLIER, CHAINED = ("numbers", "words", "code", "chat", "json"), ("words", "chat"), 0.15

# The share of a module's samples in which words are made up.
MADE_UP = {"tools": 0.4, "json": 0.4, "recall": 0.3, "chat": 0.1}

# Text of a recall document in a long row, in characters; one that does not fit its row after all is dropped.
RECALL_CHARACTERS = (2_000, 13_500)

# A packed token: id | loss << 12 | start << 14.
LOSS_SHIFT, START_SHIFT = 12, 14
NO_LOSS, PROMPT, ANSWER = 0, 1, 2

# So many documents fit in a row of 1,024: it bounds what the attention kernel is told about.
DOCUMENTS_PER_ROW = 32

Tokens = NDArray[np.uint16]


class Mixture:
    """An endless stream of samples and documents whose token shares follow a table.

    Whoever draws reports how many tokens came of it (`spent`); the module that is furthest behind its share goes next.
    """

    def __init__(self, seed: str, row: int, shares: dict[str, float] | None = None, pieces: Sequence[str] = ()) -> None:
        """row: tokens of a row, ROW or LONG_ROW, which decides the shares where none are given.

        pieces: of the vocabulary, for made-up words; without them no words are made up.
        """
        self._pieces = pieces
        self._rng = random.Random(seed)
        self._row = row
        self._shares = shares or (MIXTURE if row == ROW else LONG_MIXTURE)
        self._spent: Counter[str] = Counter()
        self._modules = {name: importlib.import_module(f"nano.data_{name}") for name in self._shares}
        self._documents: Iterator[Document] | None = None

    def draw(self) -> tuple[str, Sample | Document]:
        """(module, what it made); the module is a key of the shares."""
        name = min(self._shares, key=lambda module: self._spent[module] / self._shares[module])
        module = self._modules[name]
        if name == "python":
            return name, self._document(module)
        generators = module.GENERATORS
        kind = self._rng.choices(list(generators), [weight for _, weight in generators.values()])[0]
        if name == "recall" and self._row == LONG_ROW:
            return name, module.recall(self._rng, "train", self._rng.randint(*RECALL_CHARACTERS))
        sample = generators[kind][0](self._rng, "train")
        if self._pieces and self._rng.random() < MADE_UP.get(name, 0.0):
            sample = substitute(self._rng, sample, self._pieces)
        if name in LAST and self._rng.random() < CHAINED and _is_plain(sample):
            sample.messages = self._before() + sample.messages
        return name, sample

    def _before(self) -> list[dict[str, Any]]:
        """One or two earlier exchanges about something else: users change the subject."""
        messages: list[dict[str, Any]] = []
        for _ in range(self._rng.randint(1, 2)):
            generators = self._modules[self._rng.choice(EARLIER)].GENERATORS
            generator = self._rng.choice([generator for generator, _ in generators.values()])
            earlier = generator(self._rng, "train")
            if _is_plain(earlier):
                messages += earlier.messages
        return messages

    def spent(self, module: str, tokens: int) -> None:
        """Counts `tokens` towards the share of `module`."""
        self._spent[module] += tokens

    @property
    def shares(self) -> dict[str, float]:
        """Each module's part of all tokens counted so far, 0 to 1."""
        total = max(sum(self._spent.values()), 1)
        return {name: self._spent[name] / total for name in self._shares}

    def _document(self, module: Any) -> Document:
        if self._documents is None or (document := next(self._documents, None)) is None:
            self._documents = iter(module.documents(self._rng))
            document = next(self._documents)
        return document


def _is_plain(sample: Sample) -> bool:
    """No tools, no system prompt: it can stand in the middle of a conversation."""
    return not sample.tools and sample.messages[0]["role"] == "user"


class Encoder:
    """Samples and documents as packed tokens: uint16, 12 bits of id, 2 of loss, 1 that marks a document's start.

    AssertionError for a vocabulary of more than 4,096 ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[Piece, Tokens] = {}
        self.pad = tokenizer.special("[PAD]")
        assert tokenizer.vocab_size <= 1 << LOSS_SHIFT

    def sample(self, sample: Sample) -> Tokens:
        """The prompt with loss PROMPT, then every assistant turn with loss ANSWER, first token marked as a start.

        A turn's loss begins where a prompt would end: after <think> if the turn is thought, after <think></think> if
        not. The tokens are those of inference, where the prompt ends before the last turn.
        """
        pieces = render(conversation(sample))
        parts: list[Tokens] = []
        answering = False
        last = max(i for i, piece in enumerate(pieces) if piece == _ASSISTANT)
        for index, piece in enumerate(pieces):
            loss = ANSWER if answering else PROMPT
            if isinstance(piece, Special):
                if piece == _MIDDLE and pieces[index - 2] == _ASSISTANT:
                    answering = True
                elif piece == _END:
                    answering = False
                elif piece == _THINK and answering:
                    loss = NO_LOSS
                elif piece == _THOUGHT and answering and pieces[index - 1] == _THINK:
                    # An empty thought is what the prompt says, unless the model is to end it itself.
                    loss = ANSWER if sample.thinking and index > last else NO_LOSS
            parts.append(self._piece(piece) | np.uint16(loss << LOSS_SHIFT))
        return _started(np.concatenate(parts))

    def document(self, document: Document) -> Tokens:
        """Plain text between [BOS] and [EOS]. All tokens have loss ANSWER but the first, which is marked as a start."""
        ids = self._tokenizer.encode_pieces((Special("[BOS]"), document.text, Special("[EOS]")))
        return _started(np.array(ids, np.uint16) | np.uint16(ANSWER << LOSS_SHIFT))

    def prompt(self, sample: Sample) -> list[int]:
        """Ids of the prompt that asks for the sample's last turn, as at inference."""
        whole = conversation(sample)
        asked = Conversation(
            messages=whole.messages[:-1], tools=whole.tools, thinking=sample.thinking, preserve_thinking=True
        )
        return self._tokenizer.encode_pieces(render(asked))

    def _piece(self, piece: Piece) -> Tokens:
        """Ids; those of control tokens and of short text (names, the system message) are kept."""
        ids = self._ids.get(piece)
        if ids is None:
            ids = np.array(self._tokenizer.encode_pieces((piece,)), np.uint16)
            if isinstance(piece, Special) or (len(piece) < 64 and len(self._ids) < 100_000):
                self._ids[piece] = ids
        return ids


_ASSISTANT, _MIDDLE, _END = Special("<|im_assistant|>"), Special("<|im_middle|>"), Special("<|im_end|>")
_THINK, _THOUGHT = Special("<think>"), Special("</think>")


def _started(tokens: Tokens) -> Tokens:
    """The first token of a document follows nothing, so it has no loss."""
    tokens[0] = (tokens[0] & ((1 << LOSS_SHIFT) - 1)) | (1 << START_SHIFT)
    return tokens


def conversation(sample: Sample) -> Conversation:
    """A sample, whole, with the reasoning that its last turn's prompt would show, and with that turn's own.

    The template drops the reasoning of history up to the last final answer; here the last turn is such an answer
    itself, so what is dropped is decided here and the template is told to keep the rest.
    """
    finals = [
        index
        for index, message in enumerate(sample.messages[:-1])
        if message["role"] == "assistant" and not message.get("tool_calls")
    ]
    history = finals[-1] + 1 if finals else 0
    messages = tuple(
        _message(message, thought=sample.thinking and index >= history) for index, message in enumerate(sample.messages)
    )
    return Conversation(
        messages=messages,
        tools=tuple(_tool(tool) for tool in sample.tools),
        thinking=sample.thinking,
        preserve_thinking=True,
        add_generation_prompt=False,
    )


def _message(message: dict[str, Any], thought: bool) -> Message:
    calls = tuple(
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return Message(
        role=message["role"],
        content=message.get("content") or "",
        name=message.get("name"),
        reasoning=message.get("reasoning_content") or "" if thought else "",
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id") or "",
    )


def _tool(tool: dict[str, Any]) -> Tool:
    function = tool["function"]
    return Tool(
        name=function["name"], description=function.get("description", ""), parameters=function.get("parameters", {})
    )


def texts(seed: int) -> Iterator[str]:
    """What a vocabulary is trained on: the mixture's plain text, turn by turn, without control tokens."""
    mixture = Mixture(f"{seed}/vocabulary", ROW)
    while True:
        module, drawn = mixture.draw()
        if isinstance(drawn, Document):
            parts = [drawn.text[: 8 * ROW]]
        else:
            parts = [piece for piece in render(conversation(drawn)) if isinstance(piece, str)]
        mixture.spent(module, sum(map(len, parts)))
        yield from parts


class Packer:
    """Packs whole documents into rows: each goes where the least space is left over, of `open_rows` open rows.

    row: tokens of a row; pad: the id that fills it up.
    """

    def __init__(self, row: int, pad: int, open_rows: int = 24) -> None:
        self.row = row
        self.filled = 0  # tokens in finished rows that are not padding
        self.rows = 0
        self._pad = np.uint16(pad)
        self._limit = DOCUMENTS_PER_ROW * row // ROW - 1  # the padding is one more
        self._open_rows = open_rows
        self._open: list[tuple[int, list[Tokens]]] = []  # (space left, documents)

    def add(self, tokens: Tokens) -> Tokens | None:
        """Takes a document of at most `row` tokens; gives a full row, padded, once one has to be closed, else None."""
        fits = [
            (space, index)
            for index, (space, documents) in enumerate(self._open)
            if space >= len(tokens) and len(documents) < self._limit
        ]
        if fits:
            space, index = min(fits)
            documents = self._open[index][1]
            documents.append(tokens)
            self._open[index] = (space - len(tokens), documents)
            return self._close(index) if space == len(tokens) else None
        self._open.append((self.row - len(tokens), [tokens]))
        if len(self._open) <= self._open_rows:
            return None
        full = [index for index, (_, documents) in enumerate(self._open) if len(documents) == self._limit]
        return self._close(full[0] if full else min(range(len(self._open)), key=lambda index: self._open[index][0]))

    def close(self) -> list[Tokens]:
        """The rows that are still open, padded to their length."""
        return [self._close(0) for _ in range(len(self._open))]

    def _close(self, index: int) -> Tokens:
        space, documents = self._open.pop(index)
        if space:
            documents.append(_started(np.full(space, self._pad, np.uint16)))
        self.filled += self.row - space
        self.rows += 1
        return np.concatenate(documents)


def rows(tokenizer: Tokenizer, seed: str, row: int) -> Iterator[Tokens]:
    """An endless stream of rows, uint16 [row] of packed tokens; the same for the same seed."""
    encoder = Encoder(tokenizer)
    packer = Packer(row, encoder.pad)
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size - RESERVED)]
    mixture = Mixture(f"{seed}/{row}", row, pieces=vocabulary_pieces(tokens))
    while True:
        module, drawn = mixture.draw()
        if isinstance(drawn, Document):
            whole = encoder.document(drawn)
            documents = [_started(whole[i : i + row].copy()) for i in range(0, len(whole), row)]
        else:
            documents = [encoder.sample(drawn)]
        for tokens in documents:
            # One that does not fit still counts as its module's, so that nothing is drawn forever in vain.
            mixture.spent(module, len(tokens))
            if len(tokens) <= row and (packed := packer.add(tokens)) is not None:
                yield packed


_BATCH_TOKENS = 16_384  # cross the process border together
PATIENCE_S = 0.02  # for new rows, before old ones are given again; a step takes 0.1 s
_WAITING_BATCHES = 2_048  # of each row length: 34 M tokens, which are made while the trainer compiles


def _work(folder: Path, seed: str, row: int, output: "Queue[NDArray[np.uint16]]") -> None:
    stream = rows(Tokenizer.open(folder), seed, row)
    while True:
        output.put(np.stack(list(islice(stream, _BATCH_TOKENS // row))))


class Pool:
    """Rows from worker processes, half of which make short ones and half long ones.

    folder   of the tokenizer
    workers  how many processes; None: two less than the cores, but two at least

    `take` never waits once the first rows are there: if there are too few new ones, it gives old ones again.
    """

    def __init__(self, folder: Path, seed: int, workers: int | None = None) -> None:
        # Workers are forked before the device is touched; they need nothing of torch.
        context = multiprocessing.get_context("fork")
        self._queues: dict[int, Queue[NDArray[np.uint16]]] = {
            row: context.Queue(_WAITING_BATCHES) for row in (ROW, LONG_ROW)
        }
        each = (workers or max(2, (os.cpu_count() or 2) - 2)) // 2
        self.workers = [
            context.Process(target=_work, args=(folder, f"{seed}/{index}", row, output), daemon=True)
            for row, output in self._queues.items()
            for index in range(each)
        ]
        for worker in self.workers:
            worker.start()
        self._fresh: dict[int, deque[Tokens]] = {row: deque() for row in self._queues}
        self._seen: dict[int, deque[Tokens]] = {row: deque(maxlen=16_384) for row in self._queues}
        self._rng = random.Random(seed)
        self._taken = self._again = 0

    def take(self, count: int, row: int) -> NDArray[np.uint16]:
        """uint16 [count, row] of packed tokens: new rows while there are any, then rows drawn from those given before.

        Waits PATIENCE_S seconds for new rows, and for the first ones as long as it takes. Raises RuntimeError where
        there are no rows and a worker has ended.
        """
        fresh, seen = self._fresh[row], self._seen[row]
        while len(fresh) < count:
            try:
                # The pipe holds two batches only, so it is often empty for a moment while workers have many.
                fresh.extend(self._queues[row].get(timeout=PATIENCE_S))
            except queue.Empty:
                if fresh or seen:
                    break
                if not all(worker.is_alive() for worker in self.workers):
                    raise RuntimeError("a data worker has ended; its error stands above") from None
        new = [fresh.popleft() for _ in range(min(count, len(fresh)))]
        seen.extend(new)
        old = [self._rng.choice(seen) for _ in range(count - len(new))]
        self._taken += count
        self._again += len(old)
        return np.stack(new + old)

    @property
    def repeated(self) -> float:
        """Share of the rows given out that had been given out before."""
        return self._again / max(self._taken, 1)

    def close(self) -> None:
        """Ends the worker processes; rows that are still queued are lost."""
        for worker in self.workers:
            worker.terminate()
            worker.join()


def evaluation(split: Split, per_kind: int, seed: int) -> list[tuple[str, Sample]]:
    """(kind, sample): `per_kind` samples of every kind of every module but python, from a seed of their own."""
    modules = [importlib.import_module(f"nano.data_{name}") for name in MIXTURE if name != "python"]
    return [
        (kind, generator(random.Random(f"{seed}/{split}/{kind}/{number}"), split))
        for module in modules
        for kind, (generator, _) in module.GENERATORS.items()
        for number in range(per_kind)
    ]


def measure(folder: Path, row: int, seconds: float = 10) -> str:
    """A sentence: tokens/s that one worker makes, measured over `seconds`, and how many are prompts and answers."""
    stream = rows(Tokenizer.open(folder), "measure", row)
    made: list[Tokens] = []
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        made.append(next(stream))
    tokens = np.concatenate(made)
    losses = tokens >> LOSS_SHIFT & 3
    prompts, answers = (100 * (losses == kind).mean() for kind in (PROMPT, ANSWER))
    starts = (tokens >> START_SHIFT).sum() / len(made)
    return (
        f"rows of {row}: {len(tokens) / spent:,.0f} tokens/s per core, {prompts:.0f} % prompts, "
        f"{answers:.0f} % answers, {starts:.1f} documents with padding"
    )


if __name__ == "__main__":
    for length in (ROW, LONG_ROW):
        print(measure(Path("models/kimi-nano"), length))
