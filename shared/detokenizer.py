"""Token ids to text while they are still coming: whole characters only, and never a part of a stop string.

It knows the tokenizer's `decode` and nothing of models or HTTP.

    token id -> Detokenizer -> characters -> StopStrings -> text that can be sent
"""

from collections.abc import Sequence

from shared.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # how `decode` writes bytes that are no UTF-8, or not yet
MAX_HELD = 3  # a character has at most 4 bytes, so at most 3 can be waiting for the last


class Detokenizer:
    """Text of a growing sequence. The pieces joined are what `decode` makes of the whole.

    Tokens can't be decoded one by one: a character may span several, and some tokenizers drop the space of the first.
    Decoding everything anew for each token would cost more and more, so only a window of the latest tokens is decoded:

        0          start        settled       len(ids)
        | sent      | context    | new          |
                    [ decoded ------------------)

    [start, settled) is there only so that the first new token isn't taken for the first of the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._start = self._settled = 0
        self._sent = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """Add a token and return the characters that it completes, often one or more, sometimes none."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._start :])
        complete = len(text)
        while complete and len(text) - complete < MAX_HELD and text[complete - 1] == REPLACEMENT:
            complete -= 1
        piece = text[self._sent : complete]
        self._sent = max(self._sent, complete)
        if complete == len(text):
            self._start, self._settled = self._settled, len(self._ids)
            self._sent = len(self._decode(self._ids[self._start :]))
        return piece

    def flush(self) -> str:
        """The rest at the end of the sequence: an incomplete character comes out as U+FFFD."""
        text = self._decode(self._ids[self._start :])
        piece = text[self._sent :]
        self._sent = len(text)
        return piece


class StopMatcher:
    """Text up to the first stop string. Holds back what could still become one.

    The first is the one that is complete first; of several that end at the same character, the longest. So it doesn't
    matter how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Add text and return what can be sent. Sets `matched` when a stop string is found; it is never sent."""
        if not self._stop:
            return text
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.matched, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._could_begin_a_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once nothing more can come."""
        text, self._held = self._held, ""
        return text

    def _could_begin_a_stop(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stop):
                return length
        return 0
