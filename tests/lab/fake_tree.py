"""A copy of the project without an engine: its command line and HTTP server give configured answers at once."""

import subprocess
from pathlib import Path

MAIN = """
import hashlib, json, sys, time, uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OFFSET, PACE_S, REFUSES = {offset!r}, {pace_s!r}, {refuses!r}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.say(200, {{}})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(body)
        if REFUSES and "seed" in asked:
            self.say(400, {{"error": "no seeds here"}})
        elif self.path == "/tokenize":
            self.say(200, {{"tokens": [1, 2, 3]}})
        elif asked.get("stream"):
            self.stream(len(asked["prompt"]), asked["max_tokens"])
        else:
            digest = hashlib.sha256(body).digest()
            self.say(200, {{
                "id": uuid.uuid4().hex,
                "created": time.time(),
                "choices": [{{"text": digest.hex(), "logprobs": [-digest[0] - 0.5 + OFFSET, digest[1] / 256]}}],
                "usage": {{
                    "prompt_tokens": 3,
                    "completion_tokens": 4,
                    "prompt_tokens_details": {{"cached_tokens": time.time_ns() % 7}},
                    "completion_tokens_details": {{"reasoning_tokens": 1}},
                }},
            }})

    def say(self, status, answer):
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, prompt, tokens):
        self.send_response(200)
        self.end_headers()
        for count in range(1, tokens + 1):
            told = count, count * PACE_S
            self.wfile.write(b'data: {{"usage": {{"completion_tokens": %d}}, "at": %f}}\\n\\n' % told)
        self.wfile.write(b"data: [DONE]\\n\\n")


class Server(ThreadingHTTPServer):
    request_queue_size = 64


words = sys.argv[1:]
if "--help" in words:
    print("--kv-dtype bf16|float32")
elif words[0] == "serve":
    Server(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
else:
    rows = [int(words[place + 1]) for place, word in enumerate(words) if word == "--batch"]
    cases = [{{"rows": count, "tokens_per_row": 1, "ms": {factor!r} * (8 + count)}} for count in rows]
    open(words[words.index("--save") + 1], "w").write(json.dumps(cases))
"""

PREFILL = """
import json, sys
case = {{"tokens": 8192, "start": 0, "ms": {factor!r} * 20.0}}
open(sys.argv[sys.argv.index("--save") + 1], "w").write(json.dumps({{"cases": [case]}}))
"""


def fake_tree(
    folder: Path,
    *,
    offset: float = 0.0,
    pace_s: float = 0.0,
    refuses: bool = False,
    factor: float = 1.0,
    prefill: str | None = "benchmarks",
) -> Path:
    """offset: added to log probabilities. pace_s: seconds per token; each event names its due time, and is sent at
    once. refuses: refuse requests with a seed. factor: of a GPU's times. prefill: folder of the prefill program."""
    (folder / "redline").mkdir(parents=True)
    (folder / "redline" / "__main__.py").write_text(
        MAIN.format(offset=offset, pace_s=pace_s, refuses=refuses, factor=factor)
    )
    if prefill is not None:
        (folder / prefill).mkdir(parents=True, exist_ok=True)
        (folder / prefill / "prefill_layer.py").write_text(PREFILL.format(factor=factor))
    return folder


def fake_model(folder: Path) -> Path:
    """A model's folder with two evaluation prompts."""
    (folder / "eval").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    line = '{"kind": "sum", "messages": [{"role": "user", "content": "%s"}], "check": {"number": 3}}\n'
    (folder / "eval" / "hand.jsonl").write_text(line % "1 + 2" + line % "2 + 1")
    return folder


def commit_all(folder: Path) -> str:
    """Makes the folder a repository with one commit, and returns its hash."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
        return subprocess.run(
            ["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    return git("rev-parse", "--short", "HEAD")
