"""Compares the answers of two trees: the same requests to both, and every token and every number compared.

    python -m lab.golden BEFORE AFTER [--prompts 60 | --all] [--only SETTING ...] [--save FILE]

BEFORE and AFTER are each a commit, a branch, or a folder with a copy of the project ("." is this one, with its
changes). Both are served on the CPU, one setting after the other: without and with the drafter, over pages of each
format. Each prompt of the evaluation set is rendered, answered greedily, and answered with a seed under one of many
combinations of sampling parameters; then it is completed as text or ids, or its own log probabilities are requested.
Log probabilities show the logits: their digits in the JSON must be the same. Fields that depend on the time are left
out: ids, times, and numbers of cached or drafted tokens. Other rows of the batch change no answer (law 7), so 16 are
requested at once.

Bits depend on the processor, so nothing is kept from run to run: both trees are served in each run. The exit status is
1 if any answer differs, and the first differences are printed. About 60 prompts take two minutes on two idle cores.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from lab.attack.raw_http import Reply, ask, post
from lab.program import count, output, program
from lab.trees import MODEL, ROOT, Server, Tree, opened, served
from redline import clock
from redline.bench.quality.prompts import EvalPrompt, read_sets
from redline.bench.record import provenance
from redline.errors import ConfigError
from redline.progress import Working

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
PROMPTS = 60
WAVE = 64  # prompts that are sent to one tree, then to the other; only their answers are kept
AT_ONCE = 16
ANSWER_S = 600.0
SERVED = ("--device", "cpu", "--kv-memory", "1GB", "--max-model-len", "8192", "--log-level", "warning")
GREEDY_TOKENS, SEEDED_TOKENS, COMPLETED_TOKENS = 1024, 256, 32  # maximum tokens of answers; 1024 as in `redline eval`
TOP = 20  # log probabilities of a token
LONG_CHARS = 4000  # a longer prompt gets one log probability per token instead of TOP
SHOWN, KEPT = 3, 40  # differences that are printed, and that are saved in full
PLACES = 5  # positions that are listed for one difference
SHOWN_CHARS = 2000  # characters of a request or an answer that are printed

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
BIAS = {"10": 1.5, "32": -1.0, "257": 2.0, "262": -3.0, "300": 1.0, "1000": -5.0}
MIXES: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.05},
    PENALTIES,
    {"logit_bias": BIAS},
    {"n": 3},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 100, "min_p": 0.01, "logit_bias": BIAS, **PENALTIES},
    {"stop": ["\n", "."], "include_stop_str_in_output": True},
    {"temperature": 1.6, "min_tokens": 12, "ignore_eos": True},
)
GREEDY_MIXES: tuple[dict[str, Any], ...] = ({}, PENALTIES, {"logit_bias": BIAS, "ignore_eos": True})

KINDS = TEMPLATE, CHAT_GREEDY, CHAT_SEEDED, TEXT_GREEDY, TEXT_SEEDED, SCORED = (
    "template",
    "chat, greedy",
    "chat, seeded",
    "completion, greedy",
    "completion, seeded",
    "prompt's logprobs",
)


class Asked(NamedTuple):
    """A prompt of the evaluation set, and its position in it."""

    place: str
    prompt: EvalPrompt


class Request(NamedTuple):
    """One request of the comparison. kind: one of KINDS. place: position of its prompt in the evaluation set.

    path, body: of the POST.
    """

    kind: str
    place: str
    path: str
    body: dict[str, Any]


class Number(str):
    """A number with a decimal point, with its digits from the answer."""


class Answer(NamedTuple):
    """status: 0 if no complete answer arrived. body: without fields that depend on the time."""

    status: int
    body: Any


class Difference(NamedTuple):
    """The two answers to one request under one setting. places: the first positions in the answer at
    which they differ.
    """

    setting: str
    request: Request
    before: Answer
    after: Answer
    places: list[str]

    def told(self) -> str:
        """The request and both answers, cut to SHOWN_CHARS characters each, as lines for a terminal."""

        def cut(value: Any) -> str:
            text = json.dumps(value, ensure_ascii=False)
            more = f" ... ({len(text) - SHOWN_CHARS:,} more characters)" if len(text) > SHOWN_CHARS else ""
            return text[:SHOWN_CHARS] + more

        request = self.request
        lines = [f"{self.setting}; {request.kind}; {request.place}: POST {request.path} {cut(request.body)}"]
        lines += [f"  {place}" for place in self.places]
        lines += [f"  before: {self.before.status} {cut(self.before.body)}"]
        lines += [f"  after:  {self.after.status} {cut(self.after.body)}"]
        return "\n".join(lines)


class Tally:
    """The comparison's counts: (setting, kind) -> how many answers, and how many of them were equal.

    numbers: how many numbers with a decimal point were compared. differences: the first KEPT, in full.
    """

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self.equal: Counter[tuple[str, str]] = Counter()
        self.numbers = 0
        self.differences: list[Difference] = []  # the first KEPT

    @property
    def different(self) -> int:
        """How many answers were not equal, including those that both trees refused."""
        return self.answers.total() - self.equal.total()

    def add(self, setting: str, request: Request, before: Answer, after: Answer) -> None:
        """Answers are equal if both trees gave one, and it is the same: two equal refusals prove nothing."""
        case = setting, request.kind
        self.answers[case] += 1
        self.numbers += sum(isinstance(leaf, Number) for leaf in leaves(before.body))
        if before == after and before.status == 200:
            self.equal[case] += 1
        elif len(self.differences) < KEPT:
            places = [] if before == after else apart(before.body, after.body)
            self.differences.append(Difference(setting, request, before, after, places))

    def rows(self) -> list[dict[str, Any]]:
        """The counts for JSON, an object for each setting and kind."""
        return [
            {"setting": setting, "kind": kind, "answers": count, "equal": self.equal[setting, kind]}
            for (setting, kind), count in self.answers.items()
        ]

    def table(self) -> str:
        """The counts as lines for a terminal: a row per kind, a column per setting.

        Raises ValueError if nothing was compared.
        """
        settings = list(dict.fromkeys(setting for setting, _ in self.answers))
        width = max(map(len, settings)) + 2
        lines = [f"{'':20}" + "".join(f"{setting:>{max(width, 16)}}" for setting in settings)]
        for kind in KINDS:
            cells = (f"{self.equal[case]:,} / {self.answers[case]:,}" for case in ((one, kind) for one in settings))
            lines.append(f"{kind:20}" + "".join(f"{cell:>{max(width, 16)}}" for cell in cells))
        return "\n".join(lines)


# -- Requests ----------------------------------------------------------------------------------------------------------


def chosen(sets: Mapping[str, Sequence[EvalPrompt]], count: int | None) -> list[Asked]:
    """`count` prompts, or all, spread over the kinds of all sets and within each: the same ones every time.

    They are shuffled, since the requests for a prompt depend on its position in the list.
    """
    groups: dict[str, list[Asked]] = {}
    for name, prompts in sets.items():
        for number, prompt in enumerate(prompts):
            groups.setdefault(f"{name} {prompt.kind}", []).append(Asked(f"{name} {number} ({prompt.kind})", prompt))
    share = dict.fromkeys(groups, 0)
    left = sum(map(len, groups.values())) if count is None else min(count, sum(map(len, groups.values())))
    while left:
        for kind, members in groups.items():
            if left and share[kind] < len(members):
                share[kind] += 1
                left -= 1
    spread = [
        [members[k * len(members) // share[kind]] for k in range(share[kind])] for kind, members in groups.items()
    ]
    found = [asked for members in spread for asked in members]
    random.Random(0).shuffle(found)
    return found


def template(asked: Asked) -> Request:
    """The request that renders a prompt by the chat template: its answer contains the prompt's token ids."""
    body = {**_chat(asked.prompt), "chat_template_kwargs": {"thinking": asked.prompt.thinking}}
    return Request(TEMPLATE, asked.place, TOKENIZE, body)


