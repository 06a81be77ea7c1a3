"""What prompts and answers take, learned from what happened: of all workers together, each time with less of what was
before.

Of all together: one that had a slow moment would be avoided, and so never be measured again. `Pace` knows seconds for a
prompt token, seconds between two tokens of an answer by how many are written beside it, and how long answers become.
`Busy` is one worker's: the share of its time that it computes prompts.
"""

import math

FRESH_TOKEN_S = 1e-4  # of a prompt, where nothing has been computed yet
FRESH_OUTPUT = 256  # tokens of an answer, where none has ended yet
PROMPT_MEMORY = 0.9  # share of what was measured that stays when a prompt is added
STEP_MEMORY = 0.99  # likewise a step
OUTPUT_MEMORY = 0.98  # likewise an answer
SPREAD = 1e-3  # of the squares of rows: below it, all steps are taken to have had as many
BUSY_S = 30.0  # over which a worker's share of prompts is taken: some answers


class Pace:
    """What has been measured lately. Everything has a value from the beginning on."""

    def __init__(self) -> None:
        self._prompt_s = self._prompt_tokens = 0.0
        # Sums over steps without prompts, of x = rows and y = seconds.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._tokens = 0.0  # of answers, that these rows gave
        self._outputs: dict[str, tuple[float, float]] = {}  # of each class: answers, and their tokens

    def computed(self, tokens: int, seconds: float) -> None:
        """A prompt of which so many tokens were not cached has had its first token after so many seconds of work."""
        self._prompt_s = PROMPT_MEMORY * self._prompt_s + seconds
        self._prompt_tokens = PROMPT_MEMORY * self._prompt_tokens + tokens

    def stepped(self, rows: int, seconds: float, tokens: float) -> None:
        """A step of so many answers, and of no prompt, has given so many tokens after so many seconds."""
        keep = STEP_MEMORY
        self._n = keep * self._n + 1
        self._x = keep * self._x + rows
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + rows * rows
        self._xy = keep * self._xy + rows * seconds
        self._tokens = keep * self._tokens + tokens

    def answered(self, of: str, tokens: int) -> None:
        """An answer of a class has come to its end."""
        answers, all = self._outputs.get(of, (0.0, 0.0))
        self._outputs[of] = OUTPUT_MEMORY * answers + 1, OUTPUT_MEMORY * all + tokens

    @property
    def token_s(self) -> float:
        """Seconds for a token of a prompt."""
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else FRESH_TOKEN_S

    def between(self) -> tuple[float, float]:
        """(seconds between two tokens of an answer, what each answer beside it adds): a line through the steps.

        Where all steps had as many rows what a row adds is not known, and taken to be nothing: so answers come together
        until it is.
        """
        if not self._n:
            return 0.0, 0.0
        rate = self._x / self._tokens  # steps for each token
        spread = self._xx - self._x * self._x / self._n
        row = (self._xy - self._x * self._y / self._n) / spread if spread > SPREAD * self._xx else 0.0
        if row <= 0:
            return rate * self._y / self._n, 0.0
        base = (self._y - row * self._x) / self._n
        if base < 0:
            base, row = 0.0, self._xy / self._xx
        return rate * base, rate * row

    def output(self, of: str) -> float:
        """Tokens that an answer of a class becomes, on the mean."""
        answers, tokens = self._outputs.get(of, (0.0, 0.0))
        return max(1.0, tokens / answers) if answers else FRESH_OUTPUT


class Busy:
    """The share of its time that one worker computes prompts, over the last BUSY_S or so."""

    __slots__ = ("_at", "_share")

    def __init__(self) -> None:
        self._share = self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """It is to compute a prompt, for so long."""
        self._share = self.share(now) + seconds / BUSY_S
        self._at = now

    def share(self, now: float) -> float:
        """As of now; more than 1 where more comes than it can compute."""
        return self._share * math.exp((self._at - now) / BUSY_S)
