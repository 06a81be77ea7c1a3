"""Answers made by hand, with times that one can work out on paper."""

from typing import Any

from redline.bench.serving.records import GeneratorLoad, Kind, LoadRequest, LoadRun, StreamChunk, TimedAnswer, Usage

IDLE = GeneratorLoad(cpu_share=0.1, lag_p50=0.0001, lag_p99=0.0004, lag_most=0.002, late_sends=0)


def answer(
    index: int = 0,
    *,
    planned: float = 0.0,
    sent: float | None = None,
    at: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9),
    kinds: str = "",
    tokens: tuple[int | None, ...] = (),
    text: str = "abcde",
    thinking: str = "",
    usage: Usage | None = None,
    max_tokens: int = 64,
    prompt_tokens: int | None = 10,
    finish: str = "stop",
    extra: dict[str, Any] | None = None,
    **more: Any,
) -> TimedAnswer:
    """at: seconds from `sent` to each chunk. kinds: a letter for each chunk, a, t or c; default: all answer chunks."""
    begun = planned if sent is None else sent
    names: dict[str, Kind] = {"a": "answer", "t": "thinking", "c": "tool"}
    rows = zip(at, kinds or "a" * len(at), tokens or (None,) * len(at), strict=True)
    chunks = tuple(StreamChunk(at=begun + after, kind=names[kind], characters=1, tokens=n) for after, kind, n in rows)
    return TimedAnswer(
        index=index,
        ask=LoadRequest(max_tokens=max_tokens, text="prompt", prompt_tokens=prompt_tokens, extra=extra or {}),
        planned=planned,
        sent=begun,
        end=chunks[-1].at + 0.05 if chunks else begun + 0.05,
        chunks=chunks,
        text=text,
        thinking=thinking,
        usage=usage or Usage(prompt_tokens=prompt_tokens, completion_tokens=len(at)),
        finish=finish,
        status=200,
        **more,
    )


def run(*answers: TimedAnswer, seconds: float = 2.0, stopped: bool = False) -> LoadRun:
    return LoadRun(began=1_700_000_000.0, seconds=seconds, answers=answers, generator=IDLE, stopped=stopped)
