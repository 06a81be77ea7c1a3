"""Every option a client may use, all at once and for minutes, on a server with a GPU; each answer compared with a
CPU's.

    python -m lab.mixed_load [models/kimi-nano] [--device cuda] [--minutes 5] [--at-once 32]
        [--cases 300] [--together] [--seed 0] [--save FILE]

Serves a model with its drafter on the device, as a prefill worker and a decode worker that share the GPU (--together:
as one worker). Cases are drawn from evaluation prompts: greedy or seeded, with every sampling option, grammars, forced
and chosen tools, n, logprobs, stop strings, chats and completions, streamed or whole. For the given minutes they are
sent again and again in random order, `at-once` in flight; one client in eight disconnects early. In parallel the same
cases are sent to two servers on the CPU, each once: one with all of its instructions, one with AVX2 alone.

Ends with 1 if a request failed, if a page, a KV chunk or a job is left when all clients have gone, if memory of a
process or of the GPU grows, or if the share of answers that differ from the CPU's at a position where the two devices
do not nearly agree (`Difference`) is more than `WIDER` times that between the CPU's two instruction sets. An answer
that occurs several times counts as often: a case whose answer rounding decides has many, one for each batch that its
request was computed in. Differences
are expected: kernels round differently, so a greedy token differs if two logits are close, and a seeded draw if it
falls next to the border between two tokens; and if two experts are about equally likely, a token gets other ones, which
moves its log probabilities by a nat and more.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lab.attack.raw_http import ask, get, post
from lab.attack.schemas import schema
from lab.bystander import slope
from lab.program import count, output, program
from lab.trees import ROOT, Server, Tree, commit_of, ended_by_a_signal
from redline import clock
from redline.bench.quality.prompts import EvalPrompt, read_sets
from redline.bench.record import provenance
from redline.chat.tokenizer import Tokenizer
from redline.errors import RedlineError

SHARE = 1 / 8  # of clients that disconnect before their answer has ended
ANSWER_S = 300.0  # timeout of one answer; a CPU answers all cases within it
SETTLE_S = 180.0  # from the server's start until its GPU memory stays constant
STEADY = 3  # equal samples of GPU memory, 5 s apart, that count as constant
REST_S = 60.0  # from the last request until no job runs
TOLERANCE = 0.25  # nats between two devices' log probabilities of one token; bf16 through eight layers
FLAT_MIB = 8.0  # growth of a process or of the GPU's memory per minute, over the second half
WIDER = 3.0  # times the share of differences without a near tie, between a device and a CPU
TOP = 20  # log probabilities that are compared, the maximum of the API
RESTING = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "redline:queue_jobs",
    "redline:kv_chunks",
)
TOGETHER = "[[workers]]\n"
APART = '[[workers]]\nrole = "prefill"\n[[workers]]\nrole = "decode"\n'
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
}


class Case(NamedTuple):
    """One request, which every server answers alike up to rounding. options: those drawn for it, for counting."""

    route: str
    body: dict[str, Any]
    options: tuple[str, ...]

    def request(self, **more: Any) -> bytes:
        """The request's bytes, with the fields `more` in its body."""
        return post(self.route, json.dumps({**self.body, **more}).encode())


class Answer(msgspec.Struct, frozen=True):
    """One choice of an answer. top: for each token, log probabilities by the token's bytes; empty if not requested."""

    tokens: tuple[int, ...]
    top: tuple[dict[bytes, float], ...] = ()


class Difference(msgspec.Struct, frozen=True):
    """The first position at which an answer of the device differs from the CPU's.

    gap: nats between the two tokens by the CPU's log probabilities, for greedy requests without penalties or bias.
    shift: the largest difference of the two devices' log probabilities at this position, over the tokens that both
    list; None if the request did not ask for them. tie: whether the known ones of these are within TOLERANCE.
    """

    case: int
    choice: int
    place: int
    gap: float | None
    shift: float | None
    tie: bool


