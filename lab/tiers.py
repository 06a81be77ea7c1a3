"""The gain from KV offload tiers for a conversation that returns, and how well that gain is predicted.

    python -m lab.tiers [models/kimi-nano] [--lengths 8192 --conversations 4] [--device cpu]
        [--turns 3] [--ranks 2] [--save FILE]
    python -m lab.tiers --shape kimi-k2.6 [--in-memory 4] [--save FILE]      random weights, on a GPU

`returning`: new conversations of random tokens and older ones that return with MORE tokens alternate in an engine with
host memory and a disk, with pages for one of them; so each return is read from host memory, and is compared with
prompts computed just before and after it. Then the engine is opened again, and all return from the disk. The first
token is timed. Measured times are compared with the predictions of each read, of each first token and of each computed
prompt; the errors are compared with their floor, the deviation of the same work from its own median in this run.
`regret` counts cache hits that were slower than the predicted, or the measured, prefill.

`parts` divides the time until a first token, by tier and length: medians of the milliseconds of each part. Parts of
different threads overlap. Parts of the loop: `room`, to make room for a read, including `save: ...`, which saves
displaced pages; `step`, from a step's launch to its end. Of the thread that launches steps: `launch`. Of the store's
thread: `read: ...`, and `thread: ...`, to compute checksums, write and pin. A launch or a step that is longer while the
store's thread pins memory waits for that.

`served`: the same over HTTP, alternating between two servers, with host memory and without (`tiers_served.py`).
`repeated`: on a CPU the same read again and again, and the part of its time that is waiting for a core
(`tiers_repeated.py`). Takes about four minutes on a CPU with a free core, one on a GPU. With `--shape`, pages have the
real model's bytes and prompts take its time; nothing is served then. On a GPU an answer from the disk may differ from
the one from memory, as any two runs may, and these are counted.
"""

import argparse
import copy
import gc
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from lab.full_depth import write_folder
from lab.program import count, output, program
from lab.tiers_repeated import repeated
from lab.tiers_served import served_turns
from lab.trees import MODEL, ROOT
from redline import clock
from redline.bench.machine import device_name
from redline.bench.record import provenance
from redline.chat.page_hashes import make_job
from redline.chat.tokenizer import RESERVED, Tokenizer
from redline.errors import ConfigError, RedlineError
from redline.messages.delta import Delta
from redline.messages.job import PAGE_TOKENS, JobId, Sampling
from redline.messages.news import TierLoad
from redline.model.k2.config import K2Config
from redline.model.k2.shapes import shape
from redline.run.tiers.parts import PartSpan
from redline.run.tiers.parts import told as told_parts
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine, kv_dtype_of, pick_device

MORE, ANSWER = 64, 4  # tokens that a return adds, and tokens of each answer
LEFT = 64  # spans of the previous prompt that are kept, since some may reach into this one's time
WARM = (
    1500,
    704,
    200,
    100,
)  # tokens of prompts that do not count, each sent again with MORE: the estimates learn from them
TIERS = "host", "disk"
SETTLE_S = 120.0  # timeout for the allocation of memory
NONE = {"ms": 0.0}  # a part that did not occur


class Series(NamedTuple):
    """`conversations` conversations, with these lengths in tokens in rotation. Each returns after the same number of
    others.
    """

    lengths: Sequence[int]
    conversations: int


SERIES = {
    "cpu": (Series((8192,), 4), Series((256, 512, 1024, 2048), 24)),
    "cuda": (Series((1024, 2048, 4096, 8192), 32),),
}


class Asked(NamedTuple):
    """One prompt. Times in ms: of the first token, measured and predicted (None: unknown); of the read before it (0:
    none), both too; and the predicted time of computing all of it. parts: of the time until the first token
    (`run.tiers.parts.told`).
    """

    tier: str  # the source of most of its pages: "host", "disk", "cache"; "none": it was computed
    tokens: int
    hit_tokens: int
    ms: float
    predicted_ms: float | None
    read_ms: float
    read_predicted_ms: float
    compute_ms: float | None
    parts: dict[str, dict[str, float]]


class Launches:
    """Receives the parts of steps (`Runner.begins`), and keeps the time of each step's launch."""

    def __init__(self, spans: list[PartSpan]) -> None:
        self._spans = spans
        self._began: float | None = None

    def __call__(self, part: str) -> None:
        """A part begins; "": the step is launched."""
        now = clock.perf_counter()
        if not part and self._began is not None:
            self._spans.append(PartSpan("launch", self._began, now))
        self._began = (self._began or now) if part else None


