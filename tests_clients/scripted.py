"""Our HTTP API over an engine that plays a coding agent's model: `python scripted.py RECORD CONTEXT [FILES]`.

Kimi-Nano is too small for an agent's task, and which tools are called is what matters here. The script reads the prompt
alone. It calls the tool of the agent that reads a file, for note.txt, and gives back the word in it. With FILES it first
reads log-0.txt, log-1.txt, ... until the agent asks for a summary of the conversation, or FILES of them are read. Where
no tool is declared that reads files, the answer is an edit of note.txt in aider's form.

CONTEXT is in tokens of the tests' tokenizer, about one for each character. The address is printed; each request becomes
a line of JSON in RECORD. The server ends with its standard input.
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redline.wire.delta import Delta
from redline.wire.job import Job
from tests.api.fake_engine import say
from tests.api.world import TOKENIZER, World, ids

READERS = (  # tools that read a file or run a command, and the argument that they take
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
WORD = re.compile(r"The word is (\w+-\d+)\.")
EDIT = "note.txt\n<<<<<<< SEARCH\nThe word is {word}.\n=======\nThe word was {word}.\n>>>>>>> REPLACE\n"


def reply(prompt: str, folder: Path, files: int) -> str:
    """What the model says next: a call, a summary or the answer."""
    asked = prompt.rpartition("<|im_user|>")[2]
    since = prompt.rpartition(SUMMARY)[2]
    results = re.findall(r"## Return of .*?<\|im_end\|>", since, re.DOTALL)
    reader = next((reader for reader in READERS if declared(*reader[:2], prompt)), None)
    if SUMMARISE.search(asked) and "## Return of" not in asked:
        return f"<summary>{SUMMARY}</summary>"
    if reader is None:
        word = WORD.search(prompt)
        return EDIT.format(word=word[1]) if word else "Which file?"
    if results and (word := WORD.search(results[-1])):
        return f"It is {word[1]}."
    name = "note.txt" if SUMMARY in prompt or len(results) >= files else f"log-{len(results)}.txt"
    tool, argument, form = reader
    given = json.dumps({argument: form.format(folder / name)})
    index = prompt.count("## Return of")
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
    said = f"{thought}{reply(prompt, Path.cwd(), files)}<|im_end|>"
    write_down({"prompt": prompt, "said": said}, record)
    yield from say(ids(said), per_delta=8)(job)


def write_down(entry: dict[str, Any], record: Path) -> None:
    with record.open("a") as file:
        file.write(json.dumps(entry) + "\n")


class Recorded:
    """Writes down what an app is asked and with which status it answers."""

    def __init__(self, app: ASGIApp, record: Path) -> None:
        self.app = app
        self.record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body, answered, status = bytearray(), bytearray(), []

        async def read() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def write(message: Message) -> None:
            status.extend([message["status"]] if "status" in message else [])
            answered.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, read, write)
        entry = {
            "route": f"{scope['method']} {scope['path']}",
            "status": status[0] if status else None,
            "body": json.loads(body) if body else None,
            "answer": answered.decode(errors="replace"),
        }
        write_down(entry, self.record)


async def main(record: Path, context: int, files: int = 0) -> None:
    async with World(lambda job: script(record, files, job), max_model_len=context) as world:
        world.app = Recorded(world.app, record)
        async with world.listening() as url:
            print(url, flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
