"""What begins with a slash in `redline chat` is for the chat, not for the model."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from redline.cli.chat import Client
from redline.disk import save
from redline.errors import ConfigError

COMMAND = re.compile(r"/[a-z]+(?=\s|$)")
HELP = """/think on|off    answer with or without thinking first
/system TEXT     a system prompt from here on; without TEXT: none
/new             forget what has been said
/save FILE       write the conversation as JSON: what `messages` of a request holds
/help            this list
Enter sends, Alt-Enter begins a new line, arrows bring back earlier questions; Ctrl-C stops an answer, Ctrl-D leaves."""


def obey(text: str, client: Client, tell: Callable[[str], object]) -> bool:
    """Do what a command says, and tell of it; False where the text is none, and so a question.

    Raises ConfigError for a command that nobody knows, or that lacks something, and OSError where a file cannot be
    written.
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
            tell("thinks first" if client.thinking else "answers without thinking")
        case "/system", _:
            client.instruct(rest or None)
            tell("a system prompt from here on" if rest else "no system prompt")
        case "/new", "":
            client.forget()
            tell("a new conversation")
        case "/save", _ if rest:
            said = msgspec.json.format(msgspec.json.encode(client.messages), indent=1) + b"\n"
            save(Path(rest).expanduser(), said, private=True)
            tell(f"{len(client.messages)} messages are in {rest}")
        case "/save", _:
            raise ConfigError("/save needs a file: /save chat.json")
        case "/think", _:
            raise ConfigError(f"/think is on or off, not {rest!r}")
        case _:
            raise ConfigError(f"{text!r} is no command; /help lists them. A question may begin with a blank.")
    return True