class Talks:
    """Conversations in one engine with tiers, and their answers."""

    def __init__(self, engine: Engine) -> None:
        tiers = engine.engine.tiers
        assert tiers is not None, "the engine has no tiers"
        self._engine, self._tiers, self._asked = engine, tiers, 0
        self._spans = tiers.store.parts.kept = list[PartSpan]()
        engine.engine.runner.begins = Launches(self._spans)

    def ask(self, prompt: Sequence[int]) -> tuple[Asked, tuple[int, ...]]:
        """A prompt's times, and its answer. Raises RedlineError if it has none."""
        self._asked += 1
        del self._spans[:-LEFT]
        sampling = Sampling(max_tokens=ANSWER, min_tokens=ANSWER, temperature=0.0)
        job = make_job(JobId(str(self._asked)), tuple(prompt), sampling, self._engine.fingerprint)
        believed, before = copy.deepcopy(self._tiers.prefills), self._tiers.figures()
        step_tokens, came = self._engine.engine.step_tokens, list[float]()

        def seen(delta: Delta) -> None:
            if delta.tokens:
                came.append(clock.perf_counter())

        began = clock.perf_counter()
        deltas = self._engine.generate([job], seen)[job.id]
        if not came:
            raise RedlineError(f"an answer has no token: {deltas[-1].error}")
        read = [_since(then, now) for then, now in zip(before, self._tiers.figures(), strict=True) if now.most_bytes]
        hit, read_s, predicted_s = (sum(each) for each in zip(*read, strict=True))
        cached = deltas[-1].cached_tokens
        rest_s = believed.predict(cached, len(prompt), step_tokens)
        compute_s = believed.predict(0, len(prompt), step_tokens)
        most = max(zip(read, TIERS, strict=False))[1]
        asked = Asked(
            tier=most if hit else "none" if cached < PAGE_TOKENS else "cache",
            tokens=len(prompt),
            hit_tokens=int(hit),
            ms=1e3 * (came[0] - began),
            predicted_ms=None if rest_s is None else 1e3 * (predicted_s + rest_s),
            read_ms=1e3 * read_s,
            read_predicted_ms=1e3 * predicted_s,
            compute_ms=None if compute_s is None else 1e3 * compute_s,
            parts=told_parts(tuple(self._spans), began, came[0]),
        )
        return asked, tuple(token for delta in deltas for token in delta.tokens)

    def settle(self) -> float:
        """Seconds until all memory is allocated that is allocated in idle times. Raises RedlineError."""
        began = clock.perf_counter()
        if not self._tiers.store.settle(SETTLE_S):
            raise RedlineError(f"memory of the host was not made in {SETTLE_S:g} s")
        return clock.perf_counter() - began

    def warm(self, draw: random.Random, size: int) -> None:
        """Bring the engine into the state of a worker that has served some prompts. size: of the vocabulary. Raises
        RedlineError.
        """
        for length in WARM:
            prompt = [draw.randrange(size) for _ in range(length + MORE)]
            self.ask(prompt[:length])
            self.ask(prompt)


def _since(then: TierLoad, now: TierLoad) -> tuple[float, float, float]:
    """Tokens that came from a tier in between, seconds that it took, and those predicted."""
    return now.hit_tokens - then.hit_tokens, now.read_s - then.read_s, now.predicted_s - then.predicted_s