def cases(prompts: Sequence[EvalPrompt], number: int, seed: int) -> list[Case]:
    """`number` cases, a function of the seed. Each option is in about a quarter of them."""
    rng = random.Random(f"mixed load {seed}")
    return [_case(rng, rng.choice(prompts)) for _ in range(number)]


def _case(rng: random.Random, prompt: EvalPrompt) -> Case:
    chat = rng.random() < 0.75
    said = [turn for turn in msgspec.to_builtins(prompt.messages) if turn["role"] in ("system", "user")]
    history = rng.choice([0, 0, 1, 6, 12])  # turns before, so that prompts have up to some thousand tokens
    asked = {"role": "user", "content": (said[-1]["content"] * 8)[:500]}
    filler = [asked, {"role": "assistant", "content": "Yes."}] * history
    body: dict[str, Any] = {"max_tokens": rng.choice([8, 40, 120, 200]), "return_token_ids": True}
    options: list[str] = []

    def drawn(name: str, value: Any, share: float = 0.25) -> bool:
        if rng.random() >= share:
            return False
        body[name] = value
        options.append(name)
        return True

    if chat:
        body["messages"] = [*filler, *said]
    else:
        body["prompt"] = "\n".join(turn["content"] for turn in [*filler, *said])
    if rng.random() < 0.5:
        body["temperature"], body["seed"] = rng.choice([0.3, 0.7, 1.0, 1.3]), rng.randrange(2**31)
        options.append("seeded")
        drawn("top_p", rng.choice([0.5, 0.9, 0.99]))
        drawn("top_k", rng.choice([1, 5, 50]))
        drawn("min_p", rng.choice([0.02, 0.2]))
    else:
        body["temperature"] = 0
        options.append("greedy")
    drawn("presence_penalty", rng.choice([-0.5, 0.5, 1.0]), 0.15)
    drawn("frequency_penalty", rng.choice([-0.2, 0.3]), 0.15)
    drawn("repetition_penalty", rng.choice([0.95, 1.1]), 0.15)
    drawn("logit_bias", {str(rng.randrange(300, 4000)): rng.choice([-100, 3, 8]) for _ in range(4)}, 0.15)
    drawn("stop", [rng.choice(["\n\n", "=", "carry", ". "])])
    drawn("n", rng.choice([2, 4]), 0.15)
    match rng.randrange(8):
        case 0 if chat:
            body |= {"tools": [WEATHER], "tool_choice": "required"}
            options.append("forced tool")
        case 1 if chat:
            body["tools"] = [WEATHER]
            options.append("tools")
        case 2 if chat:
            form = {"name": "form", "schema": schema(rng), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
            options.append("json_schema")
        case 3:
            body["structured_outputs"] = {"regex": rng.choice(["[a-c ]{1,40}", "(yes|no)( |,)[0-9]{1,9}"])}
            options.append("regex")
        case 4:
            body["structured_outputs"] = {"grammar": 'root ::= "(" root ")" | "a" | "b" root'}
            options.append("grammar")
        case _:
            drawn("min_tokens", 5)
            drawn("ignore_eos", True, 0.15)
    if set(options) - {"greedy", "stop", "n", "ignore_eos"} or rng.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": TOP} if chat else {"logprobs": TOP}
        options.append("logprobs")
    return Case("/v1/chat/completions" if chat else "/v1/completions", body, tuple(options))


def answers(body: bytes) -> list[Answer]:
    """The choices of a whole answer, in order of their index."""
    return [_answer(choice) for choice in json.loads(body)["choices"]]


def _answer(choice: dict[str, Any]) -> Answer:
    scores = choice.get("logprobs") or {}
    if "content" in scores:
        top = [{bytes(one["bytes"]): one["logprob"] for one in entry["top_logprobs"]} for entry in scores["content"]]
    else:
        top = [{_spelled(token): score for token, score in entry.items()} for entry in scores.get("top_logprobs") or ()]
    return Answer(tuple(choice["token_ids"]), tuple(top))


def _spelled(token: str) -> bytes:
    """The bytes of a token as completions' logprobs spell it."""
    if token.startswith("bytes:"):
        return bytes(int(code, 16) for code in re.findall(r"\\x([0-9a-f]{2})", token))
    return token.encode()


def streamed(body: bytes) -> list[Answer]:
    """The choices of a streamed answer: token ids alone."""
    tokens: dict[int, list[int]] = {}
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
    return [Answer(tuple(tokens[index])) for index in sorted(tokens)]


def difference(case: Case, number: int, choice: int, ours: Answer, cpus: Answer, bytes_of: Any) -> Difference | None:
    """The first difference of an answer from the CPU's, which has log probabilities; None if there is none."""
    shared = zip(ours.tokens, cpus.tokens, strict=False)
    place = next((at for at, (a, b) in enumerate(shared) if a != b), min(len(ours.tokens), len(cpus.tokens)))
    if ours.tokens == cpus.tokens:
        return None
    gap = shift = None
    known = cpus.top[place] if place < len(cpus.top) else {}
    if not set(case.options) - {"greedy", "stop", "n", "ignore_eos", "logprobs"} and known:
        spelled = [bytes_of(tokens[place]) for tokens in (cpus.tokens, ours.tokens) if place < len(tokens)]
        scores = [known.get(each, -math.inf) for each in spelled]
        gap = abs(scores[0] - scores[-1]) if len(scores) == 2 else math.inf
    if place < len(ours.top) and known:
        both = known.keys() & ours.top[place].keys()
        likely = [token for token in both if known[token] > -8]  # of less likely ones rounding is larger
        shift = max((abs(known[token] - ours.top[place][token]) for token in likely), default=math.inf)
    tie = all(value is None or value < TOLERANCE for value in (gap, shift)) and (gap, shift) != (None, None)
    return Difference(number, choice, place, gap, shift, tie)


Expected = list[list[Answer] | None]  # by case: its choices; None: refused
# The answers received: by case, choice and tokens, the first of them and how often it occurred.
Given = dict[tuple[int, int, tuple[int, ...]], tuple[Answer, int]]


class Load:
    """The requests in flight, and the results so far."""

    def __init__(self, port: int, asked: Sequence[Case], rng: random.Random) -> None:
        self.kinds: Counter[str] = Counter()  # outcome or status -> requests
        self.options: Counter[str] = Counter()
        self.given: Given = {}
        self.refused: set[int] = set()  # cases that were answered with a status of 400 to 499
        self.failures: list[str] = []
        self._port, self._cases, self._rng = port, asked, rng

    async def client(self, until: float) -> None:
        """Sends one case after another until a time of `clock.monotonic`."""
        while clock.monotonic() < until:
            number = self._rng.randrange(len(self._cases))
            case, leaves = self._cases[number], self._rng.random() < SHARE
            streams = "logprobs" not in case.options and self._rng.random() < 0.5
            leave_s = self._rng.uniform(0, 1.0) if leaves else None
            request = case.request(stream=True) if streams else case.request()
            reply = await ask(self._port, request, limit_s=ANSWER_S, leave_s=leave_s)
            self.kinds[reply.kind] += 1
            self.options.update(case.options)
            if reply.status == 200:
                for index, one in enumerate((streamed if streams else answers)(reply.body)):
                    first, times = self.given.get((number, index, one.tokens), (one, 0))
                    self.given[number, index, one.tokens] = first, times + 1
            elif 400 <= reply.status < 500:
                self.refused.add(number)
            elif reply.outcome != "left":
                self.failures.append(f"case {number}: {reply.kind} {reply.body[:300]!r}")


class Memory(NamedTuple):
    """MiB: resident of each process of the server, and GPU memory used by its processes."""

    processes: dict[str, float]
    gpu: float


def memory(pid: int) -> Memory:
    """The present memory of the server and its children."""
    pids, resident = [str(pid)], dict[str, float]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        pids += (task / "children").read_text().split()
    for each in pids:
        try:
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
            pages = int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue  # the process has ended
        module = next((word.decode() for word in words if word.startswith(b"redline.")), "api")
        resident[f"{module} {each}"] = pages * 4096 / 2**20
    used = [line.split(", ") for line in _nvidia_smi("--query-compute-apps=pid,used_memory")]
    ours = [float(mib) for each, mib in used if each in pids and mib.isdigit()]
    # process ids in a container differ from those outside of it: use the whole GPU, on which nothing else runs
    if not ours:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        ours = [float(mib) for mib in _nvidia_smi("--query-gpu=memory.used", "-i", first) if mib.isdigit()]
    gpu = sum(ours)
    return Memory(resident, gpu)


def _nvidia_smi(*query: str) -> list[str]:
    """Lines without units; none on a machine without an NVIDIA GPU."""
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


async def figures(port: int) -> dict[str, float]:
    """The largest value of each series of RESTING over all workers, and KV transfers by outcome."""
    reply = await ask(port, get("/metrics"), limit_s=ANSWER_S)
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^([\w:]+)\{([^}]*)\} (\S+)$", reply.body.decode(), re.MULTILINE):
        if name in RESTING:
            found[name] = max(found.get(name, 0.0), float(value))
        if name == "redline:handoffs_total" and (result := re.search(r'result="(\w+)"', labels)):
            found[f"transfers {result[1]}"] = found.get(f"transfers {result[1]}", 0.0) + float(value)
    return found


