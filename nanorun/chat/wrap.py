"""Lines that break between words, while the text is still coming.

A terminal breaks a line wherever it is full, in the middle of a word. So a word is held back until it has ended,
which is when the next one begins, and goes to a new line if it does not fit. A long word is let go early: nobody
waits for the end of an address, and some scripts have no spaces at all.
"""

import unicodedata

_LONG = 24  # cells of a word that is not waited for any longer


class Wrap:
    """`feed` gives what may be shown by now, `rest` what was held back. A width of 0 breaks nothing."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._column = 0
        self._gap, self._word = "", ""  # spaces not shown yet, and what there is of the word behind them
        self._inside = False  # the beginning of the word is shown already

    def feed(self, text: str) -> str:
        if self.width < 1:
            return text
        shown = []
        for character in text:
            if character in " \t\n":
                shown.append(self._place())
                self._inside = False
                if character == "\n":
                    shown.append(self._gap + "\n")
                    self._gap, self._column = "", 0
                else:
                    self._gap += character
            else:
                self._word += character
                if cells(self._word) >= _LONG:
                    shown.append(self._place())
                    self._inside = True
        return "".join(shown)

    def rest(self) -> str:
        """The last word, and the spaces behind it."""
        shown = self._place() + self._gap
        self._column += cells(self._gap)
        self._gap = ""
        self._inside = bool(shown) and not shown[-1].isspace()
        return shown

    def _place(self) -> str:
        if not self._word:
            return ""
        gap, word, long = self._gap, self._word, cells(self._word)
        self._gap = self._word = ""
        fits = self._column + cells(gap) + long <= self.width
        if fits or self._inside or not self._column:
            self._column += cells(gap) + long
            if self._column > self.width:  # the terminal has broken it
                self._column %= self.width
            return gap + word
        self._column = long
        return "\n" + word


def cells(text: str) -> int:
    """How many columns of a terminal a text takes; a tab is about eight."""
    return sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if character.isascii():
        return 8 if character == "\t" else 1
    if unicodedata.combining(character) or unicodedata.category(character) == "Cf":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