def requests(number: int, asked: Asked, ids: Sequence[int]) -> list[Request]:
    """Three requests for the prompt at this position of the list: greedy, seeded, and one of the other kinds in
    rotation.

    ids: the prompt's tokens, as rendered by the template. The seed is `number`, and -number for completions of text.
    """
    chat = {**_chat(asked.prompt), "thinking": {"type": "enabled" if asked.prompt.thinking else "disabled"}}
    scored = {"logprobs": True, "top_logprobs": TOP}
    greedy = {**chat, "temperature": 0, "max_tokens": GREEDY_TOKENS, **(scored if number % 4 == 0 else {})}
    mix = MIXES[number % len(MIXES)]
    seeded = {"temperature": 1, "seed": number, "max_tokens": SEEDED_TOKENS, **mix}
    found = [
        Request(CHAT_GREEDY, asked.place, CHAT, greedy),
        Request(CHAT_SEEDED, asked.place, CHAT, {**chat, **seeded, **(scored if number % 4 == 1 else {})}),
    ]
    turn = number // 3
    text = asked.prompt.messages[-1].text
    prompt = {"prompt": text if turn % 2 and text else list(ids)}
    completion = {**prompt, "logprobs": TOP, "max_tokens": COMPLETED_TOKENS}
    match number % 3:
        case 0:
            body = {**completion, "temperature": 0, **GREEDY_MIXES[turn % len(GREEDY_MIXES)]}
            found.append(Request(TEXT_GREEDY, asked.place, COMPLETIONS, body))
        case 1:
            mix = MIXES[(number + turn) % len(MIXES)]
            body = {**completion, "temperature": 1, "seed": -number, **mix}
            found.append(Request(TEXT_SEEDED, asked.place, COMPLETIONS, body))
        case _:
            top = TOP if sum(len(one.text) for one in asked.prompt.messages) < LONG_CHARS else 1
            found.append(_scoring(turn, asked, prompt, chat, top))
    return found


