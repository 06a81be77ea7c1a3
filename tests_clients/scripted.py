"""Our HTTP API over an engine that plays a coding agent's model: `python scripted.py RECORD CONTEXT FILES KEYS`.

Kimi-Nano is too small for an agent's task, and whether calls and their results go there and back is what matters here.
The script decides by the prompt alone. It reads note.txt with the agent's own tool and gives back the word in it, after
log-0.txt, log-1.txt, ... of which there are FILES. If it is asked about picture.png, it reads that instead, and gives
the number of its tokens. Asked for a summary of the conversation, it gives one, and goes on
with note.txt. Where no tool reads files, it answers with an edit of note.txt in aider's form.

CONTEXT is in tokens of the tests' tokenizer, about one for each character. Requests need a key of the file KEYS. The
address is printed; every request and every turn of the model becomes a line of JSON in RECORD. The server ends with its
standard input.
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redline.media.rules import ImageRules
from redline.messages.delta import Delta
from redline.messages.job import Job
from tests.api.fake_engine import say
from tests.api.world import PATIENT, TOKENIZER, World, ids

READERS = (  # agents' tools that read a file or run a command, and the argument that they take
    ("Read", "file_path", "{}"),
    ("read", "filePath", "{}"),
    ("exec_command", "cmd", "cat {}"),
    ("Bash", "command", "cat {}"),
    ("bash", "command", "cat {}"),
    ("run_shell_command", "command", "cat {}"),
    ("run_commands", "commands", "cat {}"),
)
SUMMARISE = re.compile(
    r"summary of the conversation|summarizes a conversation|(checkpoint|anchored|handoff) (compaction|summary)", re.I
)
SUMMARY = "The logs are read; note.txt is left."
PICTURE, PAD = "picture.png", "<|media_pad|>"
WORD = re.compile(r"The word is (\w+-\d+)\.")
EDIT = "note.txt\n<<<<<<< SEARCH\nThe word is {word}.\n=======\nThe word was {word}.\n>>>>>>> REPLACE\n"


def reply(prompt: str, files: int) -> str:
    """What the model says next: a summary, the answer, a call or an edit."""
    asked = prompt.rpartition("<|im_user|>")[2]
    if seen := prompt.count(PAD):
        return f"It has {seen} tokens."
    if SUMMARISE.search(asked) and "## Return of" not in asked:
        return f"<summary>{SUMMARY}</summary>"
    before, summary, since = prompt.rpartition(SUMMARY)
    results = re.findall(r"## Return of .*?<\|im_end\|>", since, re.DOTALL)
    reader = next((reader for reader in READERS if declared(*reader[:2], prompt)), None)
    word = WORD.search(results[-1] if results else prompt)
    if reader is None:
        return EDIT.format(word=word[1]) if word else "Which file?"
    if results and word:
        return f"It is {word[1]}."
    name = "note.txt" if summary or len(results) >= files else f"log-{len(results)}.txt"
    if PICTURE in asked:
        name = PICTURE
    tool, argument, form = reader
    given = json.dumps({argument: form.format(Path.cwd() / name)})
    index = before.count("## Return of") + len(results)
    return (
        f"I read {name}.<|tool_calls_section_begin|><|tool_call_begin|>functions.{tool}:{index}"
        f"<|tool_call_argument_begin|>{given}<|tool_call_end|><|tool_calls_section_end|>"
    )


def declared(tool: str, argument: str, prompt: str) -> bool:
    """Whether the prompt declares a tool with such an argument, in TypeScript or in JSON."""
    _, found, behind = prompt.partition(f"\ntype {tool} = ")
    if found:
        return re.search(rf"^  {argument}\??: ", behind.partition("\ntype ")[0], re.MULTILINE) is not None
    return f'"name":"{tool}"' in prompt and f'"{argument}":{{' in prompt


def script(record: Path, files: int, job: Job) -> Iterator[Delta]:
    prompt = TOKENIZER.decode_bytes(job.tokens).decode(errors="replace")
    thought = "" if prompt.endswith("</think>") else "I think.</think>"
    said = f"{thought}{reply(prompt, files)}<|im_end|>"
    write_down({"prompt": prompt, "said": said}, record)
    yield from say(ids(said), per_delta=8)(job)


def write_down(entry: dict[str, Any], record: Path) -> None:
    with record.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def recorded(app: ASGIApp, record: Path) -> ASGIApp:
    """The app; what it is asked, and its answers, are written down."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        body, answer, status = bytearray(), bytearray(), None

        async def read() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def write(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))
            await send(message)

        await app(scope, read, write)
        route = f"{scope['method']} {scope['path']}"
        sent = json.loads(body) if body else {}
        write_down({"route": route, "body": sent, "status": status, "answer": answer.decode()}, record)

    return asked


async def main(record: Path, context: int, files: int, keys: str) -> None:
    limits = msgspec.structs.replace(PATIENT, images=16)
    given: dict[str, Any] = {"limits": limits, "max_model_len": context, "keys_file": keys, "rules": ImageRules()}
    async with World(lambda job: script(record, files, job), **given) as world:
        world.app = recorded(world.app, record)
        async with world.listening() as url:
            print(url, flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
