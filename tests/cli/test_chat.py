"""`redline chat` as a client: its requests, its history, and its output when a server answers oddly."""

import io
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from redline.cli import main
from redline.cli.chat import Client, _Waiting, converse, talk
from redline.cli.terminal import Terminal
from redline.errors import ConfigError
from redline.progress import Working
from tests.cli.servers import CHUNKS, DONE, MODELS, Answer, Fake, says, server, stream, streams, text
from tests.waiting import LIMIT_S

SSE = "text/event-stream"


def client(url: str, **changes: Any) -> Client:
    return Client(
        **{"url": url, "key": "k", "model": None, "thinking": True, "temperature": 0.6, "system": None, **changes}
    )


def said(client: Client, *questions: str) -> str:
    """The output of a conversation, without styles."""
    screen = io.StringIO()
    console = Terminal(file=screen, width=200)
    lines: Iterator[str] = iter(questions)

    def read() -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    client.connect(print)
    converse(client, read, console)
    return screen.getvalue()


class Ended(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


Typed = Callable[..., Ended]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Typed:
    """`redline chat WORDS`, with `piped` as its standard input."""

    def run(*words: str, piped: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["redline", "chat", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, *capfd.readouterr())

    return run


def contents(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


# --------------------------------------------------------------------------------------------------------- answers


def test_a_question_is_answered_with_the_thinking_dimmed_and_the_rate_below():
    with server() as (url, asked):
        screen = io.StringIO()
        assert talk(client(url, system="Be brief."), "2 + 2?", Terminal(file=screen, force_terminal=True)) == 0
    shown = screen.getvalue()
    assert "\x1b[2mTwo \x1b[0m" in shown
    assert "It is [4]." in shown.replace("\x1b[0m", ""), "brackets are text, not markup"
    assert "7 tokens" in shown
    assert "tokens/s" in shown
    assert asked[0]["model"] == "fake"
    assert [message["role"] for message in asked[0]["messages"]] == ["system", "user"]
    assert asked[0]["chat_template_kwargs"] == {"thinking": True}


def test_a_long_prompt_is_seen_to_be_computed(monkeypatch: pytest.MonkeyPatch):
    """The progress is shown after a wait for the first token, and ends when the token arrives."""
    monkeypatch.setattr("redline.cli.chat.SHOWN_AFTER_S", 0.0)
    said, begun = io.StringIO(), threading.Event()
    monkeypatch.setattr(Working, "__enter__", lambda self: begun.set() or self)
    ended: list[object] = []
    monkeypatch.setattr(Working, "__exit__", lambda self, *_: ended.append(self))
    waiting = _Waiting(Terminal(file=said))
    assert begun.wait(LIMIT_S)
    waiting.end()
    waiting.end()
    assert len(ended) == 1


def test_a_password_of_an_address_is_sent_and_not_shown():
    sent: list[str | None] = []

    def answer(fake: Fake) -> None:
        sent.append(fake.headers["authorization"])
        says(stream(*CHUNKS), kind=SSE)(fake)

    with server(answer) as (url, _):
        asked = client(url.replace("http://", "http://user:secret@"), key=None)
        shown = asked.url + said(asked, "2 + 2?")
    assert "secret" not in shown
    assert sent == ["Basic dXNlcjpzZWNyZXQ="]


@pytest.mark.parametrize(
    ("details", "says"),
    [
        ({"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}, "6 of 8 drafts accepted (75%)"),
        ({"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}, None),
        ({"reasoning_tokens": 1, "accepted_prediction_tokens": None}, None),
        (None, None),
    ],
)
def test_acceptance_stands_below_an_answer_where_the_server_tells_it(details: dict[str, Any] | None, says: str | None):
    usage = {"choices": [], "usage": {"completion_tokens": 7, "completion_tokens_details": details}}
    with server(streams(*CHUNKS[:-1], usage)) as (url, _):
        shown = said(client(url), "2 + 2?")
    assert "7 tokens" in shown
    assert says in shown if says else "drafts" not in shown


def test_a_conversation_remembers_what_was_said_but_not_the_thinking():
    with server() as (url, asked):
        said(client(url, thinking=False), "2 + 2?", "And now?")
    assert contents(asked[1]) == [("user", "2 + 2?"), ("assistant", "It is [4]."), ("user", "And now?")]
    assert asked[0]["chat_template_kwargs"] == {"thinking": False}


def test_a_script_reads_the_answer_alone_and_the_rest_beside_it(typed: Typed):
    with server() as (url, asked):
        ours = typed("--url", url, "-", piped="2 + 2?")
    assert (ours.code, ours.out) == (0, "It is [4].\n")
    assert "Two and two." in ours.err
    assert "7 tokens" in ours.err
    assert contents(asked[0]) == [("user", "2 + 2?")]


def test_commands_are_for_the_chat(tmp_path: Path):
    file = tmp_path / "chat.json"
    with server() as (url, asked):
        shown = said(
            client(url, system="Be brief."),
            "/think off",
            "2 + 2?",
            f"/save {file}",
            "/new",
            "/system Be long.",
            "/think",
            "/etc/hosts holds what?",
            "/help",
            "/system",
            " /new York?",
        )
    assert contents(asked[0]) == [("system", "Be brief."), ("user", "2 + 2?")]
    assert [body["chat_template_kwargs"]["thinking"] for body in asked] == [False, True, True]
    assert json.loads(file.read_text()) == [*asked[0]["messages"], {"role": "assistant", "content": "It is [4]."}]
    assert contents(asked[1]) == [("system", "Be long."), ("user", "/etc/hosts holds what?")]
    assert contents(asked[2]) == [*contents(asked[1])[1:], ("assistant", "It is [4]."), ("user", " /new York?")]
    assert all(command in shown for command in ("/think on|off", "/system TEXT", "/new", "/save FILE", "/help"))


def test_images_go_with_the_next_question(tmp_path: Path):
    for name in ("a.png", "b.jpg", "c.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    with server() as (url, asked):
        shown = said(
            client(url),
            f"/image {tmp_path}/a.png",
            f"/image {tmp_path}/b.jpg",
            "2 + 2?",
            f"/image {tmp_path}/c.mp4",
            "And now?",
        )
    assert "b.jpg goes with the next question" in shown
    *pictures, text = asked[0]["messages"][0]["content"]
    assert [one["image_url"]["url"] for one in pictures] == [
        "data:image/png;base64,YS5wbmc=", "data:image/jpeg;base64,Yi5qcGc="
    ]  # fmt: skip
    assert text == {"type": "text", "text": "2 + 2?"}
    film, text = asked[1]["messages"][-1]["content"]
    assert film == {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,Yy5tcDQ="}}
    assert text["text"] == "And now?"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/image", "/image needs a file"),
        ("/image /nowhere/a.png", "/nowhere"),
        ("/quit", "'/quit' is not a command; /help lists them"),
        ("/help me", "'/help me' is not a command"),
        ("/think hard", "/think is on or off, not 'hard'"),
        ("/save", "/save needs a file"),
        ("/save /nowhere/chat.json", "/nowhere"),
    ],
)
def test_a_command_that_cannot_be_done_says_why_and_asks_nothing(line: str, why: str):
    with server() as (url, asked):
        shown = said(client(url), line, "2 + 2?")
    assert re.search(rf"error: .*{re.escape(why)}", shown)
    assert [body["messages"][-1]["content"] for body in asked] == ["2 + 2?"]


def test_an_empty_line_asks_nothing_and_does_not_leave():
    with server() as (url, asked):
        said(client(url), "", "2 + 2?", "  \n\t", "And now?")
    assert [body["messages"][-1]["content"] for body in asked] == ["2 + 2?", "And now?"]


def test_a_refused_question_is_said_and_forgotten():
    def answer(fake: Fake) -> None:
        if fake.asked[-1]["messages"][-1]["content"] == "no":
            fake.say(json.dumps({"error": {"message": "messages: not that"}}), 400)
        else:
            fake.say(stream(*CHUNKS))

    with server(answer) as (url, asked):
        shown = said(client(url), "no", "2 + 2?")
    assert "error: 400: messages: not that" in shown
    assert contents(asked[1]) == [("user", "2 + 2?")]


@pytest.mark.parametrize(
    ("begun", "remembered"),
    [
        ([{"content": "It "}, {"content": "is"}], [("user", "one"), ("assistant", "It is"), ("user", "two")]),
        ([{"reasoning": "Hm."}], [("user", "two")]),
        ([], [("user", "two")]),
    ],
)
@pytest.mark.parametrize("how", ["error", "closed", "interrupted"])
def test_after_a_broken_answer_no_question_stands_without_one(
    monkeypatch: pytest.MonkeyPatch, begun: list[dict[str, str]], remembered: list[tuple[str, str]], how: str
):
    chunks = "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in begun)

    def answer(fake: Fake) -> None:
        if len(fake.asked) > 1:
            fake.say(stream(*text("four")))
        elif how == "error":
            fake.say(chunks + f"data: {json.dumps({'error': {'message': 'the worker has ended'}})}\n\n")
        else:
            fake.say(chunks, length=len(chunks) + 1)

    with server(answer) as (url, asked):
        one = client(url)
        if how == "interrupted":  # the same for Ctrl-C at any point of the stream
            ask = one.ask

            def interrupted(text: str) -> Iterator[Any]:
                try:
                    yield from ask(text)
                except ConfigError:
                    raise KeyboardInterrupt from None

            monkeypatch.setattr(one, "ask", interrupted)
        shown = said(one, "one", "two")
    assert contents(asked[1]) == remembered
    assert ("(the question is forgotten)" in shown) == (len(remembered) == 1)
    assert "four" in shown


# ------------------------------------------------------------------------------------------------- odd servers

EVENT = "data: %s\n\n"


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (says("<html><body>It works!</body></html>", kind="text/html"), "not the response of an OpenAI server.*<html>"),
        (says("[]"), "not the response of an OpenAI server"),
        (says('{"data": [{"name": "x"}]}'), "not the response of an OpenAI server"),
        (says("[" * 100_000), "not the response of an OpenAI server"),
        (says(b"\xff\xfe\x00"), "not the response of an OpenAI server"),
        (says(""), "not the response of an OpenAI server"),
        (says('{"data": []}'), "lists no model; name one with --model"),
        (says('{"error": {"message": "no key was given"}}', 401), "401: no key was given .*--key"),
        (says('{"error": "slow down"}', 429), "429: slow down .*try again"),
        (says("<h1>Not Found</h1>", 404), "404: <h1>Not Found</h1> .*check that --url"),
        (says("", 301), "301: .*it has moved"),
        (says("", 500), "500: nothing"),
        (says("short", length=100), "no server at .* start one with `redline serve FOLDER`"),
        (lambda fake: fake.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n"), "no server at"),
        (lambda fake: None, "no server at"),
    ],
)
def test_a_list_of_models_that_is_none_is_one_clear_line(models: Answer, words: str):
    with server(models=models) as (url, _), pytest.raises(ConfigError, match=words) as caught:
        client(url).connect(print)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says("<html>It works!</html>", kind="text/html"), "did not respond with a stream of events: <html>It works!"),
        (says('{"choices": [{"message": {"content": "hi"}}]}'), "did not respond with a stream of events"),
        (says(""), "closed the connection before the end of the answer"),
        (says(EVENT % "{"), "stream cannot be read"),
        (says(EVENT % "[]"), "stream cannot be read"),
        (says(EVENT % '{"choices": [7]}'), "stream cannot be read"),
        (says(EVENT % '{"choices": [{"delta": {"content": ["x"]}}]}'), "stream cannot be read"),
        (says(EVENT % ("[" * 100_000)), "stream cannot be read"),
        (says(b"data: \xff\xfe\n\n"), "stream cannot be read"),
        (says("data: " + "x" * 5_000_000), "a line of more than 4,194,304 bytes"),
        (says(EVENT % '{"error": {"message": "out of\\nluck", "code": 500}}'), "out of luck"),
        (says(EVENT % '{"error": {"code": 500}}'), "'code': 500"),
        (says(EVENT % '{"error": "busy"}'), "busy"),
        (
            says(EVENT % '{"choices": [{"delta": {"content": "x"}}]}'),
            "closed the connection before the end of the answer",
        ),
        (says(EVENT % '{"choices": []}', length=500), "broke"),
        (says('{"error": {"message": "no key"}}', 401), "401: no key .*--key"),
        (says('{"error": {"message": "queue full"}}', 503), "503: queue full .*try again"),
        (lambda fake: None, "broke"),
    ],
)
def test_an_answer_that_is_none_is_one_clear_line(answer: Answer, words: str):
    with server(answer) as (url, _), pytest.raises(ConfigError, match=words) as caught:
        talk(client(url), "hi", Terminal(file=io.StringIO()))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "chunks",
    [
        '{"choices": []}',
        "{}",
        '{"choices": null}',
        '{"choices": [{}]}',
        '{"choices": [{"delta": null}]}',
        '{"choices": [{"delta": {"content": null, "tool_calls": null}}], "usage": null}',
        '{"choices": [{"delta": {"tool_calls": [{}]}}]}',
        '{"choices": [], "usage": {}}',
    ],
)
def test_chunks_that_say_nothing_are_passed_over(chunks: str):
    with server(says(EVENT % chunks + stream(*text("fine")))) as (url, _):
        assert "fine" in said(client(url), "hi")


def test_lines_end_as_the_protocol_says_and_not_where_text_has_a_separator():
    pieces = "a\u2028b\u2029c\u0085d"
    event = json.dumps({"choices": [{"delta": {"content": pieces}}]}, ensure_ascii=False)
    with server(says(f": a comment\r\n\r\nevent: chunk\r\ndata:{event}\r\n\r\n{DONE}")) as (url, asked):
        said(client(url), "one", "two")
    assert contents(asked[1])[1] == ("assistant", pieces)


def test_a_server_that_loads_is_waited_for():
    times = iter(range(3))

    def models(fake: Fake) -> None:
        loading = next(times) < 2
        fake.say('{"error": {"message": "loading the model"}}' if loading else MODELS, 503 if loading else 200)

    told: list[str] = []
    waited: list[float] = []
    with server(models=models) as (url, _):
        assert client(url).connect(told.append, waited.append) == "fake"
    assert waited == [1, 1]
    assert len(told) == 1
    assert "loading the model" in told[0]


def test_a_server_that_loads_for_ever_is_given_up():
    waited: list[float] = []
    with server(models=says("", 503)) as (url, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.cli.chat.LOADING_S", 3)
        with pytest.raises(ConfigError, match="503"):
            client(url).connect(print, waited.append)
    assert len(waited) == 3


def test_nobody_there():
    with pytest.raises(ConfigError, match="start one with `redline serve FOLDER`"):
        talk(client("http://127.0.0.1:9"), "hi", Terminal(file=io.StringIO()))


# --------------------------------------------------------------------------------------------------------- address


@pytest.mark.parametrize("spelling", ["http://{}", "{}", "http://{}/", "{}/v1", "http://{}/v1/", " {}/v1/models "])
def test_an_address_may_be_spelled_as_people_do(spelling: str):
    with server() as (url, asked):
        talk(client(spelling.format(url.removeprefix("http://"))), "hi", Terminal(file=io.StringIO()))
    assert asked


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://x", "http://x:99999", "http://x:0", "http://[::1", "http://a b\x00", "file:///etc"]
)
def test_what_is_no_address_is_said(url: str):
    with pytest.raises(ConfigError, match="expected an address such as"):
        client(url)


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with server() as (url, _):
        assert client(url).connect(print) == "fake"


@pytest.mark.parametrize("changes", [{"key": "schlüssel"}, {"key": "a\nb"}, {"temperature": float("nan")}])
def test_a_flag_that_no_server_could_be_asked_with_is_said(changes: dict[str, Any]):
    with pytest.raises(ConfigError, match=f"--{next(iter(changes))}"):
        client("x", **changes)


def test_without_a_key_none_is_sent(typed: Typed, monkeypatch: pytest.MonkeyPatch):
    headers: list[str | None] = []

    def models(fake: Fake) -> None:
        headers.append(fake.headers["authorization"])
        fake.say(MODELS)

    with server(models=models) as (url, _):
        client(url, key=None).connect(print)
        client(url, key="secret").connect(print)
        monkeypatch.setenv("REDLINE_API_KEY", "from-the-environment")
        assert typed("--url", url, "hi").code == 0
    assert headers == [None, "Bearer secret", "Bearer from-the-environment"]


# ------------------------------------------------------------------------------------------------- foreign text


def test_no_control_character_of_a_server_reaches_the_terminal(typed: Typed):
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\x7f\x00[/bold][red]:smile:"
    chunk = {"choices": [{"delta": {"reasoning": evil}}, {}]}
    call = {"choices": [{"delta": {"tool_calls": [{"function": {"name": evil, "arguments": evil}}]}}]}
    answer = streams(chunk, call, {"choices": [{"delta": {"content": evil + "\nline\tend"}, "finish_reason": "stop"}]})
    with server(answer, says(json.dumps({"data": [{"id": evil}]}))) as (url, _):
        ours = typed("--url", url, "hi")
    shown = ours.out + ours.err
    assert ours.code == 0, ours.err
    assert not [letter for letter in shown if (ord(letter) < 32 and letter != "\n") or 127 <= ord(letter) < 160]
    assert shown.count("[/bold][red]:smile:") == 4
    assert "\\x1b]52;c;aGk=" in shown


def test_no_control_character_of_an_error_reaches_the_terminal(typed: Typed):
    with server(says('{"error": {"message": "\\u001b[2Jno [/bold]"}}', 400)) as (url, _):
        ours = typed("--url", url, "hi")
    assert (ours.code, ours.err) == (1, "error: 400: \\x1b[2Jno [/bold]\n")


@pytest.mark.parametrize(("piped", "code"), [("a\n\nb\n", 0), ("", 1), ("\n\n", 1)])
def test_what_is_piped_in_is_one_question(typed: Typed, piped: str, code: int):
    with server() as (url, asked):
        done = typed("--url", url, piped=piped)
    assert done.code == code, done.err
    assert [body["messages"][-1]["content"] for body in asked] == [piped] * (not code)
    assert ("standard input holds no question" in done.err) == bool(code)


def test_a_question_of_bytes_that_are_no_text_is_asked_all_the_same(typed: Typed):
    with server() as (url, asked):
        assert typed("--url", url, b"caf\xe9?".decode(errors="surrogateescape")).code == 0
    assert asked[0]["messages"][0]["content"] == "caf??"
