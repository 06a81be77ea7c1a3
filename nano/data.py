"""What Kimi-Nano learns from: the mixture of all generators, rendered with Kimi's template and packed into rows.

Worker processes each draw their own stream from the seed, encode it and pack whole documents into rows of 1,024 tokens
(most) and of 4,096 (a tenth, much of it long recall). A token is one uint16: 12 bits of id, two of loss, one that marks
the start of a document. The trainer takes rows from a `Pool`, which plays old rows again rather than let it wait.
"""

import importlib
import multiprocessing
import os
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nano.sample import Document, Sample, Split
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.chat.template import render
from redline.chat.tokenizer import Piece, Special, Tokenizer

ROW = 1_024
LONG_ROW = 4_096
LONG_SHARE = 0.1  # of a worker's tokens; the last tenth of training reads long rows

# Share of tokens by module, in short rows and in long ones.
MIXTURE = {
    "numbers": 0.28,
    "tools": 0.22,
    "words": 0.14,
    "code": 0.12,
    "json": 0.07,
    "recall": 0.07,
    "chat": 0.06,
    "python": 0.04,
}
LONG_MIXTURE = {name: share * (0.55 / 0.93) for name, share in MIXTURE.items()} | {"recall": 0.45}

# Text of a recall document, in characters; one that does not fit its row after all is dropped.
RECALL_CHARACTERS = {ROW: (300, 2_600), LONG_ROW: (2_000, 13_500)}

# A packed token: id | loss << 12 | start << 14.
LOSS_SHIFT, START_SHIFT = 12, 14
NO_LOSS, PROMPT, ANSWER = 0, 1, 2

# So many documents fit in a row of 1,024: it bounds what the attention kernel is told about.
DOCUMENTS_PER_ROW = 32

Tokens = NDArray[np.uint16]


class Mixture:
    """An endless stream of samples and documents whose token shares follow a table.

    Whoever draws says how many tokens came of it (`spent`); the module that is furthest behind its share goes next.
    """

    def __init__(self, seed: str, row: int, shares: dict[str, float] | None = None) -> None:
        self._rng = random.Random(seed)
        self._row = row
        self._shares = shares or (MIXTURE if row == ROW else LONG_MIXTURE)
        self._spent: Counter[str] = Counter()
        self._modules = {name: importlib.import_module(f"nano.data_{name}") for name in self._shares}
        self._documents: Iterator[Document] | None = None

    def draw(self) -> tuple[str, Sample | Document]:
        """(module, what it made)."""
        name = min(self._shares, key=lambda module: self._spent[module] / self._shares[module])
        module = self._modules[name]
        if name == "python":
            return name, self._document(module)
        if name == "recall":
            low, high = RECALL_CHARACTERS[self._row]
            return name, module.recall(self._rng, "train", self._rng.randint(low, high))
        generators = module.GENERATORS
        kind = self._rng.choices(list(generators), [weight for _, weight in generators.values()])[0]
        return name, generators[kind][0](self._rng, "train")

    def spent(self, module: str, tokens: int) -> None:
        self._spent[module] += tokens

    @property
    def shares(self) -> dict[str, float]:
        total = max(sum(self._spent.values()), 1)
        return {name: self._spent[name] / total for name in self._shares}

    def _document(self, module: Any) -> Document:
        if self._documents is None or (document := next(self._documents, None)) is None:
            self._documents = iter(module.documents(self._rng))
            document = next(self._documents)
        return document