def _scoring(turn: int, asked: Asked, prompt: dict[str, Any], chat: dict[str, Any], top: int) -> Request:
    """A request for the log probabilities of a prompt's own tokens, in one of the three ways to request them."""
    match turn % 3:
        case 0:
            body = {**prompt, "temperature": 0, "max_tokens": 1, "prompt_logprobs": top}
            return Request(SCORED, asked.place, COMPLETIONS, body)
        case 1:
            body = {**prompt, "temperature": 0, "max_tokens": 0, "echo": True, "logprobs": top}
            return Request(SCORED, asked.place, COMPLETIONS, body)
        case _:
            body = {**chat, "temperature": 0, "max_tokens": 1, "prompt_logprobs": top}
            return Request(SCORED, asked.place, CHAT, body)


def _chat(prompt: EvalPrompt) -> dict[str, Any]:
    """Messages and tools as OpenAI's clients send them."""
    found = msgspec.to_builtins(prompt)
    messages = [
        {key: value for key, value in turn.items() if value is not None and value != ()} for turn in found["messages"]
    ]
    return {"messages": messages, **({"tools": found["tools"]} if found["tools"] else {})}


# -- Answers -----------------------------------------------------------------------------------------------------------


def read(reply: Reply) -> Answer:
    """The answer without ids, times, and numbers of cached or drafted tokens; other numbers keep their digits."""
    if not reply.whole:
        return Answer(0, reply.kind)
    body = json.loads(reply.body, parse_float=Number)
    if reply.status == 200:
        body.pop("id", None)
        body.pop("created", None)
        if usage := body.get("usage"):
            details = usage["completion_tokens_details"]
            counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            body["usage"] = {**counts, "reasoning_tokens": details["reasoning_tokens"]}
    return Answer(reply.status, body)


def leaves(value: Any) -> Iterator[Any]:
    """Every value of an answer that is not an object or list, and empty objects and lists."""
    parts = _parts(value)
    if parts is None:
        yield value
    else:
        for part in parts.values():
            yield from leaves(part)


