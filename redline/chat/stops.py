"""Stop strings in a stream: what may be shown now, and whether one has come.

Text is held back while it could still become a stop string, so no part of one is ever shown.
"""


class StopStrings:
    """Looks for the first of some strings in a text that comes in pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that can be shown. It ends right before the string that sets `found`; nothing comes after."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        begins = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if begins:
            begin, self.found = min(begins, key=lambda match: match[0])
            self._held = ""
            return text[:begin]
        begin = min(_begin_of_part(text, stop) for stop in self._stops)
        self._held = text[begin:]
        return text[:begin]

    def flush(self) -> str:
        """No more text will come, so what was held back is only text."""
        held, self._held = self._held, ""
        return held


def _begin_of_part(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that is the beginning of `stop`; len(text) for none."""
    begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while begin >= 0 and not stop.startswith(text[begin:]):
        begin = text.find(stop[0], begin + 1)
    return begin if begin >= 0 else len(text)