class Encoder:
    """Samples and documents as packed tokens."""

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
    """A sample, whole, with just the reasoning that its last turn's prompt would show, and its own.

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
    """Whole documents into rows: each goes where the least space is left over, of a number of open rows."""

    def __init__(self, row: int, pad: int, open_rows: int = 24) -> None:
        self.row = row
        self.filled = 0  # tokens in finished rows that are not padding
        self.rows = 0
        self._pad = np.uint16(pad)
        self._limit = DOCUMENTS_PER_ROW * row // ROW - 1  # the padding is one more
        self._open_rows = open_rows
        self._open: list[tuple[int, list[Tokens]]] = []  # (space left, documents)

    def add(self, tokens: Tokens) -> Tokens | None:
        """Takes a document of at most `row` tokens; gives a row once one has to be closed."""
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
        """The rows that are still open."""
        return [self._close(0) for _ in range(len(self._open))]

    def _close(self, index: int) -> Tokens:
        space, documents = self._open.pop(index)
        if space:
            documents.append(_started(np.full(space, self._pad, np.uint16)))
        self.filled += self.row - space
        self.rows += 1
        return np.concatenate(documents)


def rows(tokenizer: Tokenizer, seed: str) -> Iterator[Tokens]:
    """An endless stream of rows, short and long, the same for the same seed."""
    encoder = Encoder(tokenizer)
    packers = {row: Packer(row, encoder.pad) for row in (ROW, LONG_ROW)}
    mixtures = {row: Mixture(f"{seed}/{row}", row) for row in packers}
    made: Counter[int] = Counter()
    while True:
        row = LONG_ROW if made[LONG_ROW] < LONG_SHARE * made.total() else ROW
        module, drawn = mixtures[row].draw()
        if isinstance(drawn, Document):
            whole = encoder.document(drawn)
            documents = [_started(whole[i : i + row].copy()) for i in range(0, len(whole), row)]
        else:
            documents = [encoder.sample(drawn)]
        for tokens in documents:
            # One that does not fit still counts as its module's, so that nothing is drawn forever in vain.
            mixtures[row].spent(module, len(tokens))
            made[row] += len(tokens)
            if len(tokens) <= row and (packed := packers[row].add(tokens)) is not None:
                yield packed


_BATCH_ROWS = 16
_WAITING_BATCHES = 4_096  # about 70 M tokens or 140 MB: what a slow start of the trainer lets pile up


def _work(folder: Path, seed: str, output: "Queue[NDArray[np.uint16]]") -> None:
    waiting: dict[int, list[Tokens]] = {ROW: [], LONG_ROW: []}
    for packed in rows(Tokenizer.open(folder), seed):
        batch = waiting[len(packed)]
        batch.append(packed)
        if len(batch) * len(packed) == _BATCH_ROWS * ROW:
            output.put(np.stack(batch))
            batch.clear()


class Rate(NamedTuple):
    tokens: int  # received from the workers so far
    replayed: float  # share of the rows given out that had been given out before


class Pool:
    """Rows from worker processes. `take` never waits once the first rows are there: it repeats old ones instead."""

    def __init__(self, folder: Path, seed: int, workers: int | None = None) -> None:
        # Workers are forked before the device is touched; they need nothing of torch.
        context = multiprocessing.get_context("fork")
        self._queue: Queue[NDArray[np.uint16]] = context.Queue(_WAITING_BATCHES)
        count = workers or max(1, (os.cpu_count() or 2) - 2)
        self.workers = [
            context.Process(target=_work, args=(folder, f"{seed}/{index}", self._queue), daemon=True)
            for index in range(count)
        ]
        for worker in self.workers:
            worker.start()
        self._fresh: dict[int, deque[Tokens]] = {ROW: deque(), LONG_ROW: deque()}
        self._seen: dict[int, list[Tokens]] = {ROW: [], LONG_ROW: []}
        self._rng = random.Random(seed)
        self._taken = self._replayed = self._received = 0
        self._closing = False
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def take(self, count: int, row: int) -> NDArray[np.uint16]:
        """[count, row]: new rows as far as there are any, then ones drawn from those seen before."""
        fresh, seen = self._fresh[row], self._seen[row]
        while not fresh and not seen:
            if not any(worker.is_alive() for worker in self.workers):
                raise RuntimeError("all data workers have ended; their error stands above")
            time.sleep(0.01)
        new = [fresh.popleft() for _ in range(min(count, len(fresh)))]
        seen += new
        old = [self._rng.choice(seen) for _ in range(count - len(new))]
        self._taken += count
        self._replayed += len(old)
        return np.stack(new + old)

    def rate(self) -> Rate:
        return Rate(self._received, self._replayed / max(self._taken, 1))

    def close(self) -> None:
        self._closing = True
        for worker in self.workers:
            worker.terminate()
            worker.join()
        self._thread.join()

    def _receive(self) -> None:
        while not self._closing:
            try:
                batch = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            self._received += batch.size
            self._fresh[batch.shape[1]].extend(batch)


def evaluation(encoder: Encoder, split: Split, per_kind: int, seed: int) -> list[tuple[str, Sample]]:
    """(kind, sample) for every kind of every module, recall near the end of a long row among them."""
    samples: list[tuple[str, Sample]] = []
    for name in MIXTURE:
        module = importlib.import_module(f"nano.data_{name}")
        for kind, (generator, _) in getattr(module, "GENERATORS", {}).items():
            for number in range(per_kind):
                samples.append((kind, generator(random.Random(f"{seed}/{split}/{kind}/{number}"), split)))
    recall = importlib.import_module("nano.data_recall").recall
    high = RECALL_CHARACTERS[LONG_ROW][1]
    for number in range(per_kind):
        sample = recall(random.Random(f"{seed}/{split}/recall/{number}"), split, int(high * 0.9))
        while len(encoder.sample(sample)) > LONG_ROW:
            high = int(high * 0.9)
            sample = recall(random.Random(f"{seed}/{split}/recall/{number}"), split, int(high * 0.9))
        samples.append(("recall-long", sample))
    return samples


def measure(folder: Path, seconds: float = 10) -> str:
    """Tokens per second of one worker, how full its rows are, and each module's share."""
    tokenizer = Tokenizer.open(folder)
    began = time.perf_counter()
    tokens = padding = 0
    for row in rows(tokenizer, "measure"):
        tokens += len(row)
        padding += int((row & 0xFFF == tokenizer.special("[PAD]")).sum())
        if time.perf_counter() - began > seconds:
            break
    rate = tokens / (time.perf_counter() - began)
    return f"{rate:,.0f} tokens/s per core, rows {100 * (1 - padding / tokens):.1f} % full"


if __name__ == "__main__":
    print(measure(Path("models/kimi-nano")))