def played(folder: Path, series: Series, given: argparse.Namespace) -> dict[str, Any]:
    """Raises RedlineError if an engine does not answer, or if on a CPU a return has another answer from the disk."""
    draw, longest = random.Random(given.seed), max(series.lengths) + MORE + ANSWER + PAGE_TOKENS
    config: dict[str, Any] = {"max_model_len": max(longest, *WARM) + MORE + ANSWER, "device": given.device}
    config |= {"ranks": given.ranks, "random_weights": given.in_memory if given.shape else None}
    size = Tokenizer.open(folder).vocab_size - RESERVED
    of_token = K2Config.from_folder(folder).kv_bytes_per_token(kv_dtype_of("bf16"))
    lag = len(series.lengths)
    prompts = [
        [draw.randrange(size) for _ in range(series.lengths[number % lag])] for number in range(series.conversations)
    ]
    more = [[draw.randrange(size) for _ in range(MORE)] for _ in prompts]
    room = 2 * of_token * (sum(map(len, prompts)) + series.conversations * (MORE + 2 * PAGE_TOKENS))
    config["kv_memory"] = (config["max_model_len"] + PAGE_TOKENS) * of_token
    # (conversation, whether it returns): each returns `lag` conversations later.
    turns = [(at, back) for number in range(len(prompts) + lag) for at, back in ((number, False), (number - lag, True))]
    turns = [(at, back) for at, back in turns if 0 <= at < len(prompts)]

    made_s = list[float]()  # until host memory was allocated, once the engine was idle

    def opened(turns: Sequence[tuple[int, bool]]) -> tuple[float, list[Asked], dict[int, tuple[int, ...]]]:
        """Seconds until the engine was open; the prompts; the answers of those that return."""
        began, asked, answers = clock.perf_counter(), list[Asked](), dict[int, tuple[int, ...]]()
        with Engine.open(folder, EngineConfig(**config)) as engine:
            opened_s, talks = clock.perf_counter() - began, Talks(engine)
            talks.warm(draw, size)
            made_s.append(talks.settle())
            for at, back in turns:
                one, answer = talks.ask(prompts[at] + more[at] if back else prompts[at])
                asked.append(one)
                if back:
                    answers[at] = answer
        return opened_s, asked, answers

    with tempfile.TemporaryDirectory(prefix="redline-tiers-", dir=given.disk) as place:
        config |= {"host_memory": room, "disk": place, "disk_size": 2 * room}
        _, asked, answers = opened(turns)
        if given.device == "cuda":  # the previous model is no longer referenced: release its memory for the next
            gc.collect()
            torch.cuda.empty_cache()
        opened_s, again, from_disk = opened([(at, True) for at in range(len(prompts))])
    asked += again
    parted = sum(from_disk[at] != answer for at, answer in answers.items())
    if parted and given.device == "cpu":
        raise RedlineError(f"{parted} conversations have another answer from the disk than from memory")
    return {
        "lengths": list(series.lengths),
        "conversations": series.conversations,
        "longest_bytes": longest * of_token,
        "opened_again_s": round(opened_s, 2),
        "memory_made_s": [round(seconds, 2) for seconds in made_s],
        "other_answers_from_disk": parted,
        **told(asked),
        "prompts": [{key: _short(value) for key, value in one._asdict().items()} for one in asked],
    }


def told(asked: Sequence[Asked]) -> dict[str, Any]:
    """First tokens by length and tier, errors of predictions, and regret."""
    computed = {length: [one.ms for one in asked if one.tokens == length] for length in _computed_lengths(asked)}
    hits = [one for one in asked if one.tier in TIERS]
    beside = [(one, median(computed[one.tokens - MORE])) for one in hits if one.tokens - MORE in computed]
    of_computed: dict[str, dict[str, float]] = {}
    for tier in TIERS:
        for length in computed:
            ratios = [one.ms / ms for one, ms in beside if one.tier == tier and one.tokens - MORE == length]
            if ratios:
                of_computed.setdefault(tier, {})[str(length)] = round(median(ratios), 4)
    prompts = [one for one in asked if one.tier == "none"]
    return {
        "computed_ms": {str(length): round(median(ms), 2) for length, ms in computed.items()},
        "of_computed": of_computed,
        "errors": {
            **{f"reading, {tier}": _of_readings(hits, tier) for tier in TIERS},
            **{f"first token, {tier}": _of_tokens(hits, tier) for tier in TIERS},
            "first token, computed": _of_tokens(prompts, "none"),
        },
        "parts": {tier: _parts([one for one in asked if one.tier == tier]) for tier in (*TIERS, "none")},
        "asked": {tier: sum(one.tier == tier for one in asked) for tier in (*TIERS, "cache", "none")},
        "regret": {
            "hits": len(hits),
            "slower_than_computing_was_predicted": sum(
                one.compute_ms is not None and one.ms > one.compute_ms for one in hits
            ),
            "slower_than_computing_was": sum(one.ms > ms for one, ms in beside),
        },
    }


