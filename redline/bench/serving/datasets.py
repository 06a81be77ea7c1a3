"""Datasets of prompts, with the names of `vllm bench serve`: random, conversations from a file, Redline's own sets.

The same configuration, seed and vocabulary give the same prompts. Lengths are in tokens of the text alone: a chat
template adds tokens of its own, which the server's usage includes.
"""

import gzip
import math
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from redline import clock
from redline.bench.serving.records import LoadRequest
from redline.bench.serving.texts import RandomTexts, RandomWords
from redline.bench.serving.vocabulary import TextTokenizer, TextVocabulary
from redline.chat.lines import NOT_JSON
from redline.errors import ConfigError
from redline.messages.base import Record

Name = Literal["random", "sharegpt", "custom", "prefix_repetition", "redline"]
NAMES: tuple[str, ...] = ("random", "sharegpt", "custom", "prefix_repetition", "redline")
# Backends that send plain text; all others send messages.
COMPLETIONS = frozenset({"openai", "openai-completions", "vllm", "sglang", "lmdeploy", "scalellm"})

_OUTPUT_LEN = 256  # tokens per answer if a line does not set output_tokens, as in vLLM
_UNIQUE = 8  # random words at the start of a prompt, so that prompts share no more cache pages than intended
_CHECKED = 4  # number of random prompts that are tokenized again to verify their lengths
_LONG = 300_000  # characters: Kimi's tokenizer splits longer texts anywhere, which may add some tokens
_SHOWN_AFTER_S = 2.0
# Limits in tokens by which vLLM filters ShareGPT: least prompt or reply, most prompt, most prompt plus reply.
_LEAST, _MOST_PROMPT, _MOST_WHOLE = 4, 1024, 2048
_LINE_OF = {
    "sharegpt": '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
    "custom": '{"prompt": "...", "output_tokens": 100} or {"messages": [{"role": "user", "content": "..."}]}',
    "redline": '{"kind": "...", "messages": [{"role": "user", "content": "..."}]}',
}


class DatasetConfig(Record, frozen=True):
    """The prompts, their number and their lengths in tokens; the fields are vLLM's flags.

    dataset_path: a file, or for redline also a folder of .jsonl files. random_range_ratio: r; lengths of input and
    output are uniform in [L (1 - r), L (1 + r)], or in [L (1 - r), L] if random_range is "below", as in InferenceX.
    random_prefix_len: additional tokens, the same at the start of every prompt. sharegpt_output_len: None: the length
    of the reply. custom_output_len: None: the line's output_tokens, else 256; -1: the line's, which is then required;
    applies to the redline sets too. disable_shuffle: keep the order of the file. no_oversample: a file with too few
    prompts is not repeated. backend: decides whether a prompt is text (`COMPLETIONS`) or a user message.
    """

    dataset_name: Name = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_range: Literal["around", "below"] = "around"
    random_prefix_len: int = 0
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = None
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    seed: int = 0
    ignore_eos: bool = False
    disable_shuffle: bool = False
    no_oversample: bool = False
    backend: str = "openai-chat"


