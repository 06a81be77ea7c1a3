"""A command in a terminal of its own, as somebody sits at it: a pseudo-terminal, what is shown, what is typed."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests import forked, waiting

PASTE, END_PASTE = "\x1b[200~", "\x1b[201~"
BRACKETS_ON, BRACKETS_OFF = "\x1b[?2004h", "\x1b[?2004l"
_END = b"\x00end\x00"
_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")


class Session:
    """A process that leads a session whose terminal is ours to type into."""

    def __init__(self, master: int, slave: int, process: "subprocess.Popen[bytes]") -> None:
        self.slave, self.process = slave, process
        self._master, self._raw = master, b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while data := os.read(self._master, 65536):
                self._raw += data

    @property
    def raw(self) -> str:
        return self._raw.decode(errors="replace")

    @property
    def shown(self) -> str:
        """Without escape sequences."""
        return _SEQUENCES.sub("", self.raw)

    def type(self, keys: str) -> None:
        data = keys.encode()
        while data:
            data = data[os.write(self._master, data) :]

    def paste(self, text: str) -> None:
        """As a terminal does for a program that has asked for brackets; its line ends are those of the Enter key."""
        text = text.replace("\n", "\r")
        asked = self.raw.rfind(BRACKETS_ON) > self.raw.rfind(BRACKETS_OFF)
        self.type(f"{PASTE}{text}{END_PASTE}" if asked else text)

    def until(self, condition: Callable[[], object]) -> None:
        try:
            waiting.until(condition)
        except AssertionError as late:
            raise AssertionError(f"{late}; shown so far: {self.shown}") from None

    def until_prompt(self, number: int) -> None:
        """Until the prompt stands there for the `number`th time."""
        self.until(lambda: self.shown.count("\n>") >= number)

    def ends(self) -> int:
        code = self.process.wait(waiting.LIMIT_S)
        os.write(self.slave, _END)  # behind all that it has written
        self.until(lambda: self._raw.endswith(_END))
        self._raw = self._raw.removesuffix(_END)
        return code

    def ended_within(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is not None

    def waiting(self) -> int:
        """Bytes typed that nobody has read."""
        return int.from_bytes(fcntl.ioctl(self.slave, termios.FIONREAD, b"\0" * 4), sys.byteorder)

    def unread(self) -> bytes:
        """What the next program at this terminal, a shell, would read."""
        mode = termios.tcgetattr(self.slave)
        mode[3] &= ~termios.ICANON
        mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0
        termios.tcsetattr(self.slave, termios.TCSANOW, mode)
        return os.read(self.slave, 65536)


@contextmanager
def session(
    *words: str,
    size: tuple[int, int] = (40, 120),
    environment: dict[str, str] | None = None,
    typed: str = "",
    least: int = 1,
) -> Iterator[Session]:
    """`redline` with these words. typed: what is in the terminal before it starts. least: VMIN, as another program may
    have left it."""
    master, slave = pty.openpty()
    mode = termios.tcgetattr(slave)
    mode[6][termios.VMIN], mode[6][termios.VTIME] = least, least - 1
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    os.write(master, typed.encode())
    process = forked.Popen(
        [sys.executable, "-m", "redline", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=forked.be_controlled,
        env={**os.environ, "TERM": "xterm-256color", "REDLINE_HISTORY": "/dev/null", **(environment or {})},
    )
    one = Session(master, slave, process)
    try:
        yield one
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(slave)  # the last one: the reader's next read fails
        one._reader.join()
        os.close(master)