def apart(before: Any, after: Any) -> list[str]:
    """The first positions at which two answers differ, and how many more there are."""
    found = list(_apart(before, after, "answer"))
    more = [f"and {len(found) - PLACES:,} more"] if len(found) > PLACES else []
    return found[:PLACES] + more


def _apart(before: Any, after: Any, place: str) -> Iterator[str]:
    ours, theirs = _parts(before), _parts(after)
    if ours is not None and theirs is not None:
        for key in dict.fromkeys([*ours, *theirs]):
            yield from _apart(ours.get(key, "nothing"), theirs.get(key, "nothing"), place + key)
    elif before != after:
        yield f"{place}: {_digits(before)} before, {_digits(after)} after"


def _parts(value: Any) -> dict[str, Any] | None:
    """{position: part} of an object or a list; None for any other or empty value."""
    if isinstance(value, dict):
        return {f".{key}": part for key, part in cast(dict[str, Any], value).items()} or None
    if isinstance(value, list):
        return {f"[{index}]": part for index, part in enumerate(cast(list[Any], value))} or None
    return None


def _digits(value: Any) -> str:
    return str(value) if isinstance(value, Number) else json.dumps(value, ensure_ascii=False)


# -- Sending -----------------------------------------------------------------------------------------------------------


def settings(offered: str, drafter: str | None) -> dict[str, list[str]]:
    """{setting: flags of `redline serve`}. offered: the tree's help text. drafter: its folder, if there is one.

    float32 pages compute exact products, so they show differences that rounding to bf16 hides. fp8 is tested once, with
    all other options.
    """
    draft = [] if drafter is None else ["--draft", drafter]
    found: dict[str, list[str]] = {"plain": [], "drafter": draft}
    if "float32" in offered:
        exact = ["--kv-dtype", "float32"]
        found |= {"float32": exact, "float32, drafter": [*exact, *draft]}
    if "fp8" in offered:
        found["fp8, drafter" if draft else "fp8"] = ["--kv-dtype", "fp8", *draft]
    return {name: flags for name, flags in found.items() if draft or "drafter" not in name}


def offered_by(tree: Tree) -> str:
    """The help of the tree's `redline serve`."""
    environment = {**tree.environment(), "COLUMNS": "300"}
    command = [sys.executable, "-m", "redline", "serve", "--help"]
    return subprocess.run(command, cwd=tree.folder, env=environment, capture_output=True, text=True).stdout


async def ask_all(server: Server, asked: Sequence[Request], working: Working) -> list[Answer]:
    """The answers in the order of the requests, AT_ONCE at a time; one that takes longer than ANSWER_S has status 0.

    Raises RedlineError if the server has ended by itself.
    """
    free = asyncio.Semaphore(AT_ONCE)
    done = 0

    async def one(request: Request) -> Answer:
        nonlocal done
        async with free:
            body = json.dumps(request.body).encode()
            reply = await ask(server.port, post(request.path, body), limit_s=ANSWER_S, keep=1 << 26)
        done += 1
        working.show(done, len(asked))
        return read(reply)

    answers = await asyncio.gather(*map(one, asked))
    server.check()
    return answers


def compare(
    setting: str, before: Server, after: Server, prompts: Sequence[Asked], tally: Tally, working: Working
) -> None:
    """Sends everything to both servers, and adds the result to `tally`.

    A wave of prompts goes to one server, then to the other: while one computes, the other waits. Raises RedlineError if
    a server has ended by itself.
    """

    def both(asked: list[Request], place: str) -> list[Answer]:
        told: list[list[Answer]] = []
        for who, server in (("before", before), ("after", after)):
            working.show(0, len(asked), what=f"{setting}, {place}, {who}")
            told.append(asyncio.run(ask_all(server, asked, working)))
        for request, *answers in zip(asked, *told, strict=True):
            tally.add(setting, request, *answers)
        return told[0]

    for start in range(0, len(prompts), WAVE):
        wave = prompts[start : start + WAVE]
        place = f"prompts {start + 1:,} to {start + len(wave):,} of {len(prompts):,}"
        rendered = both([template(asked) for asked in wave], place)
        ids = [answer.body["tokens"] if answer.status == 200 else [0] for answer in rendered]
        three = [requests(start + k, asked, ids[k]) for k, asked in enumerate(wave)]
        both([request for group in three for request in group], place)