def asks(
    config: DatasetConfig,
    vocabulary: TextTokenizer | None,
    note: Callable[[str], None] | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> list[LoadRequest]:
    """The requests of a load: num_prompts of them, or fewer with no_oversample.

    vocabulary: None: lengths are approximate and prompt_tokens is None; a tokenizer without a vocabulary, such as the
    server's, gives exact lengths too. note: called with each remark for readers of
    the result. watch: called with (done, total) if creating them takes more than two seconds. Raises ConfigError naming
    the flag, or file, line, field and fix.
    """
    _check(config)
    return _Maker(config, vocabulary, note or _unheard, watch).made()


def _unheard(line: str) -> None:
    """The default `note`: does nothing."""


def _check(config: DatasetConfig) -> None:
    if config.dataset_name not in NAMES:
        raise ConfigError(f"--dataset-name {config.dataset_name}: expected one of {', '.join(NAMES)}")
    least = {
        "num_prompts": 1,
        "random_input_len": 0 if config.random_prefix_len > 0 else 1,
        "random_output_len": 1,
        "random_prefix_len": 0,
        "prefix_repetition_prefix_len": 0,
        "prefix_repetition_suffix_len": 1,
        "prefix_repetition_num_prefixes": 1,
        "prefix_repetition_output_len": 1,
    }
    for field, low in least.items():
        if getattr(config, field) < low:
            raise ConfigError(f"{_flag(field)} {getattr(config, field)}: must be at least {low}")
    if not 0 <= config.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {config.random_range_ratio}: must be in [0, 1)")
    if config.sharegpt_output_len is not None and config.sharegpt_output_len < 1:
        raise ConfigError(f"--sharegpt-output-len {config.sharegpt_output_len}: must be at least 1")
    if config.custom_output_len is not None and config.custom_output_len < 1 and config.custom_output_len != -1:
        raise ConfigError(
            f"--custom-output-len {config.custom_output_len}: must be at least 1, or -1 for each line's own"
        )
    if config.dataset_name in _LINE_OF and not config.dataset_path:
        fix = " such as models/kimi-nano/eval" if config.dataset_name == "redline" else ""
        raise ConfigError(f"--dataset-name {config.dataset_name} needs --dataset-path, a file of prompts{fix}")
    if config.dataset_name == "prefix_repetition" and config.num_prompts < config.prefix_repetition_num_prefixes:
        raise ConfigError(
            f"--num-prompts {config.num_prompts}: must be at least --prefix-repetition-num-prefixes, "
            f"{config.prefix_repetition_num_prefixes}"
        )


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


class _Turn(Record, frozen=True, kw_only=True, forbid_unknown_fields=False):
    speaker: str = msgspec.field(name="from", default="")
    value: str


class _Conversation(Record, frozen=True, forbid_unknown_fields=False):
    conversations: tuple[_Turn, ...]


class _Custom(Record, frozen=True, forbid_unknown_fields=False):
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    output_tokens: int | None = None


class _Question(Record, frozen=True, forbid_unknown_fields=False):
    kind: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    thinking: bool | None = None


class _Maker:
    def __init__(
        self,
        config: DatasetConfig,
        vocabulary: TextTokenizer | None,
        note: Callable[[str], None],
        watch: Callable[[int, int], None] | None,
    ) -> None:
        self._config, self._vocabulary, self._note, self._watch = config, vocabulary, note, watch
        self._began = clock.monotonic()

    def made(self) -> list[LoadRequest]:
        match self._config.dataset_name:
            case "random":
                return self._random()
            case "prefix_repetition":
                return self._prefixes()
            case "sharegpt":
                return self._full(self._conversations())
            case "custom":
                return self._full(self._custom())
            case "redline":
                return self._full(self._questions())

    def _random(self) -> list[LoadRequest]:
        config = self._config
        texts = self._texts()
        length, ratio = (
            config.random_input_len - (self._vocabulary.added if self._vocabulary else 0),
            config.random_range_ratio,
        )
        if config.random_prefix_len + math.floor(max(0, length) * (1 - ratio)) < 1:
            raise ConfigError(
                f"--random-input-len {config.random_input_len}: with --random-range-ratio {ratio} some prompts would "
                "have no token; use a higher value"
            )
        prefix = texts.opening(config.random_prefix_len, self._draw("prefix"))
        made: list[LoadRequest] = []
        for index in range(config.num_prompts):
            draw = self._draw("prompt", index)
            own = self._length(max(0, length), draw)
            text = self._fresh(texts, prefix, own, draw)
            tokens = config.random_prefix_len + own
            made.append(self._ask(text, max(1, self._length(config.random_output_len, draw)), tokens))
            self._show(len(made))
        return self._counted(made)

    def _prefixes(self) -> list[LoadRequest]:
        config = self._config
        texts = self._texts()
        each = config.num_prompts // config.prefix_repetition_num_prefixes
        prefix_len = config.prefix_repetition_prefix_len
        made: list[LoadRequest] = []
        for number in range(config.prefix_repetition_num_prefixes):
            draw = self._draw("prefix", number)
            prefix = self._fresh(texts, "", prefix_len, draw)
            for index in range(each):
                draw = self._draw("suffix", number, index)
                text = self._fresh(texts, prefix, config.prefix_repetition_suffix_len, draw)
                tokens = prefix_len + config.prefix_repetition_suffix_len
                made.append(self._ask(text, config.prefix_repetition_output_len, tokens, name=f"prefix {number}"))
                self._show(len(made))
        if len(made) < config.num_prompts:
            self._note(f"{len(made)} prompts instead of {config.num_prompts}: every prefix has the same number")
        if not config.disable_shuffle:
            self._draw("order").shuffle(made)
        return self._counted(made)

    def _texts(self) -> RandomTexts | RandomWords:
        if self._vocabulary is None:
            self._note("lengths of prompts are approximate: without --tokenizer their tokens are not counted")
        elif isinstance(self._vocabulary, TextVocabulary):
            return RandomTexts(self._vocabulary)
        return RandomWords(self._vocabulary)

    def _fresh(self, texts: RandomTexts | RandomWords, prefix: str, tokens: int, draw: random.Random) -> str:
        unique = min(_UNIQUE, tokens)
        head = texts.more(unique, draw) if prefix else texts.opening(unique, draw)
        return prefix + head + texts.stretch(tokens - unique, draw)

    def _length(self, length: int, draw: random.Random) -> int:
        ratio = self._config.random_range_ratio
        most = math.ceil(length * (1 + ratio)) if self._config.random_range == "around" else length
        return draw.randint(math.floor(length * (1 - ratio)), most)

    def _counted(self, made: list[LoadRequest]) -> list[LoadRequest]:
        """Recounts the tokens of very long prompts, and of all if the vocabulary merges across words."""
        if self._vocabulary is None:
            return made
        short = [ask for ask in made if len(_text_of(ask)) <= _LONG]
        some = self._draw("checked").sample(short, min(_CHECKED, len(short)))
        if all(self._count(_text_of(ask)) == ask.prompt_tokens for ask in some):
            return [ask if len(_text_of(ask)) <= _LONG else self._known(ask) for ask in made]
        self._note(f"lengths of prompts are approximate (counted): {self._vocabulary.name} merges across words")
        return [self._known(ask) for ask in made]

    def _conversations(self) -> Iterator[LoadRequest]:
        config = self._config
        entries = [
            (turns[0].value, turns[1].value)
            for _, one in _entries(Path(config.dataset_path or ""), _Conversation, "sharegpt")
            if len(turns := _from_human(one.conversations)) > 1
        ]
        self._shuffle(entries)
        if self._vocabulary is None:
            self._note("lengths of conversations are estimated from their words, since --tokenizer was not given")
        for prompt, reply in entries:
            tokens = self._count(prompt)
            output = config.sharegpt_output_len or self._count(reply)
            short = tokens < _LEAST or (config.sharegpt_output_len is None and output < _LEAST)
            if not (short or tokens > _MOST_PROMPT or tokens + output > _MOST_WHOLE):
                yield self._ask(prompt, output, tokens, name="sharegpt")

    def _custom(self) -> Iterator[LoadRequest]:
        path = Path(self._config.dataset_path or "")
        made: list[LoadRequest] = []
        for place, line in _entries(path, _Custom, "custom"):
            if (line.prompt is None) == (line.messages is None):
                raise ConfigError(f"{path}, {place}: expected one of `prompt` and `messages`: {_LINE_OF['custom']}")
            if line.output_tokens is not None and line.output_tokens < 1:
                raise ConfigError(f"{path}, {place}: `output_tokens` is {line.output_tokens}; must be at least 1")
            if line.output_tokens is None and self._config.custom_output_len == -1:
                raise ConfigError(
                    f"{path}, {place}: `output_tokens` is missing, but --custom-output-len -1 requires it in every line"
                )
            output = self._output(line.output_tokens)
            if line.prompt is not None:
                made.append(self._ask(line.prompt, output, None, tools=line.tools))
            else:
                made.append(self._said(line.messages or (), output, f"{path}, {place}", tools=line.tools))
        self._shuffle(made)
        for ask in made:
            yield self._known(ask)

    def _questions(self) -> Iterator[LoadRequest]:
        """Prompts of all kinds in turn, so that the kinds are equally frequent as far as their lines allow."""
        path = Path(self._config.dataset_path or "")
        paths = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not paths:
            raise ConfigError(
                f"--dataset-path {path}: contains no .jsonl file; name a file of prompts, or their folder"
            )
        kinds: dict[str, list[LoadRequest]] = {}
        for path in paths:
            for place, line in _entries(path, _Question, "redline"):
                extra = {} if line.thinking is None else {"chat_template_kwargs": {"thinking": line.thinking}}
                ask = self._said(line.messages, self._output(None), f"{path}, {place}", line.kind, line.tools, extra)
                kinds.setdefault(line.kind, []).append(ask)
        for those in kinds.values():
            self._shuffle(those)
        for turn in range(max(map(len, kinds.values()), default=0)):
            for those in kinds.values():
                if turn < len(those):
                    yield self._known(those[turn])

    def _full(self, found: Iterator[LoadRequest]) -> list[LoadRequest]:
        """The first num_prompts prompts of a file; if it has fewer, some are repeated."""
        config, path = self._config, self._config.dataset_path
        made: list[LoadRequest] = []
        for ask in found:
            made.append(ask)
            self._show(len(made))
            if len(made) == config.num_prompts:
                return made
        if not made:
            raise ConfigError(
                f"--dataset-path {path}: contains no usable prompt; expected lines like {_LINE_OF[config.dataset_name]}"
            )
        if config.no_oversample:
            self._note(f"{len(made)} prompts instead of {config.num_prompts}: {path} has no more")
            return made
        self._note(
            f"{path} has {len(made)} prompts: some are repeated to reach {config.num_prompts}, "
            "and will hit the prefix cache"
        )
        return made + self._draw("again").choices(made, k=config.num_prompts - len(made))

    def _output(self, line: int | None) -> int:
        asked = self._config.custom_output_len
        return asked if asked is not None and asked > 0 else line or _OUTPUT_LEN

    def _said(
        self,
        messages: Sequence[dict[str, Any]],
        output: int,
        place: str,
        name: str = "",
        tools: tuple[dict[str, Any], ...] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> LoadRequest:
        if self._config.backend in COMPLETIONS:
            raise ConfigError(f"{place}: `messages` need a chat API; use --backend openai-chat")
        if not messages or not all(isinstance(message.get("role"), str) for message in messages):
            raise ConfigError(f"{place}: `messages` needs at least one message, and `role` in each")
        extra = {**(extra or {}), **self._extra()}
        return LoadRequest(max_tokens=output, messages=tuple(messages), name=name, tools=tools, extra=extra)

    def _ask(
        self,
        text: str,
        output: int,
        tokens: int | None,
        name: str = "",
        tools: tuple[dict[str, Any], ...] | None = None,
    ) -> LoadRequest:
        bare = self._config.backend in COMPLETIONS
        return LoadRequest(
            max_tokens=output,
            text=text if bare else None,
            messages=None if bare else ({"role": "user", "content": text},),
            prompt_tokens=tokens if self._vocabulary else None,
            name=name,
            tools=tools,
            extra=self._extra(),
        )

    def _extra(self) -> dict[str, Any]:
        return {"ignore_eos": True} if self._config.ignore_eos else {}

    def _known(self, ask: LoadRequest) -> LoadRequest:
        """Adds the number of prompt tokens, if there is a vocabulary."""
        if self._vocabulary is None:
            return ask
        return msgspec.structs.replace(ask, prompt_tokens=self._count(_text_of(ask)))

    def _count(self, text: str) -> int:
        return (
            len(self._vocabulary.encode(text)) if self._vocabulary else math.ceil(len(re.findall(r"\w+|[^\w\s]", text)))
        )

    def _shuffle(self, those: list[Any]) -> None:
        if not self._config.disable_shuffle:
            self._draw("order").shuffle(those)

    def _draw(self, *what: str | int) -> random.Random:
        return random.Random(" ".join(map(str, (self._config.seed, *what))))

    def _show(self, done: int) -> None:
        if self._watch is not None and clock.monotonic() - self._began > _SHOWN_AFTER_S:
            self._watch(done, self._config.num_prompts)


def _from_human(turns: Sequence[_Turn]) -> Sequence[_Turn]:
    """The turns from the first human one on; all turns if they do not name a speaker."""
    first = (number for number, turn in enumerate(turns) if turn.speaker in ("human", "user", ""))
    return turns[next(first, len(turns)) :]


def _text_of(ask: LoadRequest) -> str:
    if ask.text is not None:
        return ask.text
    said = [message.get("content") for message in ask.messages or ()]
    return "".join(content if isinstance(content, str) else "" for content in said)


_Line = TypeVar("_Line")


def _entries(path: Path, kind: type[_Line], dataset: str) -> Iterator[tuple[str, _Line]]:
    """Each entry of a JSON list or of JSONL, .gz or plain, with its place, such as "line 3"."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"--dataset-path {path}: cannot be read ({error}); name a file of prompts") from None
    if data.lstrip()[:1] == b"[":
        try:
            entries: list[msgspec.Raw] = msgspec.json.decode(data, type=list[msgspec.Raw])
        except NOT_JSON as error:
            raise ConfigError(f"--dataset-path {path}: is not a JSON list ({error}); fix it, or use JSONL") from None
        places = ((f"entry {number}", entry) for number, entry in enumerate(entries, 1))
    else:
        lines = enumerate(data.split(b"\n"), 1)
        places = ((f"line {number}", line) for number, line in lines if line.strip())
    decoder = msgspec.json.Decoder(kind)
    for place, entry in places:
        try:
            yield place, decoder.decode(entry)
        except NOT_JSON as error:
            raise ConfigError(f"{path}, {place}: {error}; expected {_LINE_OF[dataset]}") from None
