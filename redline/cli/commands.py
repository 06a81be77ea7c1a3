"""The slash commands of `redline chat`, which are executed by the client instead of sent to the model."""

import base64
import mimetypes
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from redline.cli.chat import Client
from redline.disk import save
from redline.errors import ConfigError

COMMAND = re.compile(r"/[a-z]+(?=\s|$)")
HELP = """/think on|off    answer with or without thinking first
/system TEXT     set the system prompt; without TEXT: remove it
/image FILE      send an image, or a video, with the next question
/new             start a new conversation
/save FILE       write the conversation as JSON, in the format of `messages` in a request
/help            show this list
Enter sends, Alt-Enter begins a new line, arrows bring back earlier questions; Ctrl-C stops an answer, Ctrl-D quits."""


def obey(text: str, client: Client, tell: Callable[[str], object]) -> bool:
    """Execute a command and report the result; returns False if the text is not a command, and so a question.

    Raises ConfigError for an unknown command or a missing argument, and OSError if a file cannot be read or written.
    """
    text = text.strip()
    found = COMMAND.match(text)
    if found is None:
        return False
    rest = text[found.end() :].strip()
    match found[0], rest:
        case "/help", "":
            tell(HELP)
        case "/think", "on" | "off" | "":
            client.thinking = not client.thinking if not rest else rest == "on"
            tell("thinking is on" if client.thinking else "thinking is off")
        case "/system", _:
            client.instruct(rest or None)
            tell("the system prompt is set" if rest else "no system prompt")
        case "/new", "":
            client.forget()
            tell("a new conversation")
        case "/image", _ if rest:
            path = Path(rest).expanduser()
            kind = mimetypes.guess_type(path.name)[0] or "image/png"
            client.pictures.append(f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}")
            tell(f"{path.name} goes with the next question")
        case "/image", _:
            raise ConfigError("/image needs a file: /image screenshot.png")
        case "/save", _ if rest:
            said = msgspec.json.format(msgspec.json.encode(client.messages), indent=1) + b"\n"
            save(Path(rest).expanduser(), said, private=True)
            tell(f"{len(client.messages)} messages saved to {rest}")
        case "/save", _:
            raise ConfigError("/save needs a file: /save chat.json")
        case "/think", _:
            raise ConfigError(f"/think is on or off, not {rest!r}")
        case _:
            raise ConfigError(f"{text!r} is not a command; /help lists them. Begin a question with a blank.")
    return True
