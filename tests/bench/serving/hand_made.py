"""Answers with known times, made by hand."""

from redline.bench.serving.records import (
    Failure,
    GeneratorLoad,
    Kind,
    LoadRequest,
    LoadRun,
    StreamChunk,
    TimedAnswer,
    Usage,
)


def answer(
    *chunks: tuple[float, str, Kind],
    index: int = 0,
    sent: float = 0.0,
    tokens: int | None = None,
    counted: bool = False,
    reasoning: int | None = None,
    accepted: int | None = None,
    prompt: int = 10,
    failure: Failure | None = None,
    name: str = "",
) -> TimedAnswer:
    """An answer with chunks of (time, text, kind). tokens: count in usage; counted: every event reports one token."""
    usage = Usage(prompt_tokens=prompt, completion_tokens=tokens, reasoning_tokens=reasoning, accepted_tokens=accepted)
    return TimedAnswer(
        index=index,
        ask=LoadRequest(max_tokens=100, text="", prompt_tokens=prompt, name=name),
        planned=sent,
        connected=sent,
        sent=sent,
        end=max([sent, *(at for at, _, _ in chunks)]),
        chunks=tuple(
            StreamChunk(at=at, kind=kind, characters=len(text), tokens=1 if counted else None)
            for at, text, kind in chunks
        ),
        text="".join(text for _, text, kind in chunks if kind == "answer"),
        thinking="".join(text for _, text, kind in chunks if kind == "thinking"),
        usage=usage,
        failure=failure,
        error=None if failure is None else f"it {failure}",
    )


def steady(
    first: float, gap: float, tokens: int, *, index: int = 0, sent: float = 0.0, thought: int = 0
) -> TimedAnswer:
    """One token an event: the first after `first` seconds, then one every `gap`; the first `thought` are thinking."""
    kinds: list[Kind] = ["thinking" if at < thought else "answer" for at in range(tokens)]
    chunks: list[tuple[float, str, Kind]] = [(sent + first + gap * at, "ab ", kind) for at, kind in enumerate(kinds)]
    return answer(*chunks, index=index, sent=sent, tokens=tokens)


def run(*answers: TimedAnswer, seconds: float = 10.0, stopped: bool = False, cpu_share: float = 0.1) -> LoadRun:
    """A run of these answers."""
    generator = GeneratorLoad(cpu_share=cpu_share, lag_p50=0.0, lag_p99=0.001, lag_most=0.002, late_sends=0)
    return LoadRun(began=0.0, seconds=seconds, answers=answers, generator=generator, stopped=stopped)