async def at_rest(port: int) -> dict[str, float]:
    """`figures` once all of RESTING are 0, or the present ones after REST_S seconds."""
    deadline = clock.monotonic() + REST_S
    while True:
        found = await figures(port)
        if not any(found.get(name, 1) for name in RESTING) or clock.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


async def settled(pid: int) -> None:
    """Returns once the memory of the idle server on the GPU is constant: idle workers capture CUDA graphs, a shape at a
    time. Gives up after SETTLE_S seconds.
    """
    deadline, samples = clock.monotonic() + SETTLE_S, list[float]()
    while len(set(samples[-STEADY:])) > 1 or len(samples) < STEADY:
        if clock.monotonic() > deadline:
            return
        await asyncio.sleep(5.0)
        samples.append(memory(pid).gpu)


async def loaded(server: Server, asked: Sequence[Case], minutes: float, at_once: int, seed: int) -> dict[str, Any]:
    """Loads a server; its record, with its answers under "given"."""
    await settled(server.process.pid)
    load = Load(server.port, asked, random.Random(f"clients {seed}"))
    began = clock.monotonic()
    until = began + 60 * minutes
    clients = [asyncio.create_task(load.client(until)) for _ in range(at_once)]
    samples: list[tuple[float, Memory]] = []
    while not all(client.done() for client in clients):
        await asyncio.sleep(min(5.0, 60 * minutes / 20))
        minute = (clock.monotonic() - began) / 60
        samples.append((minute, memory(server.process.pid)))
        print(f"{minute:5.1f} min: {sum(load.kinds.values())} requests {dict(load.kinds)}", flush=True)
    await asyncio.gather(*clients)
    half = samples[len(samples) // 2 :]
    names = set[str].intersection(*(set(one.processes) for _, one in half))  # processes that existed all the time
    grows = {name: slope([(at, one.processes[name]) for at, one in half]) for name in names}
    grows["gpu"] = slope([(at, one.gpu) for at, one in half])
    return {
        "requests": dict(load.kinds),
        "options": dict(load.options.most_common()),
        "failures": load.failures[:20],
        "failed": len(load.failures),
        "mib_per_minute": {name: round(mib, 2) for name, mib in grows.items()},
        "mib": [
            [round(at, 2), {**one.processes, "gpu": one.gpu}] for at, one in samples[:: max(1, len(samples) // 20)]
        ],
        "mib_at_the_end": {**{k: round(v) for k, v in samples[-1][1].processes.items()}, "gpu": samples[-1][1].gpu},
        "at_rest": await at_rest(server.port),
        "refused": sorted(load.refused),
        "given": load.given,
    }


async def references(port: int, asked: Sequence[Case], at_once: int) -> Expected:
    """Each case's answer, with log probabilities; None if it is refused. Raises RedlineError if one is not answered."""
    room = asyncio.Semaphore(at_once)

    async def one(case: Case) -> list[Answer] | None:
        more = {"logprobs": True, "top_logprobs": TOP} if "messages" in case.body else {"logprobs": TOP}
        async with room:
            reply = await ask(port, case.request(**more), limit_s=ANSWER_S)
        if 400 <= reply.status < 500:
            return None
        if reply.status != 200:
            raise RedlineError(f"the CPU's server answered {reply.kind}: {reply.body[:300]!r}")
        return answers(reply.body)

    return await asyncio.gather(*map(one, asked))


def compared(
    given: Given, expected: Expected, asked: Sequence[Case], bytes_of: Any
) -> tuple[dict[str, int], list[Difference]]:
    """How many answers equal the expected ones, and the first differences of the others. `distinct` counts equal
    answers to a case once; the other counts count each time that an answer was received."""
    counts, differences = Counter(compared=0, equal=0, distinct=0, not_ties=0), list[Difference]()
    for (number, choice, tokens), (one, times) in given.items():
        choices = expected[number]
        if choices is None:
            continue
        counts.update(compared=times, equal=times * (tokens == choices[choice].tokens), distinct=1)
        found = difference(asked[number], number, choice, one, choices[choice], bytes_of)
        if found is not None:
            differences.append(found)
            counts["not_ties"] += times * (not found.tie)
    return dict(counts), differences


def deployment(model: Path, device: str, workers: str, kv_memory: str) -> str:
    """The deployment's file."""
    draft = Path(f"{model}-eagle3")
    drafts = f'type = "learned"\ndrafter = "{draft.resolve()}"\n' if draft.is_dir() else ""
    return (
        f'weights = "{model.resolve()}"\n[engine]\ndevice = "{device}"\nkv_memory = "{kv_memory}"\n'
        f"max_model_len = 8192\n{'[engine.speculation]' if drafts else ''}\n{drafts}{workers}"
    )


def wrong(record: dict[str, Any]) -> list[str]:
    """The failed checks of a run, a sentence each."""
    found = [f"{record['failed']} requests failed"] if record["failed"] else []
    found += [f"{name} is {record['at_rest'].get(name)} at rest" for name in RESTING if record["at_rest"].get(name, 1)]
    found += [
        f"memory of {name} grows by {mib} MiB a minute"
        for name, mib in record["mib_per_minute"].items()
        if mib > FLAT_MIB
    ]
    if record["refused_by_one"]:
        found.append(f"cases that one of both servers refused: {record['refused_by_one']}")
    ours, cpus = record["answers"], record["between_instruction_sets"]
    expected = max(1, cpus["not_ties"]) / max(1, cpus["compared"])
    if ours["not_ties"] / max(1, ours["compared"]) > WIDER * expected:
        found.append(
            f"{ours['not_ties']} of {ours['compared']} answers differ from the CPU's at places that are no near tie; "
            f"{cpus['not_ties']} of {cpus['compared']} do between two instruction sets"
        )
    if record["apart"] and not record["at_rest"].get("transfers taken_over"):
        found.append("no prompt was transferred")
    if record["end"]["code"] != 0 or record["end"]["tracebacks"]:
        found.append(f"the server ended with {record['end']['code']} and {record['end']['tracebacks']} tracebacks")
    return found


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="of the server under load")
    parser.add_argument("--minutes", type=float, default=5.0, help="of load (default: 5)")
    parser.add_argument("--at-once", type=count, default=32, help="requests in flight (default: 32)")
    parser.add_argument("--cases", type=count, default=300, help="different requests (default: 300)")
    parser.add_argument("--together", action="store_true", help="one worker, not a prefill and a decode worker")
    parser.add_argument("--kv-memory", default="1GB", help="of each worker (default: 1GB)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=output, default="runs/mixed-load.json")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program and writes JSON; 1 if something is wrong. Raises RedlineError if a server does not start."""
    asked = arguments().parse_args(words)
    prompts = [prompt for members in read_sets(asked.model / "eval").values() for prompt in members]
    drawn = cases(prompts, asked.cases, asked.seed)
    tokenizer = Tokenizer.open(asked.model)
    tree = Tree(str(ROOT), ROOT, commit_of(ROOT))
    with ExitStack() as stack:
        stack.enter_context(ended_by_a_signal())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def serve(device: str, workers: str, **environment: str) -> Server:
            file = folder / f"{device}.toml"
            file.write_text(deployment(asked.model, device, workers, asked.kv_memory))
            server = Server(tree, [str(file)], folder, sys.executable, environment)
            stack.callback(server.close)
            server.until_ready()
            return server

        server, cpu = serve(asked.device, TOGETHER if asked.together else APART), serve("cpu", TOGETHER)
        other = serve("cpu", TOGETHER, REDLINE_CPU_ISA="avx2")

        async def all_of_them() -> tuple[dict[str, Any], Expected, Expected]:
            load = loaded(server, drawn, asked.minutes, asked.at_once, asked.seed)
            every, avx2 = (references(each.port, drawn, asked.at_once) for each in (cpu, other))
            return await asyncio.gather(load, every, avx2)

        record, expected, in_avx2 = asyncio.run(all_of_them())
        end = server.stop()
        said = [line for line in server.said.splitlines() if re.search("WARNING|ERROR|Traceback", line)]
        record |= {"end": end._asdict(), "warnings": len(said), "last_warnings": said[-40:]}
        cpu.stop()
        other.stop()
    given: Given = record.pop("given")
    between: Given = {
        (number, choice, one.tokens): (one, 1)
        for number, choices in enumerate(in_avx2)
        for choice, one in enumerate(choices or ())
    }
    answered, differences = compared(given, expected, drawn, tokenizer.token_bytes)
    on_cpus, _ = compared(between, expected, drawn, tokenizer.token_bytes)
    refused_there = {number for number, choices in enumerate(expected) if choices is None}
    refused_here = set(record["refused"])
    answered_here = {number for number, _, _ in given}
    not_ties = [one for one in differences if not one.tie]
    gaps = sorted(one.gap for one in differences if one.gap is not None)
    shifts = sorted(one.shift for one in differences if one.shift is not None)
    record = {
        **provenance("torch", "llguidance"),
        "device": asked.device,
        "model": asked.model.name,
        "apart": not asked.together,
        "minutes": asked.minutes,
        "at_once": asked.at_once,
        "cases": asked.cases,
        "seed": asked.seed,
        **record,
        "refused_by_one": sorted((refused_here - refused_there) | (answered_here & refused_there)),
        "answers": answered,
        "between_instruction_sets": on_cpus,
        "largest_gap": gaps[-1] if gaps else None,
        "largest_shift": shifts[-1] if shifts else None,
        "differences": msgspec.to_builtins(differences[:200]),
        "not_ties": [
            {**msgspec.to_builtins(one), "options": drawn[one.case].options, "body": drawn[one.case].body}
            for one in not_ties[:20]
        ],
    }
    record["wrong"] = wrong(record)
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    print(f"answers: {record['answers']}, largest gap {record['largest_gap']}, shift {record['largest_shift']} nats")
    print(f"at rest: {record['at_rest']}; MiB a minute: {record['mib_per_minute']}")
    print("wrong: " + ("; ".join(record["wrong"]) or "nothing"))
    return 1 if record["wrong"] else 0


if __name__ == "__main__":
    program(main, heard=False)