def run(asked: argparse.Namespace) -> int:
    """Compares the trees under every setting, prints and saves; 0 if all answers were equal, else 1.

    asked: the flags. Raises ConfigError for a tree, a model or a setting that does not exist, and RedlineError if a
    server does not start or ends by itself.
    """
    model: str = asked.model
    here = Tree("this checkout", ROOT, "").model(model)
    prompts = chosen(read_sets(here / "eval"), None if asked.all else asked.prompts)
    began = clock.monotonic()
    tally = Tally()
    with Working("opening the trees") as working, opened([asked.before, asked.after]) as trees:
        before, after = trees
        drafter = drafter_of(model)
        has_one = any((folder / drafter).is_dir() for folder in (ROOT, before.folder, after.folder))
        offered = settings(offered_by(before), drafter if has_one else None)
        if unknown := set(asked.only or ()) - set(offered):
            raise ConfigError(f"--only {', '.join(unknown)}: the settings are {'; '.join(offered)}")
        for name, flags in offered.items():
            if asked.only and name not in asked.only:
                continue
            working.show(what=f"{name}: starting both servers")
            words = [words_of(tree, model, flags) for tree in trees]
            with served(trees, words) as (one, other):
                compare(name, one, other, prompts, tally, working)
    seconds = clock.monotonic() - began
    print(f"before: {before.name} ({before.commit}); after: {after.name} ({after.commit}); {len(prompts):,} prompts")
    print(tally.table())
    for difference in tally.differences[:SHOWN]:
        print(f"\n{difference.told()}")
    verdict = f"{tally.different:,} DIFFER" if tally.different else "all equal"
    print(
        f"\n{verdict}: {tally.answers.total():,} answers with {tally.numbers:,} log probabilities, "
        f"{seconds:.0f} s, load {os.getloadavg()[0]:.1f}"
    )
    if asked.save:
        record = {
            **provenance("torch"),
            "before": before.commit,
            "after": after.commit,
            "model": Path(model).name,
            "prompts": len(prompts),
            "answers": tally.answers.total(),
            "different": tally.different,
            "log_probabilities": tally.numbers,
            "seconds": round(seconds, 1),
            "compared": tally.rows(),
            "differences": [one._replace(request=one.request._asdict())._asdict() for one in tally.differences],
        }
        asked.save.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 1 if tally.different else 0


def drafter_of(model: str) -> str:
    """The folder of a model's drafter, derived from the model's name: it may not exist."""
    return f"{model.rstrip('/')}-eagle3"


def words_of(tree: Tree, model: str, flags: Sequence[str]) -> list[str]:
    """The arguments of the tree's `redline serve`.

    The drafter's name in `flags` is replaced by the tree's folder for it. Raises ConfigError if neither the tree nor
    this checkout has the model or the drafter.
    """
    drafter = drafter_of(model)
    return [str(tree.model(model)), *SERVED, *(str(tree.model(word)) if word == drafter else word for word in flags)]


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE", help="a commit, a branch, or a folder with a copy of the project")
    parser.add_argument("after", metavar="AFTER", help="the same; its answers must equal those of BEFORE")
    parser.add_argument("--model", default=MODEL, help=f"a folder within each tree (default: {MODEL})")
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--prompts", type=count, default=PROMPTS, help=f"of the evaluation set (default: {PROMPTS})")
    many.add_argument("--all", action="store_true", help="the whole evaluation set, which takes an hour or two")
    parser.add_argument("--only", action="append", metavar="SETTING", help="such as drafter (repeatable; default: all)")
    parser.add_argument("--save", type=output, help="write the counts and the first differences as JSON")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program with `words` instead of the command line's, and returns its exit status as `run` does."""
    return run(arguments().parse_args(words))


if __name__ == "__main__":
    program(main, heard=False)
