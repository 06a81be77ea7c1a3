"""Turns the engine's deltas into the events of an answer: one Decoder per job, fed in order.

It holds the state between deltas: bytes of an incomplete character, text that may become a stop string, the parser's
state, the counts. The concatenated events do not depend on how the tokens are split into deltas.
"""

from collections.abc import Sequence

from redline.chat.events import End, Event, Logprobs, Text, Thought
from redline.chat.parser import AnswerReader, Parser, PlainText
from redline.chat.shown import Shown, shown
from redline.chat.stops import StopStrings
from redline.chat.tokenizer import Tokenizer
from redline.messages.delta import Delta, Finish
from redline.messages.step import TokenLogprobs


class Decoder:
    """Reads the deltas of one job.

    - `stopped` turns True when a stop string was found, or the last permitted call has ended: the answer is over, and
      the engine does not know it yet.
    - `prompt_logprobs` contains the prompt's log probabilities from all deltas so far, in order of position.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool,
        stop: tuple[str, ...],
        stop_ids: tuple[int, ...],
        prompt_tokens: int,
        parse: bool,
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        most_calls: int | None = None,
        min_tokens: int = 0,
        image_tokens: int = 0,
    ) -> None:
        """Arguments:

        - `thinking`: the answer opens with reasoning (Style.thinks).
        - `stop`: strings that end the visible text. `stop_ids`: those of the job's Sampling.
        - `prompt_tokens`, `image_tokens`: the number of prompt tokens, and those of images; the End repeats them.
        - `parse`: read Kimi's chat format; False for raw completions, where everything is text.
        - `include_stop_str`: include the stop string or stop token that ended the answer in the text.
        - `skip_special_tokens`: control tokens have no text, except those that the checkpoint declares not special
          (`<think>` and the tool-call marks): a raw completion shows them. In a chat they are read as marks, not shown.
        - `most_calls`: end the answer after this number of tool calls, as if the model had ended it there; 0: end it
          when a call begins.
        - `min_tokens`: ignore stop strings before this number of tokens, as in vLLM.
        """
        skipped = tokenizer.skipped if skip_special_tokens else frozenset[int]()
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop)
        self._reader: AnswerReader = (
            Parser(tokenizer, thinking, self._stops, skipped, most_calls)
            if parse
            else PlainText(tokenizer, self._stops, skipped)
        )
        self._texts, self._thoughts = shown(tokenizer)
        self._steady: Shown | None = None  # table of plain tokens' events, while the reader need not see them
        self._stop_ids = frozenset(stop_ids)
        self._include_stop = include_stop_str
        self._prompt_tokens = prompt_tokens
        self._image_tokens = image_tokens
        self._min_tokens = min_tokens
        self._completion_tokens = 0
        self._accepted_tokens = 0
        self._rejected_tokens = 0
        self._ended = False
        self.stopped = False
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def calls(self) -> int:
        """The number of tool calls that have begun."""
        return self._reader.calls

    def push(self, delta: Delta) -> Sequence[Event]:
        """The events of a delta, with the End last if the answer ends in it; no events after the end."""
        if self._steady is not None and delta.finish is None and not (delta.logprobs or delta.prompt_logprobs):
            tokens = delta.tokens
            events = self._steady[tokens[0]] if len(tokens) == 1 else self._join(tokens)
            if events:
                self._completion_tokens += len(tokens)
                if self._steady is self._thoughts:
                    self._reader.reasoning_tokens += len(tokens)
                if delta.proposed:
                    self._accepted_tokens += min(delta.accepted, len(tokens))
                    self._rejected_tokens += delta.proposed - delta.accepted
                return events
        return self._read(delta)

    def _join(self, tokens: Sequence[int]) -> Sequence[Event]:
        """One event with the text of all the tokens; no event unless all tokens are plain text."""
        assert self._steady is not None
        pieces = [self._steady[token] for token in tokens]
        if not all(pieces):
            return ()
        text = "".join(piece[0].text for piece in pieces if piece)
        return (Thought(text=text) if self._steady is self._thoughts else Text(text=text),) if text else ()

    def _read(self, delta: Delta) -> list[Event]:
        if self._ended:
            return []
        self.prompt_logprobs += delta.prompt_logprobs
        tokens = delta.tokens
        stop_id = tokens[-1] if delta.finish == "stop" and tokens and tokens[-1] in self._stop_ids else None
        visible = tokens if stop_id is None or self._include_stop else tokens[:-1]
        events: list[Event] = []
        read = 0
        for token in visible:
            read += 1
            self._stops.looks = self._completion_tokens + read >= self._min_tokens
            self._reader.push(token, events)
            if self._stops.found is not None or self._reader.over:
                break

        kind = self._reader.steady()
        self._steady = None if kind is None else self._texts if kind is Text else self._thoughts
        cut = self._stops.found is not None or self._reader.over
        if cut or delta.finish is not None:
            self._reader.finish(events, complete=cut or delta.finish == "stop")
        if (found := self._stops.found) is not None and self._include_stop:
            events.append(Text(text=found))
        if delta.logprobs and read:
            pairs = zip(delta.logprobs[:read], visible, strict=False)
            events.append(Logprobs(items=tuple((one, self._tokenizer.token_bytes(token)) for one, token in pairs)))
        counted = read if cut or found is not None else len(tokens)
        self._completion_tokens += counted
        self._accepted_tokens += min(delta.accepted, counted)  # a stop string may cut off accepted draft tokens
        self._rejected_tokens += delta.proposed - delta.accepted
        if cut or found is not None:
            self.stopped = True
            events.append(self._end("stop", delta, found))
        elif delta.finish is not None:
            # Do not report the model's own stop token: only a stop that the client configured.
            named = None if stop_id in self._tokenizer.stop_ids else stop_id
            events.append(self._end(delta.finish, delta, named))
        return events

    def _end(self, finish: Finish, delta: Delta, stop: str | int | None) -> End:
        self._ended = True
        self._steady = None
        return End(
            finish=finish,
            prompt_tokens=self._prompt_tokens,
            image_tokens=self._image_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=delta.cached_tokens,
            reasoning_tokens=self._reader.reasoning_tokens,
            accepted_tokens=self._accepted_tokens,
            rejected_tokens=self._rejected_tokens,
            tool_calls=self._reader.calls,
            stop=stop,
            error=delta.error,
        )
