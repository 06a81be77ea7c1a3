"""Helpers that write model outputs as text with control tokens, and read the resulting events."""

import re
from collections.abc import Iterable, Sequence

from redline.chat.decoder import Decoder
from redline.chat.events import CallArguments, CallBegin, End, Event, Logprobs, Text, Thought
from redline.chat.tokenizer import Tokenizer
from redline.messages.delta import Delta, Finish
from redline.messages.job import JobId

JOB = JobId("job")


def tokens_of(tokenizer: Tokenizer, output: str) -> list[int]:
    """The ids of an output that spells out control tokens; `¦` only separates two texts."""
    return [token for part in output.split("¦") for token in tokenizer.encode_with_specials(part)]


def answer(
    tokenizer: Tokenizer,
    output: str,
    thinking: bool = False,
    stop: tuple[str, ...] = (),
    finish: Finish = "stop",
    parse: bool = True,
    **options: bool,
) -> list[Event]:
    """The events of an output that arrived in one delta."""
    return pushed(tokenizer, [tokens_of(tokenizer, output)], thinking, stop, finish, parse, **options)


def pushed(
    tokenizer: Tokenizer,
    parts: Sequence[Sequence[int]],
    thinking: bool = False,
    stop: tuple[str, ...] = (),
    finish: Finish = "stop",
    parse: bool = True,
    **options: bool,
) -> list[Event]:
    """The joined events of token lists that arrived as one delta each; the last one ends the job."""
    decoder = Decoder(tokenizer, thinking, stop, tokenizer.stop_ids, 7, parse, **options)
    deltas = [Delta(job=JOB, tokens=tuple(part), finish=None) for part in parts[:-1]]
    deltas.append(Delta(job=JOB, tokens=tuple(parts[-1]), finish=finish))
    return joined(event for delta in deltas for event in decoder.push(delta))


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with adjacent ones of one kind merged, as a client that concatenates deltas gets them."""
    result: list[Event] = []
    for event in events:
        match event, result[-1] if result else None:
            case Text(text=new), Text(text=old):
                result[-1] = Text(text=old + new)
            case Thought(text=new), Thought(text=old):
                result[-1] = Thought(text=old + new)
            case CallArguments(index=index, text=new), CallArguments(index=same, text=old) if index == same:
                result[-1] = CallArguments(index=index, text=old + new)
            case _:
                result.append(event)
    return result


def text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def thought(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Thought))


def calls(events: Iterable[Event]) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of each call."""
    events = list(events)
    begins = [event for event in events if isinstance(event, CallBegin)]
    assert [begin.index for begin in begins] == list(range(len(begins)))
    pieces = [event for event in events if isinstance(event, CallArguments)]
    return [(begin.id, begin.name, "".join(p.text for p in pieces if p.index == begin.index)) for begin in begins]


def end(events: Iterable[Event]) -> End:
    *others, last = events
    assert isinstance(last, End)
    assert not any(isinstance(event, End) for event in others)
    return last


def logprobs(events: Iterable[Event]) -> list[bytes]:
    return [data for event in events if isinstance(event, Logprobs) for _, data in event.items]


def call(id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*made: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(made)}<|tool_calls_section_end|>"


def shows_a_mark(events: Iterable[Event]) -> bool:
    return re.search(r"<\|?\w+\|?>", text(events) + thought(events)) is not None
