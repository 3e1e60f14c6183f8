"""Texts of models without the marks around an answer that do not belong to it."""

import re

_SPECIAL_TOKEN = re.compile(r"(?:</s>|<eos>|<end_of_turn>|<\|[\w ]{1,40}\|>)\Z")
_LONGEST_TOKEN = 44

_DONE = r"✅|✓|✔|☑|🎉|🎊|😊|🙂|😀|💯|∎|\\(?:blacksquare|qed|checkmark)\b|QED\b"
_DONE_MARKS = re.compile(
    r"(?<=[\w.}$*`)])"
    rf"(?:[ \t]*(?:\\ )?(?:\$\\(?:blacksquare|qed|square|Box|checkmark)\$|{_DONE})\ufe0f?\.?)++"
    r"([ \t]*$)?",
    re.MULTILINE,
)
"""Marks of a finished proof, or of joy, and the rest of their line if nothing else is in it."""

_QUOTE = re.compile(r"(?:\A|(?<=\n\n)|(?<=:\n))(?:[ \t]*>.*(?:\n|\Z))+")
_QUOTED_WORDS = re.compile(r"^[ \t]*>[ \t]*(?:[*_#$]+ ?)?(?:[A-Za-z]{2}|\\f?box)", re.MULTILINE)
_QUOTE_MARK = re.compile(r"^[ \t]*>[ \t]*", re.MULTILINE)

_CODE = re.compile(
    r"^[ \t]*```(\w*)[ \t]*$\n?(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
_NO_PROGRAM = ("", "text", "txt", "plaintext", "output", "latex", "tex", "math", "markdown", "json")

_FORMULAS = "(?:equation|aligned|align|gathered|gather|displaymath|math|flalign|multline|center)"
_ENVIRONMENT = re.compile(rf"\\(?:begin|end)\{{{_FORMULAS}\*?\}}")
_TABLE = re.compile(r"\\begin\{\w*(?:matrix|cases|array|tabular)\*?\}")
_END_OF_ROW = re.compile(r"\\\\(?:\[[^\]\n]{0,20}\])?")

_BOXED_DIGIT = re.compile(r"\\boxed *([0-9])(?![\w/^]|[.,][0-9])")
_NO_FACTORIAL = re.compile(r"((?<![\\A-Za-z])[A-Za-z]{2,}|[0-9}][$`]|[0-9}$]\*\*|%)!(?=\s|\Z)")


def without_marks(text: str) -> str:
    """Return a text without special tokens at its end, programs, fences around other blocks, marks
    of quotes, environments of formulas, marks of joy, and repetitions of a line with a box.
    Exclamation marks that are not factorials become periods."""
    if "<s>" not in text:  # which may begin struck text
        text = _without_special_tokens(text)
    text = _CODE.sub(_plain_block, text)
    text = _QUOTE.sub(_plain_quote, text)
    text = _DONE_MARKS.sub(lambda marks: marks[0] if marks[1] is None else marks[1], text)
    if _ENVIRONMENT.search(text) and not _TABLE.search(text):
        text = _END_OF_ROW.sub("\n", _ENVIRONMENT.sub("\n", text)).replace("&", "")
    text = _BOXED_DIGIT.sub(r"\\boxed{\1}", text)
    text = _without_repeated_lines(text)
    return _NO_FACTORIAL.sub(r"\1.", text)


def _without_special_tokens(text: str) -> str:
    end = len(text.rstrip())
    while found := _SPECIAL_TOKEN.search(text, max(0, end - _LONGEST_TOKEN), end):
        end = found.start()
        while end and text[end - 1].isspace():
            end -= 1
    return text[:end]


def _without_repeated_lines(text: str) -> str:
    if "boxed" not in text:
        return text
    lines: list[str] = []
    last = ""
    for line in text.split("\n"):
        if "boxed" in line and line.strip() == last:
            continue
        lines.append(line)
        last = line.strip() or last
    return "\n".join(lines)


def _plain_block(found: re.Match[str]) -> str:
    """Return a block without its fences, and nothing for a program."""
    return f"\n{found[2]}\n" if found[1].lower() in _NO_PROGRAM else "\n\n"


def _plain_quote(found: re.Match[str]) -> str:
    """Return a quote without its marks. A block without words may be an inequality, as `> 4`."""
    return _QUOTE_MARK.sub("", found[0]) if _QUOTED_WORDS.search(found[0]) else found[0]
