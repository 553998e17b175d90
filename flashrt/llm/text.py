"""Text that leaves the engine piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

from flashrt.errors import RequestError


class TextStream:
    """Tokens in, text out, never half a character.

    A character may take several tokens. Its bytes are held until it is complete or can't become one
    (then it is shown as U+FFFD). The pieces joined are what `decode` gives for all tokens at once, however
    they are cut. Cost and memory per token are those of the token's own bytes.

    Args:
        token_bytes: token id → the bytes it stands for.
        strip: leading spaces of the whole text that aren't part of it (a SentencePiece prefix), 0 or 1.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip: int = 0) -> None:
        self._bytes, self._strip = token_bytes, strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now, "" where nothing is."""
        return self._shown(self._decoder.decode(b"".join(map(self._bytes, ids))))

    def finish(self) -> str:
        """The rest: U+FFFD where the last character is incomplete."""
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._strip and text:
            text, self._strip = text.removeprefix(" "), 0
        return text


class StopStrings:
    """Cuts text before the first stop string, holding back what may be the start of one.

    The first stop string to be complete wins, whatever the cutting of the text into pieces.
    Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError("a stop string is empty", hint="leave it out")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=1)
        self._held = ""
        self.stopped = ""  # the stop string that was found, "" so far

    def push(self, text: str) -> str:
        """The text that may be shown. After a stop string was found (`stopped`), always ""."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.stopped = min(ends)
            self._held = ""
            return text[:at]
        keep = len(text) - self._start_of_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text held back; the generation ended without completing a stop string."""
        text, self._held = self._held, ""
        return text

    def _start_of_stop(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-n:]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0
