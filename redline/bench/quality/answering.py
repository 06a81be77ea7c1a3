"""Answers chat prompts with a loaded engine in this process, all concurrently.

Uses the same chat template, batching and parser as the API, without HTTP.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from redline.bench.quality.prompts import EvalPrompt, ModelAnswer
from redline.chat.conversation import Conversation
from redline.chat.decoder import Decoder
from redline.chat.events import CallArguments, CallBegin, End, Event, Logprobs, Text, Thought
from redline.chat.lines import conversation
from redline.chat.page_hashes import make_job
from redline.chat.template import render
from redline.messages.delta import Delta
from redline.messages.job import Grammar, Job, JobId, MediaSpan, Sampling
from redline.worker.job_runner import JobRunner

MAX_TOKENS = 1024  # a longer answer to an evaluation prompt is a repetition loop


class Greedy:
    """Answers prompts with an engine by greedy decoding.

    max_tokens: per answer, thinking included. grammar: returns the grammar that constrains an answer, or None; None: no
    answer is constrained.
    """

    def __init__(
        self,
        engine: JobRunner,
        max_tokens: int = MAX_TOKENS,
        grammar: Callable[[EvalPrompt, Conversation], Grammar | None] | None = None,
    ) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self._grammar = grammar

    @property
    def fingerprint(self) -> str:
        """The checkpoint's fingerprint, which identifies the model and its weights in a report."""
        return self._engine.fingerprint

    def answer(
        self,
        prompts: Sequence[EvalPrompt],
        done: Callable[[], None],
        keep: Callable[[EvalPrompt, ModelAnswer], object] = lambda _prompt, _answer: None,
    ) -> list[ModelAnswer]:
        """The answers in the order of the prompts; calls `keep` and `done` once for each as it ends."""
        deltas: defaultdict[JobId, list[Delta]] = defaultdict(list)
        found: dict[JobId, ModelAnswer] = {}

        def take(delta: Delta) -> None:
            deltas[delta.job].append(delta)
            if delta.finish is not None:
                prompt, job, one = by_id[delta.job]
                found[delta.job] = self._read(job, one, deltas.pop(delta.job))
                keep(prompt, found[delta.job])
                done()

        asked = [self._engine.seen(conversation(prompt)) for prompt in prompts]
        forms = [None if self._grammar is None else self._grammar(*pair) for pair in zip(prompts, asked, strict=True)]
        jobs = [
            self._job(JobId(f"prompt-{number}"), *pair) for number, pair in enumerate(zip(asked, forms, strict=True))
        ]
        by_id = {job.id: (prompt, job, one) for prompt, job, one in zip(prompts, jobs, asked, strict=True)}
        self._engine.generate(jobs, take)
        return [found[job.id] for job in jobs]

    def _job(self, id: JobId, conversation: Conversation, grammar: Grammar | None) -> Job:
        tokenizer = self._engine.tokenizer
        media = list[MediaSpan]()
        tokens = tuple(tokenizer.encode_pieces(render(conversation, self._engine.style), media=media))
        stops = tokenizer.stop_ids
        sampling = Sampling(max_tokens=self._max_tokens, temperature=0, stop_ids=stops, grammar=grammar)
        return make_job(id, tokens, sampling, self._engine.fingerprint, media=tuple(media))

    def _read(self, job: Job, conversation: Conversation, deltas: Sequence[Delta]) -> ModelAnswer:
        decoder = Decoder(
            self._engine.tokenizer,
            thinking=self._engine.style.thinks(conversation),
            stop=(),
            stop_ids=job.sampling.stop_ids,
            prompt_tokens=len(job.tokens),
            parse=True,
        )
        return joined([event for delta in deltas for event in decoder.push(delta)])


def joined(events: Sequence[Event]) -> ModelAnswer:
    """Joins a complete stream of events into an answer. Raises AssertionError if the stream has no End."""
    content, reasoning = "", ""
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        match event:
            case Text():
                content += event.text
            case Thought():
                reasoning += event.text
            case CallBegin():
                names.append(event.name)
                arguments.append("")
            case CallArguments():
                arguments[event.index] += event.text
            case Logprobs():
                pass
            case End():
                return ModelAnswer(
                    content=content,
                    reasoning=reasoning,
                    tool_calls=tuple(zip(names, arguments, strict=True)),
                    finish=event.finish,
                    tokens=event.completion_tokens,
                )
    raise AssertionError(f"an answer without an End event, after {len(events)} events")
