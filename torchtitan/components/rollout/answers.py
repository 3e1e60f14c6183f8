"""The final answer of a text, for the rewards `number` and `math`.

A text has one answer, or none: a text with two readings, such as `5 or 6`, has no answer, so it is
never rewarded. docs/post_training.md lists the forms.
"""

import re
from typing import NamedTuple

from torchtitan.components.rollout.exact_numbers import (
    MAX_CHARACTERS,
    Number,
    clean,
    read_numbers,
    same_numbers,
    unwrapped,
)
from torchtitan.components.rollout.sentences import (
    is_changed_by,
    is_equal_to_all,
    is_excluded,
    number_in_sentence,
    retracts,
)
from torchtitan.components.rollout.units import find_unit

_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_TAG = re.compile(r"<answer>(.*?)(</answer>|\Z)", re.IGNORECASE | re.DOTALL)
_THOUGHTS = re.compile(r"\A.*</think(?:ing)?>", re.IGNORECASE | re.DOTALL)
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_ANSWER_IS = re.compile(r"\b(?:answer|result)\b[*_ ]*(?:is\b|=|:)[*_ ]*:?", re.IGNORECASE)
_NO_SUBJECT = re.compile(
    r"\b(?:wrong|incorrect|false|previous|old|first|bad|expected|alternative|another|other)\s*\Z",
    re.IGNORECASE,
)
_SUBJECT = re.compile(
    r"(?:\b(?:the|my|our|final|correct|right|numeric(?:al)?|exact)\s*|[*_])+\Z", re.I
)
_FILLER = re.compile(
    r"(?:[\s:*_}]|(?:the|an|equal to|exactly|therefore|thus)\b|(?-i:a)(?=\s+\S))+",
    re.IGNORECASE,  # `A.` may be a choice
)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_REASON = re.compile(
    r",?\s+(?:because|since|as|which|given|where|when|if|not)\b",
    re.IGNORECASE,
)
_OTHER = re.compile(r"[,;]?\s+(?:so|rather|instead|or)\b|;(?=\s)", re.IGNORECASE)
_BETWEEN = re.compile(r"[\s$,;.|/&]*(?:or|and)?[\s$,;.|/&]*", re.IGNORECASE)
_LETTER = re.compile(r"\(?([A-Za-z])\)?")
_CONCLUSION = re.compile(
    r"(?:\A|[.\n])\s*(?:so|thus|hence|therefore|in total)\b([^\n]*?[0-9][^\n]*?)(?=\.\s|\.?\Z|\n)",
    re.IGNORECASE,
)


class Answer(NamedTuple):
    """The text of an answer, and whether it is a sentence. A sentence is searched for a number."""

    text: str
    is_sentence: bool = False


class _Statement(NamedTuple):
    """An answer at a place of a text."""

    start: int
    end: int
    answer: Answer


_NONE = Answer("")


def final_answer(text: str) -> Answer:
    """Return the answer of a text after its thoughts: the content of the last `<answer>` or
    `\\boxed{…}`; else the rest of the last line that begins with `####` and is a number; else what
    follows the last "answer is" (or "answer:", "result is") in its sentence; else the whole text,
    as a sentence if it is long. No answer if a later statement is another one, or takes it back."""
    text = _THOUGHTS.sub("", text)
    for statements in (_tags(text), _boxes(text), _hashes(text), _sentences(text)):
        if not statements:
            continue
        last = statements[-1]
        if _has_rival(text, statements) or _is_taken_back(text, last):
            return _NONE
        return last.answer
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return Answer(f"…{text[-MAX_CHARACTERS:]}", is_sentence=True)  # no answer as a whole
    return Answer(text, is_sentence=re.search(r"\s", text) is not None)


def _tags(text: str) -> list[_Statement]:
    return [
        _Statement(match.start(), match.end(), final_answer(match[1]) if match[2] else _NONE)
        for match in _TAG.finditer(text)
    ]


def _boxes(text: str) -> list[_Statement]:
    """Return the last two boxes of a text: earlier ones have no meaning."""
    starts = list(_BOX.finditer(text))[-2:]
    found = []
    for number, match in enumerate(starts):
        end = _end_of_group(text, match.end())
        if end is None:  # cut off: no answer
            found.append(_Statement(match.start(), len(text), _NONE))
            continue
        is_outer = number + 1 < len(starts) and starts[number + 1].start() < end
        if is_outer:
            continue
        before = text[: match.start()][-MAX_CHARACTERS:]
        after = clean(text[end + 1 :][:MAX_CHARACTERS])
        answer = Answer(text[match.end() : end])
        numbers = read_numbers(answer.text)
        is_contradicted = len(numbers) == 1 and not is_equal_to_all(clean(before), numbers[0])
        if is_contradicted or _is_part(before, after):
            answer = _NONE
        found.append(_Statement(match.start(), end + 1, answer))
    return found


def _end_of_group(text: str, start: int) -> int | None:
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


_WRAPPER = re.compile(r"\\(?:f?boxed|fbox|mathbf|boldsymbol|text\w*|color\{\w+\})\s*\{\s*\Z")


