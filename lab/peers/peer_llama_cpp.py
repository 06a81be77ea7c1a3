"""The peer: llama.cpp on a GGUF, through llama-cpp-python's own bindings, timed in a separate process.

    PYTHON lab/peers/peer_llama_cpp.py FOLDER

PYTHON has llama-cpp-python, and needs nothing of Redline. FOLDER has a file for each format in which matrices other
than routed experts are stored: q4_0.gguf and so on (to_gguf.py). Like peer_transformers.py it reads one task per line
as JSON from stdin and writes one JSON line for each:

    {"way": {...}, "prompts": [[1, 2, ...]], "new": 64}       -> {"first_s": ..., "rest_s": ...}
    {"way": {...}, "prompts": [[1, 2, ...]], "logits": FILE}  -> {}, and FILE holds float32 [all tokens, vocabulary]

The decoding loop is the simplest that the library allows: one batch that is filled in place, logits read without a
copy, the largest one taken.
"""

import json
import sys
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from redline import clock

CHUNK = 512  # tokens of a prompt that are computed at once: llama.cpp's own default
CELLS = 256  # the size of a cache is a multiple of this number of tokens


class Way(NamedTuple):
    """How llama.cpp runs the model. dense: the GGUF file's name without its suffix. attention: flash or plain."""

    dense: str
    attention: str
    threads: int


def ways(threads: int, dense: str) -> list[Way]:
    """Every way to run one file: with flash attention and without, on one thread and on `threads`."""
    return [Way(dense, *way) for way in product(("flash", "plain"), sorted({1, threads}))]


class Context:
    """`rows` prompts of `prompt` tokens at once, with `room` tokens in each one's cache.

    Raises AssertionError if llama.cpp fails to create a context.
    """

    def __init__(self, llama: Any, model: Any, way: Way, rows: int, prompt: int, room: int) -> None:
        values = llama.llama_context_default_params()
        values.n_ctx = rows * room
        values.n_batch, values.n_ubatch, values.n_seq_max = rows * prompt, CHUNK, rows
        values.n_threads = values.n_threads_batch = way.threads
        values.flash_attn_type = way.attention == "flash"
        self._llama, self._rows, self._prompt = llama, rows, prompt
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._context = llama.llama_init_from_model(model, values)
        assert self._context, f"llama.cpp created no context for {way}"
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(rows * prompt, 0, 1)

    def run(self, prompts: list[list[int]], new: int) -> dict[str, float]:
        """Greedy, `new` tokens for every prompt, never ending early.

        Returns first_s, the seconds until the first new token of every row, and rest_s, those of the other new tokens.
        Raises AssertionError for another number of prompts than `rows`, or if llama_decode fails.
        """
        self._llama.llama_memory_clear(self._memory, False)
        wanted = self._fill(prompts, every=False)
        start = clock.perf_counter()
        last = self._logits(wanted).argmax(-1)
        first = clock.perf_counter()
        batch = self._batch
        batch.n_tokens = self._rows
        for row in range(self._rows):
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, row, 1
        for position in range(self._prompt, self._prompt + new - 1):
            for row, token in enumerate(last.tolist()):
                batch.token[row], batch.pos[row] = token, position
            last = self._logits(self._rows).argmax(-1)
        return {"first_s": first - start, "rest_s": clock.perf_counter() - first}

    def logits(self, prompt: list[int]) -> Any:
        """float32 [tokens, vocabulary] of one prompt, as a copy."""
        self._llama.llama_memory_clear(self._memory, False)
        return self._logits(self._fill([prompt], every=True)).copy()

    def _fill(self, prompts: list[list[int]], every: bool) -> int:
        """Puts prompts into the batch, and requests logits of each one's last token, or of all tokens; returns their
        number.
        """
        assert len(prompts) == self._rows
        batch = self._batch
        batch.n_tokens = self._rows * self._prompt
        for row, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                i = row * self._prompt + position
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, row
                batch.logits[i] = every or position == self._prompt - 1
        return batch.n_tokens if every else self._rows

    def _logits(self, count: int) -> Any:
        """Computes the batch: float32 [count, vocabulary], a view of llama.cpp's own memory, valid
        until the next call.
        """
        status = self._llama.llama_decode(self._context, self._batch)
        assert status == 0, f"llama_decode returned {status}"
        return np.ctypeslib.as_array(self._llama.llama_get_logits(self._context), (count, self._vocabulary))

    def close(self) -> None:
        """Frees the batch and the cache in llama.cpp; the model stays loaded."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)


def _nothing(level: int, text: bytes, data: Any) -> None:
    """Receives llama.cpp's log, and drops it."""


def serve(folder: Path) -> None:
    """Answers tasks until stdin ends. folder: of the GGUF files.

    Raises AssertionError if llama.cpp cannot load one.
    """
    llama = import_module("llama_cpp.llama_cpp")
    quiet = llama.llama_log_callback(_nothing)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()

    @cache
    def model(dense: str) -> Any:
        loaded = llama.llama_model_load_from_file(
            str(folder / f"{dense}.gguf").encode(), llama.llama_model_default_params()
        )
        assert loaded, f"llama.cpp does not load {folder / dense}.gguf"
        return loaded

    held: dict[tuple[Any, ...], Context] = {}  # only the last one is kept: another task of the same kind finds it warm

    def context(way: Way, rows: int, prompt: int, room: int) -> Context:
        kind = (way, rows, prompt, room)
        if kind not in held:
            while held:
                held.popitem()[1].close()
            held[kind] = Context(llama, model(way.dense), *kind)
        return held[kind]

    for line in sys.stdin:
        task = json.loads(line)
        way, prompts = Way(**task["way"]), task["prompts"]
        if "logits" in task:
            np.save(
                task["logits"], np.concatenate([context(way, 1, len(one), len(one)).logits(one) for one in prompts])
            )
            answer: dict[str, float] = {}
        else:
            new, prompt = task["new"], len(prompts[0])
            room = -(-(prompt + new) // CELLS) * CELLS
            answer = context(way, len(prompts), prompt, room).run(prompts, new)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