def _parts(asked: Sequence[Asked]) -> dict[str, dict[str, float]]:
    """By tokens: milliseconds of the first token and of each part, medians; a missing part counts as 0."""
    found: dict[str, dict[str, float]] = {}
    for tokens in sorted({one.tokens for one in asked}):
        those = [one for one in asked if one.tokens == tokens]
        names = sorted({name for one in those for name in one.parts})
        found[str(tokens)] = {
            "first token": round(median(one.ms for one in those), 2),
            **{name: round(median(one.parts.get(name, NONE)["ms"] for one in those), 2) for name in names},
        }
    return found


def _computed_lengths(asked: Sequence[Asked]) -> list[int]:
    return sorted({one.tokens for one in asked if one.tier == "none"})


def _of_readings(hits: Sequence[Asked], tier: str) -> dict[str, float]:
    return errors([(one.tokens, one.read_predicted_ms, one.read_ms) for one in hits if one.tier == tier])


def _of_tokens(asked: Sequence[Asked], tier: str) -> dict[str, float]:
    return errors([(one.tokens, one.predicted_ms, one.ms) for one in asked if one.tier == tier])


def errors(pairs: Sequence[tuple[int, float | None, float]]) -> dict[str, float]:
    """Of |predicted - measured| / measured, if there is a prediction: count, median and p90. floor: the same for the
    median of the measured times of work of that size, known afterwards. pairs: (size, predicted, measured).
    """
    known = [(size, predicted, measured) for size, predicted, measured in pairs if predicted is not None]
    if not known:
        return {"count": 0}
    middle = {size: median(measured for one, _, measured in known if one == size) for size, _, _ in known}
    off = sorted(abs(predicted - measured) / measured for _, predicted, measured in known)
    floor = sorted(abs(middle[size] - measured) / measured for size, _, measured in known)
    return {
        "count": len(known),
        "median": round(median(off), 4),
        "p90": round(_p90(off), 4),
        "floor_median": round(median(floor), 4),
        "floor_p90": round(_p90(floor), 4),
    }


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _p90(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / MODEL)
    parser.add_argument(
        "--shape", default=None, help="random weights of this shape instead of the folder's, all layers"
    )
    parser.add_argument("--in-memory", type=count, default=4, help="layers in memory; all others reuse them")
    parser.add_argument("--ranks", type=count, default=1)
    parser.add_argument(
        "--lengths", type=count, nargs="+", default=None, help="lengths of conversations (default: those of SERIES)"
    )
    parser.add_argument("--conversations", type=count, default=4, help="of --lengths")
    parser.add_argument("--turns", type=int, default=3, help="turns of each conversation over HTTP; 0: no server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None, help="cpu or cuda (default: the GPU, if there is one)")
    parser.add_argument("--disk", default=None, help="parent folder of the disk tier (default: TMPDIR)")
    parser.add_argument("--save", type=output, default=None)
    return parser


def main(said: Sequence[str] | None = None) -> None:
    """Runs the program with `said` instead of the command line's words. Raises RedlineError."""
    given = arguments().parse_args(said)
    device = pick_device(given.device)
    given.device = device.type
    model = given.shape or given.folder.name
    record: dict[str, Any] = {**provenance("torch"), "device": device_name(device), "model": model}
    record |= {"ranks": given.ranks, "layers_in_memory": given.in_memory if given.shape else None, "returning": []}
    if given.shape and device.type == "cpu":
        raise ConfigError("--shape wants a GPU: on a CPU name a folder of weights")
    with tempfile.TemporaryDirectory(prefix="redline-shape-") as place:
        if given.shape:
            given.folder, given.turns = Path(place), 0
            write_folder(shape(given.shape), given.folder)
        for series in [Series(given.lengths, given.conversations)] if given.lengths else SERIES[device.type]:
            record["returning"].append(played(given.folder, series, given))
            said_of = {key: value for key, value in record["returning"][-1].items() if key != "prompts"}
            print(json.dumps(said_of), flush=True)
            if given.save:
                given.save.write_text(json.dumps(record, indent=1) + "\n")
    if device.type == "cpu":
        record["repeated"] = repeated(K2Config.from_folder(given.folder), device)
        print(json.dumps(record["repeated"]), flush=True)
    if given.turns > 0:
        record["served"] = served_turns(given.folder, device.type, given.turns, given.seed)
        print(json.dumps(record["served"]), flush=True)
    if given.save:
        given.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    program(main)
