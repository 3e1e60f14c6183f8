"""The final answer of a text, for the rewards `number` and `math`.

A text has one answer, or none: a text with two readings, such as `5 or 6`, has no answer, so it is
never rewarded. docs/post_training.md lists the forms.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from torchtitan.components.rollout.contexts import COUNTS, DOUBTS
from torchtitan.components.rollout.endings import is_counted, is_known_ending
from torchtitan.components.rollout.exact_numbers import (
    MAX_CHARACTERS,
    Number,
    clean,
    read_numbers,
    same_numbers,
    unwrapped,
)
from torchtitan.components.rollout.plain_texts import without_marks
from torchtitan.components.rollout.sentences import (
    UNIT_AFTER,
    is_changed_by,
    is_equal_to_all,
    is_excluded,
    number_in_sentence,
    retracts,
)
from torchtitan.components.rollout.units import RATE, find_unit, is_known

_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_EQUAL_BOXES = re.compile(
    r"(?P<start>(?:\A|\n|[.:] |\bis )[$* ]{0,8})(?P<box>\\boxed\{[^{}\n]{1,100}\})"
    r"(?:\$?[,;]? ?\$?(?P=box))++(?=[$* .]{0,8}(?:\Z|\n))"
)
"""A box that a sentence or line repeats, and nothing else: with other words, or in brackets, it may
be a list."""
_TAG = re.compile(r"<answer>(.*?)(</answer>|\Z)", re.IGNORECASE | re.DOTALL)
_THOUGHTS = re.compile(r"\A.*</think(?:ing)?>", re.IGNORECASE | re.DOTALL)
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_ANSWER_IS = re.compile(
    r"\b(?:answer|result)\b[*_ ]*[\"']?[*_ ]*(?:is\b|=|:|→|⇒)[*_ ]*:?", re.IGNORECASE
)
_NO_SUBJECT = re.compile(
    r"(?:\b(?:wrong|incorrect|false|previous|old|first|second|next|bad|expected|alternative|"
    r"another|other|partial|intermediate|initial|preliminary|tentative|approximate|rough|rounded|"
    r"naive|possible|his|her|their|your|any|every|each|an|of|in|to|for|on|from|with|into|half|"
    r"twice|double|divides)|['’]s|s['’])[\s*_]*\Z",
    re.IGNORECASE,
)
"""Words before `the answer` that make a statement about it, or name another one."""
_SUBJECT = re.compile(
    r"(?:\b(?:the|my|our|final|correct|right|numeric(?:al)?|exact)\s*+|[*_]++)++\Z", re.I
)
_STEP = re.compile(r"\A\s*(?:[-*•]\s+)?(?:[*_#\s]*step\s*[0-9]+[*_ ]*[:.)])?", re.IGNORECASE)
_NAME = re.compile(r"(?<!as a )\b(?:answer|result|solution)\b", re.IGNORECASE)
_IS = re.compile(
    r"(?:[\s,*_$}]|\b(?:therefore|thus|then|hence|so|now|here|finally|again|indeed|clearly|which|"
    r"that|simply|just)\b|"
    r"\b(?:to|for|of) (?:the|this|that|your|our|my) (?:given |original |whole )?"
    r"(?:problem|question|exercise|task|puzzle|equation)\b)*"
    r"(?:\Z|[-+0-9.$(=:\\]|(?:is|are|was|equals?|becomes|must be|should be|has to be|"
    r"comes (?:out )?to|turns out to be)\b)",
    re.IGNORECASE,
)
"""Text from `the answer` to the verb of a sentence that gives it."""

_IS_ANSWER = re.compile(
    r"[^.,;]{0,40}?\b(?:is|are|as|was|for) (?:the |my |our )?(?:final |correct |right )?"
    r"(?:answer|result|solution)\b(?!['’])",
    re.IGNORECASE,
)
_LENGTH = re.compile(
    r"[^.,;]{0,20}?\b(?:digits?|characters?|letters?|words?|places?)[ -]"
    r"(?:long|number|in length)\b",
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"(?:[\s:*_}]|(?:the|an|equal to|exactly|therefore|thus)\b|(?-i:a)(?=\s+\S))+",
    re.IGNORECASE,  # `A.` may be a choice
)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_REASON = re.compile(
    r",?\s++(?:because|since|as|which|given|where|not|when(?! \$?[a-z]\$? is\b))\b",
    re.IGNORECASE,
)
_OTHER = re.compile(r"[,;]?\s++(?:so|rather|instead|or)\b|;(?=\s)", re.IGNORECASE)
_BETWEEN = re.compile(r"[\s$,;.|/&]*(?:or|and)?[\s$,;.|/&]*", re.IGNORECASE)
_LETTER = re.compile(r"\(?([A-Za-z])\)?")
_SENTENCE_BREAK = re.compile(
    r"(?<!\bvs)(?<!\bv)(?<!\be\.g)(?<!\bi\.e)(?<!\bresp)(?<!\bcf)\.(?=\s|\Z)|[!?](?=\s|\Z)|[\n。！？]",
    re.IGNORECASE,
)
_ONE_MORE = re.compile(
    r"\W*(?:or|and|also|alternatively|otherwise|another|either|secondly|the other|the second|maybe|"
    r"perhaps|possibly)\b",
    re.IGNORECASE,
)
_MARKER = re.compile(
    r"(?:^|\n)\s*(?:\(?[A-Za-z0-9]{1,3}[.)]|[-•])(?=\s)|\b[A-Za-z](?:_\{?\w+\}?)? *=|"
    r"\\[()\[\]]|\b(?:the|and|or|so|final)\b|[*#]",
    re.IGNORECASE,
)
_SO = re.compile(
    r"(?:\A|[.,;:!?])\s*(?:and )?(?:so|thus|hence|therefore|in total)\b", re.IGNORECASE
)
_CONCLUSION_END = re.compile(r"\.\s|\.?\Z")
_DIGIT = re.compile("[0-9]")


class Answer(NamedTuple):
    """The text of an answer, and whether it is a sentence. A sentence is searched for a number."""

    text: str
    is_sentence: bool = False


@dataclass(frozen=True)
class _Statement:
    """An answer at a place of a text."""

    start: int
    end: int
    read: Callable[[], Answer]

    @functools.cached_property
    def answer(self) -> Answer:
        """The answer, read when it is compared: a text may have thousands of statements, and only
        the last ones decide."""
        return self.read()


_NONE = Answer("")


def _none() -> Answer:
    return _NONE


def final_answer(text: str) -> Answer:
    """Return the answer of a text after its thoughts: the content of the last `<answer>` or
    `\\boxed{…}`; else the rest of the last line that begins with `####` and is a number; else what
    follows the last "answer is" (or "answer:", "result is") in its sentence; else the whole text,
    as a sentence if it is long. No answer if a later statement is another one, or takes it back."""
    text = without_marks(_THOUGHTS.sub("", text))
    text = _EQUAL_BOXES.sub(r"\g<start>\g<box>", text)
    for statements in (_tags(text), _boxes(text), _hashes(text), _sentences(text)):
        if not statements:
            continue
        last = statements[-1]
        if last.answer == _NONE or _has_rival(text, statements) or _is_taken_back(text, last):
            return _NONE
        return last.answer
    text = text.strip()
    if _is_about_answer(text):
        return _NONE
    if len(text) > MAX_CHARACTERS:
        return Answer(f"…{text[-MAX_CHARACTERS:]}", is_sentence=True)  # no answer as a whole
    return Answer(text, is_sentence=re.search(r"\s|=", text) is not None)


def _tags(text: str) -> list[_Statement]:
    return [
        _Statement(
            match.start(), match.end(), partial(final_answer, match[1]) if match[2] else _none
        )
        for match in _TAG.finditer(text)
    ]


def _boxes(text: str) -> list[_Statement]:
    """Return the boxes of a text that contain no others."""
    starts = list(_BOX.finditer(text))
    ends = _ends_of_groups(text) if starts else {}
    n_read = 0

    @functools.cache  # a model may repeat its answer up to its last token
    def read(before: str, inside: str, after: str) -> Answer:
        nonlocal n_read
        n_read += 1
        return _answer_of_box(before, inside, after) if n_read <= _MOST_BOXES else _NONE

    found: list[_Statement] = []
    for number, match in enumerate(starts):
        end = ends.get(match.end() - 1)
        if end is None:  # cut off: no answer
            found.append(_Statement(match.start(), len(text), _none))
            continue
        is_outer = number + 1 < len(starts) and starts[number + 1].start() < end
        if is_outer:
            continue
        is_last = number + 1 == len(starts)
        n_characters = MAX_CHARACTERS if is_last else _NEAR
        before = text[max(0, match.start() - n_characters) : match.start()]
        after = text[end + 1 : end + 1 + n_characters]
        answer = partial(read, before, text[match.end() : end], after)
        found.append(_Statement(match.start(), end + 1, answer))
    return found


def _answer_of_box(before: str, inside: str, after: str) -> Answer:
    """Return the content of a box, or no answer if it is a part of the texts around it."""
    inside = _NAME_IN_BOX.sub("", inside)
    before, after = _without_emphasis(before, after)
    before, after = _without_brackets(before, clean(after))
    numbers = read_numbers(inside)
    number = numbers[0] if len(numbers) == 1 else None
    if number and not is_equal_to_all(clean(before), number, is_box=True):
        return _NONE
    value = number.value if number else None
    symbol = _SYMBOL_AFTER_BOX.match(after) if number else None
    if _is_part(before, after[symbol.end() :] if symbol else after, value):
        return _NONE
    return Answer(_with_unit(inside, after) if number else inside)


def _with_unit(inside: str, after: str) -> str:
    """Return the number in a box with the unit after it: a known one, a rate, or a plural, since
    any other words may follow a box."""
    found = _UNIT_AFTER_BOX.match(after)
    if found is None:
        return inside
    unit = found["unit"]
    if not (is_known(unit) or RATE.search(unit) or is_counted(unit, None)):
        return inside
    whole = f"{inside} {unit}"
    return whole if read_numbers(whole) else inside


_MOST_BOXES = 1000
"""Boxes with different contents or surroundings that are read; a text with more in one sentence has
no answer."""

_NEAR = 100
"""Characters around a box that are searched for what makes it a part, except around the last."""

_UNIT_AFTER_BOX = re.compile(rf"(?:[ $}}]|\\[)\]])*(?!\n){UNIT_AFTER.pattern}")
_SYMBOL_AFTER_BOX = re.compile(r"(?:[ $}]|\\[)\]])*(?!\n) [mgshlL](?![\w^(\[/'])")
"""A unit of one letter, which is read as after a number without a box."""

_NAME_IN_BOX = re.compile(
    r"\A\s*(?:\\(?:text|textbf)\s*\{\s*(?:the )?(?:final )?answer\s*(?:is|[:=])\s*\}|=)",
    re.IGNORECASE,
)
_OPENED_BRACKET = re.compile(r"(?:\A|(?<=[\s$*:]))([(\[])([\s$*]*)\Z")
_CLOSED_BRACKET = re.compile(r"([\s$*]*)([)\]])")


def _without_brackets(before: str, after: str) -> tuple[str, str]:
    """Return the texts around a box without brackets around it alone."""
    opened, closed = _OPENED_BRACKET.search(before), _CLOSED_BRACKET.match(after)
    if opened and closed and opened[1] + closed[2] in ("()", "[]"):
        return before[: opened.start()] + opened[2], closed[1] + after[closed.end() :]
    return before, after


_EMPHASIS_BEGINS = r"(?<![^\s(>])(\*{1,3}|_{1,3})(?![\s*_])"
_OPEN_EMPHASIS = re.compile(rf"{_EMPHASIS_BEGINS}[^*_\n]*\Z")
_EMPHASIS = re.compile(rf"{_EMPHASIS_BEGINS}([^*_\n]+)(?<!\s)\1(?![\w*])")


def _without_emphasis(before: str, after: str) -> tuple[str, str]:
    """Return the texts around a box without Markdown's marks of emphasis, which would count as
    signs of multiplication or of an index: around the box, alone or with words, and around words
    before it."""
    opened = _OPEN_EMPHASIS.search(before)
    closed = opened and re.match(rf"([\s$.:]*){re.escape(opened[1])}(?![\w*])", after)
    if opened and closed:
        before = before[: opened.start(1)] + before[opened.end(1) :]
        after = closed[1] + after[closed.end() :]
    return _EMPHASIS.sub(r"\2", before), after


def _ends_of_groups(text: str) -> dict[int, int]:
    """Return the place of the closing brace of each opening one."""
    opened: list[int] = []
    ends = {}
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            ends[opened.pop()] = brace.start()
    return ends


_WRAPPER = re.compile(r"\\(?:f?boxed|fbox|mathbf|boldsymbol|text\w*|color\{\w+\})\s*\{\s*\Z")
_MARKS_AFTER = re.compile(r"(?:[\s$}*_`\"'”’)]|\\[)\]])*")
_ARGUMENT = re.compile(r"[(\[{]|[,;]\s*(?:[-+]?\.?[0-9]|[$\\(\[]|[A-Za-z]\b|\w+\s*=)")
_WORD = re.compile(r"(?:[A-Za-z][A-Za-z'’-]+|[aAI](?= [A-Za-z]{2}))(?![\w=^(\[])(?!\s*=)")
_SUFFIX = re.compile(
    r"(?:st|nd|rd|th|pi|exp|sin|cos|tan|log|ln|sqrt|mod|modulo|choose|out|divided|multiplied|over|"
    r"tenths|hundredths|thousandths|half|halves|thirds?|quarters?|fourths?|fifths?|fold|points?|"
    r"squared|cubed|factorial|base|ish|through|until|versus|vs|[ap]m)\b",
    re.IGNORECASE,
)
_CAUSE = re.compile(
    r"[,;]?\s*\b(?:because|since|as|which|given|where|when|attained|achieved|so|is|was|are)\b",
    re.IGNORECASE,
)
_MORE_VALUES = re.compile(
    rf"[0-9\\$&|=]|(?:[,;]|\band\b|\bor\b|\bto\b)\s*(?:and |or |then |a |an |also |the )*"
    rf"(?:{COUNTS}|half|quarter|third)\b",
    re.IGNORECASE,
)


def _is_part(before: str, after: str, value: Fraction | None) -> bool:
    """Return whether a box is a part of what its formula or sentence says, as in `-\\boxed{4}`."""
    if re.search(r"[0-9]\.\Z|(?<!#)#\Z", before) or re.match(r"[A-Za-z'′″]", after):
        return True
    if _is_about_answer(f"{before} 0 {after}"):
        return True
    before = _BOX.sub("", before).replace(r"\(", " ").replace(r"\[", " ")
    before = before.replace("$", "").rstrip(" \n\t")
    if re.search(r"[0-9)\]}√∛^_±]\Z|(?<![^\W_])(?![aAI])[^\W\d_]\Z", before):
        return True
    return _is_opened(clean(before)) or is_excluded(f"{before} ") or _is_continued(after, value)


def _is_opened(before: str) -> bool:
    """Return whether the last sentence of a text opens a bracket and does not close it."""
    before = re.split(r"\n\s*\n|[.!?]\s", before)[-1]
    depth = 0
    for place in range(len(before) - 1, -1, -1):
        depth += (before[place] in ")]}") - (before[place] in "([{")
        if depth < 0:
            if not _WRAPPER.search(before[: place + 1]):
                return True
            depth = 0
    return False


def _is_continued(after: str, value: Fraction | None) -> bool:
    """Return whether the text after a box changes it, or gives more values."""
    marks = _MARKS_AFTER.match(after)
    assert marks
    rest = re.sub(r"\A(?:[\s$}]|\\[)\]])+", "", after)
    start = re.match(r"[\s$]*+(?=\*\*\w)", after)
    if start and "\n" in start[0].rpartition("$")[2]:  # emphasis of a new line
        return False
    if re.match(
        r"[\^_%‰²³°¢]|k(?![A-Za-z])|\\(?:%|times|cdot|pm|pi|sqrt|div|circ)|[-+*/×·÷!]", rest
    ):
        return True
    word = re.match(r"(?:\\text\s*\{\s*)?([A-Za-z]+)", rest)
    unit = find_unit(word[1]) if word else None
    if unit and (not unit.dimension or unit.must_be_in_both):
        return True
    beginning = " ".join(rest.split(" ")[:2])
    if is_changed_by(beginning, beginning):
        return True
    n_breaks = marks[0].count("\n")
    if not n_breaks:
        if not is_known_ending(after, value, is_alone=False):
            return True
        if re.match(r"\s[\s$]*[(\[]", after):
            return False
    rest = after[marks.end() :]
    if n_breaks > 1 or not rest:
        return False
    if _ARGUMENT.match(rest):
        return True
    if n_breaks or re.match(r"[.!?。](?![.0-9])", rest):
        return False
    joined = re.match(r"[,;，]\s*", rest)
    words = rest[joined.end() :] if joined else rest
    if not words:
        return False
    if not _WORD.match(words) or (not joined and _SUFFIX.match(words)):
        return True
    clause = _SENTENCE_END.split(words, maxsplit=1)[0]
    if DOUBTS.search(clause):
        return True
    clause = _CAUSE.split(clause, maxsplit=1)[0]
    return _MORE_VALUES.search(f"{joined[0] if joined else ''}{clause}") is not None


def _hashes(text: str) -> list[_Statement]:
    return [
        _Statement(match.start(), match.end(), partial(Answer, match[1]))
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
        subject = _STEP.sub("", _last_sentence(text[: match.start()]))
        subject = _SUBJECT.sub("", subject)
        is_other = _NO_SUBJECT.search(subject) or _LENGTH.match(content)
        if is_other or is_excluded(f"{subject.rstrip()} "):
            content = ""
        if content.count("}") > content.count("{"):
            content = content.rstrip("} ")
        answer = partial(Answer, content, is_sentence=True)
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


def _is_about_answer(text: str) -> bool:
    """Return whether the sentence of the last number of a text tells something about the answer, as
    in `the answer squared is 4`, instead of the answer."""
    text = text[-2 * MAX_CHARACTERS :]
    numbers = list(re.finditer(r"[0-9]+", text))
    if not numbers:
        return False
    before = _last_sentence(text[: numbers[-1].start()])
    after = _SENTENCE_END.split(text[numbers[-1].end() :], maxsplit=1)[0]
    if _NAME.search(after) and not _IS_ANSWER.match(after):
        return True
    names = list(_NAME.finditer(before))
    if not names:
        return False
    subject = _SUBJECT.sub("", before[: names[-1].start()])
    is_statement = _IS.match(before[names[-1].end() :])
    return bool(not is_statement or _NO_SUBJECT.search(subject) or _LENGTH.match(after))


def _has_rival(text: str, statements: list[_Statement]) -> bool:
    """Return whether a statement differs from the last one, in the same sentence or with nothing
    between them."""
    last = statements[-1]
    is_same = functools.cache(_is_same)
    for number in range(len(statements) - 1, 0, -1):
        one, other = statements[number - 1 : number + 1]
        if not _is_joined(text[one.end : other.start]):
            return False
        if not is_same(one.answer, last.answer):
            return True
    return False


def _is_same(one: Answer, other: Answer) -> bool:
    if not numbers_of(one):
        plain, others = [unwrapped(answer.text[:MAX_CHARACTERS]) for answer in (one, other)]
        if plain != others:
            return False
    return _agree(one, other)


def _is_joined(between: str) -> bool:
    """Return whether a sentence continues from one statement to the next, or adds the next one."""
    if len(between) > MAX_CHARACTERS:
        return False
    *earlier, last = _SENTENCE_BREAK.split(between)
    if not earlier or _ONE_MORE.match(last):
        return True
    return _BETWEEN.fullmatch(_MARKER.sub(" ", between)) is not None


def _is_taken_back(text: str, chosen: _Statement) -> bool:
    """Return whether a later statement takes a statement back, or differs."""
    rest = text[chosen.end :]
    if retracts(re.sub(r"\A[\s$}.]+", "", rest)):
        return True
    later = [*_tags(rest), *_boxes(rest), *_hashes(rest)]
    later += _sentences(rest)
    answers = [statement.answer for statement in later]
    answers += [Answer(line) for line in rest[-MAX_CHARACTERS:].split("\n") if read_numbers(line)]
    if any(not _agree(chosen.answer, answer) for answer in answers):
        return True
    return any(
        len(sentence) > MAX_CHARACTERS or not _agree(chosen.answer, Answer(sentence, True))
        for sentence in _conclusions(rest)
    )


def _conclusions(text: str) -> set[str]:
    """Return the rest of the sentences that begin with a word such as `so`, if it has a digit."""
    found = set()
    for line in text.split("\n"):
        place = 0
        while (word := _SO.search(line, place)) and (digit := _DIGIT.search(line, word.end())):
            end = _CONCLUSION_END.search(line, digit.end())
            assert end
            found.add(line[word.end() : end.start()])
            place = end.start()
    return found


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
