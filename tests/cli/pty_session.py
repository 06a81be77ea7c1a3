"""A command in a terminal of its own: a pseudo-terminal with the input that a test types, and the output shown."""

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
    """A process that leads a session with a pseudo-terminal, which a test can type into."""

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
        """The output without escape sequences."""
        return _SEQUENCES.sub("", self.raw)

    def type(self, keys: str) -> None:
        data = keys.encode()
        while data:
            data = data[os.write(self._master, data) :]

    def paste(self, text: str) -> None:
        """Paste like a terminal: bracketed if the program has requested it, with the line ends of the Enter key."""
        text = text.replace("\n", "\r")
        asked = self.raw.rfind(BRACKETS_ON) > self.raw.rfind(BRACKETS_OFF)
        self.type(f"{PASTE}{text}{END_PASTE}" if asked else text)

    def until(self, condition: Callable[[], object]) -> None:
        try:
            waiting.until(condition)
        except AssertionError as late:
            raise AssertionError(f"{late}; shown so far: {self.shown}") from None

    def until_prompt(self, number: int) -> None:
        """Wait until the prompt has been shown `number` times."""
        self.until(lambda: self.shown.count("\n>") >= number)

    def ends(self) -> int:
        code = self.process.wait(waiting.LIMIT_S)
        os.write(self.slave, _END)  # after all output of the process
        self.until(lambda: self._raw.endswith(_END))
        self._raw = self._raw.removesuffix(_END)
        return code

    def ended_within(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is not None

    def waiting(self) -> int:
        """The number of bytes typed that have not been read."""
        return int.from_bytes(fcntl.ioctl(self.slave, termios.FIONREAD, b"\0" * 4), sys.byteorder)

    def unread(self) -> bytes:
        """The input left to the next program at this terminal, such as a shell."""
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
    """`redline` with these words. typed: input in the terminal before the start. least: VMIN before the start."""
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
        os.close(slave)  # the last descriptor of the slave: the reader thread's next read fails
        one._reader.join()
        os.close(master)