def _is_part(before: str, after: str) -> bool:
    """Return whether a box is a part of what its formula or sentence says, as in `-\\boxed{4}`."""
    if re.search(r"[0-9]\.\Z", before) or re.match(r"[A-Za-z'′″]", after):
        return True
    before = _BOX.sub("", before).replace(r"\(", " ").replace(r"\[", " ")
    before = before.replace("$", "").rstrip(" \n\t")
    after = re.sub(r"\A(?:[\s$}]|\\[)\]])+", "", after)
    if before.endswith("{") and not _WRAPPER.search(before):
        return True
    if re.search(r"[0-9)\]}√∛^_±]\Z", before) or is_excluded(f"{before} "):
        return True
    if re.match(r"[\^_%‰²³°¢k]|\\(?:%|times|cdot|pm|pi|sqrt|div|circ)|[-+*/×·÷!]", after):
        return True
    word = re.match(r"(?:\\text\s*\{\s*)?([A-Za-z]+)", after)
    unit = find_unit(word[1]) if word else None
    if unit and (not unit.dimension or unit.must_be_in_both):
        return True
    beginning = " ".join(after.split(" ")[:2])
    return is_changed_by(beginning, beginning)


def _hashes(text: str) -> list[_Statement]:
    return [
        _Statement(match.start(), match.end(), Answer(match[1]))
        for match in _HASHES.finditer(text)
        if read_numbers(match[1])
    ]


def _sentences(text: str) -> list[_Statement]:
    found = []
    for match in list(_ANSWER_IS.finditer(text))[-2:]:
        rest = text[match.end() :]
        rest = rest if len(rest) <= MAX_CHARACTERS else f"{rest[:MAX_CHARACTERS]}…"
        filler = _FILLER.match(rest)
        start = filler.end() if filler else 0
        content, end = _clause(rest[start:])
        subject = _SUBJECT.sub("", _last_sentence(text[: match.start()]))
        if _NO_SUBJECT.search(subject) or is_excluded(f"{subject.rstrip()} "):
            content = ""
        if content.count("}") > content.count("{"):
            content = content.rstrip("} ")
        answer = Answer(content, is_sentence=True)
        found.append(_Statement(match.start(), match.end() + start + end, answer))
    return found


def _last_sentence(text: str) -> str:
    return re.split(r"[.!?](?=\s)|\n", text[-MAX_CHARACTERS:])[-1]


def _clause(text: str) -> tuple[str, int]:
    """Return the first sentence of a text up to its reasons, or the formula that it begins with,
    and its end; an empty text if the sentence continues with another answer."""
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and (end := text.find(closing, len(opening))) > 0:
            after = end + len(closing)
            if not re.match(r"[^.\n]*[0-9$]|\s*[A-Za-z%\\]", text[after:]):
                return text[len(opening) : end], after
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0]
    parts = _OTHER.split(sentence, maxsplit=1)
    if len(parts) > 1 and re.search("[0-9]", parts[1]):
        return "", len(sentence)
    return _REASON.split(sentence, maxsplit=1)[0].strip(), len(sentence)


def _has_rival(text: str, statements: list[_Statement]) -> bool:
    """Return whether the last two statements of a kind differ, with nothing between them."""
    if len(statements) < 2:
        return False
    one, other = statements[-2:]
    return not _agree(one.answer, other.answer) and _is_joined(text[one.end : other.start])


def _is_joined(between: str) -> bool:
    plain = re.sub(
        r"\\[()\[\]]|\b(?:the|and|or|so|final)\b|[*#]", " ", between, flags=re.IGNORECASE
    )
    return _BETWEEN.fullmatch(plain) is not None


def _is_taken_back(text: str, chosen: _Statement) -> bool:
    """Return whether a later statement takes a statement back, or differs."""
    rest = text[chosen.end :]
    if retracts(re.sub(r"\A[\s$}.]+", "", rest)):
        return True
    later = [*_tags(rest), *_boxes(rest), *_hashes(rest)]
    later += _sentences(rest)
    answers = [statement.answer for statement in later]
    answers += [Answer(match[1], is_sentence=True) for match in _CONCLUSION.finditer(rest)]
    answers += [Answer(line) for line in rest[-MAX_CHARACTERS:].split("\n") if read_numbers(line)]
    return any(not _agree(chosen.answer, answer) for answer in answers)


def _agree(one: Answer, other: Answer) -> bool:
    """Return whether two answers are equal, as far as they are numbers or letters of choices."""
    a, b = numbers_of(one), numbers_of(other)
    if a or b:
        return same_numbers(a, b) or not (a and b) and unwrapped(one.text) == unwrapped(other.text)
    letters = [_LETTER.fullmatch(unwrapped(answer.text)) for answer in (one, other)]
    if all(letters):
        return letters[0][1] == letters[1][1]  # type: ignore[index]
    return True


def numbers_of(answer: Answer) -> tuple[Number, ...]:
    """Return the number of an answer, or the numbers of a list; none if it has no single
    reading."""
    numbers = read_numbers(answer.text)
    if numbers or not answer.is_sentence:
        return numbers
    number = number_in_sentence(answer.text)
    return () if number is None else (number,)
