"""Tokens to text while they are being generated.

A character may be spread over several tokens, so text is held back until its last byte has come.
"""

import codecs

from nanorun.text.tokenizer import Tokenizer


class StreamDecoder:
    """`push` the ids as they come and print what it returns, then `flush`: together `tokenizer.decode(ids)`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, *ids: int) -> str:
        """The text that is complete now; empty while a character is unfinished."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character. Ready for another text."""
        return self._decoder.decode(b"", final=True)


def overlap(text: str, stop: str) -> int:
    """The longest end of the text that a stop string, not yet whole, begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
