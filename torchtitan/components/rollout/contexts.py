"""Words and signs around a number that change its meaning, so that it is not an answer.

Each pattern is searched in the text before or after a number. All other words in this text are
assumed to change nothing."""

import re


def _any_of(phrases: str) -> str:
    """Return a pattern of phrases that commas separate; their parts may be regular expressions."""
    return "(?:" + "|".join(" ".join(phrase.split()) for phrase in phrases.split(",")) + ")"


def _compile(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE)


COUNTS = _any_of(
    """two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen,
    fifteen, sixteen, seventeen, eighteen, nineteen, twenty, thirty, forty, fifty, sixty, seventy,
    eighty, ninety, hundred, thousand, million, billion, dozen"""
)
_MONTHS = """january, february, march, april, may, june, july, august, september, october,
    november, december"""
_PARTS = _any_of(
    """half, halves, quarters?, thirds?, (?:four|fif|six|seven|eigh|nin|ten)ths?, squares?, cubes?,
    roots?, negatives?, opposite, reciprocal, inverse, factorial, percent, multiples?, factors?,
    divisors?, powers?, logarithm, complement, instead, double, triple, most, part, rest, all,
    some, any, none, upwards, range, order, sum, one, short, shy"""
)
_LABELS = _any_of(
    f"""option, choice, case, step, part, nr, figure, fig, table, line, item, room, level, grade,
    version, section, page, question, problem, chapter, exercise, equation, eq, example, task,
    player, team, round, group, row, column, type, class, gate, lane, track, bus, route, flight,
    channel, phase, stage, lesson, volume, vol, book, episode, season, scene, act, article, rule,
    law, theorem, lemma, corollary, footnote, note, ref, reference, block, floor, seat, platform,
    terminal, exit, highway, apartment, door, box, slot, position, place, rank, index, node, tier,
    category, method, approach, attempt, trial, test, sample, variant, model, statement, candidate,
    bullet, hint, remark, condition, claim, assumption, limit, {_MONTHS}"""
)
_MEASURES = _any_of(
    """hours?, hrs?, h, minutes?, mins?, days?, weeks?, months?, years?, feet, foot, ft, yards?,
    miles?, km, m, pounds?, lbs?, kg, dollars?, degrees?, gallons?, quarts?, cups?, meters?"""
)
_ABOUT = """about, around, some, almost, nearly, roughly, approximately, approx\\.?, circa, ca\\.,
    near, nearing, approach(?:es|ing)?, close to, towards?, estimated?, estimated at,
    estimated to be, rounds? to, rounded to, tends? to"""
_BOUNDS = """than, least, most, under, over, below, above, between, within, beyond, past, until,
    till, exceeds?, exceeding, surpass(?:es)?, from"""
_OPERATIONS = """minus, negative, plus, times, by, mod, modulo, log, ln, sin, cos, tan, sqrt, root,
    half, double, triple, twice, thrice, subtract, add, every, per"""
_DENIALS = """not, no, no\\., or, nor, never, except, without, excludes?, excluding, another,
    (?:un|not )equal to, (?:all|anything|everything|nothing|none) but"""
_ASSIGNED = r"(?<!\w)[A-Za-z](?:_\w+)? ?="
EXCLUDES = re.compile(
    "(?:"
    + "|".join(
        (
            r"[-+*/×·÷^<>≤≥≠±√&|~∼≈≃≅]\s*+\(?",
            r"[!/<>~]=",
            r"[0-9]\s*:",
            r"(?<![A-Za-z])[A-Za-z]\s*[→⇒]",
            r"\\(?!Rightarrow|implies|therefore)(?:[A-Za-z]+(?:[_^]\{?\w+\}?)?)?",
            rf"\b{_any_of(','.join((_ABOUT, _BOUNDS, _OPERATIONS, _DENIALS)))}",
            r"(?:\A|is |are |be |has |have )up to",
            r"\b(?:could|may|can) (?:be|equal)",
            r"\b(?:etwa|ungefähr|rund|fast|knapp|mindestens|höchstens|als|über|unter|bis|oder|environ|"
            r"presque|moins(?: de)?|plus de|ou|aproximadamente|casi|quase|unos|unas|cerca de|"
            r"m[áa]s de|menos de|mais de|que)",
            r"(?:\A|[.!?\n][^\S\n]*+)Number",
            rf"\b{_LABELS}[.:#]?",
            rf"\b(?:{_PARTS}|{COUNTS}) of(?: the)?",
            rf"\b{COUNTS}(?: (?:and|to))?",
            # Another number before it.
            r"\b[0-9]\S* (?:and|to|less|\\?cdots)",
            rf"\b[0-9] ?{_MEASURES}(?: and)?",
            r"\b[0-9]\W+[a-z0-9]\)",
            r"[0-9][.,]?\s*\n",
            r"[0-9]\s",
            r"[0-9][^\s,]*,\s+(?:and\s)?",
            r"[0-9][^.,;:\n]*,?\s(?:and|or|und|oder|y|o|et|ou)\s",
            rf"{_ASSIGNED} ?[-+]?[0-9][^\s,;]*[,;]?\s*(?:and|or)?\s*{_ASSIGNED}",
        )
    )
    + r")\s*+[$(]?\s*+\Z",
    re.IGNORECASE,
)
"""Text directly before a number that changes its meaning, or is another number."""

_VERBS = _any_of(
    """is, are, was, were, has, have, had, gets?, got, makes?, made, leaves?, left, equals?,
    keeps?, kept, needs?, sells?, sold, earns?, earned, pays?, paid, costs?, it, she, he, they, we,
    you, there, the answer, so, then"""
)
_JOINS = _any_of("but, so, then, thus, hence, therefore, because, since, which, while, although")
NEW_CLAUSE = _compile(
    r"[.,;:?!)](?=\s|\Z)|\n|[=⇒→]|\\(?:Rightarrow|implies|therefore)",
    rf"\b(?:{_JOINS}|and (?={_VERBS}\b))\b",
)
"""The beginning of a clause, which no word before it negates."""

_NEGATES = _any_of(
    """not, never, cannot, neither, nor, nobody, no one, hardly, scarcely, barely, unlikely,
    impossible, improbable, doubts?, doubtful, doubted, false, falsely, untrue, wrong, wrongly,
    incorrect, incorrectly, mistaken, mistakenly, den(?:y|ies|ied), refutes?, rejects?, rejected,
    rules? out, ruled out, suppose, supposing, assume, assuming, pretend, wish, would be, might,
    may be, maybe, perhaps, possibly, no way, fails? to, than, approximately, roughly,
    approximates?, estimates?, estimated, anywhere, instead of, likely(?! to), guess, guessing,
    probably, presumably, supposedly, allegedly, apparently, hopefully, seemingly,
    nicht, kein\\w*, pas, nunca, jamais, ni, no es, no son, non [èe], non sono, não, niet, geen,
    inte, ikke"""
)
CHANGES_CLAUSE = _compile(
    rf"\b{_NEGATES}\b",
    r"n't\b|n’t\b",
    r"\b(?:if|unless|whether)\b(?:\s+\S+){0,5}\s*\Z",
)
"""Words that change all that follows in their clause."""

NO_CHANGE = _compile(
    r"\bnot (?:hard|difficult) to \w+", r"\b(?:no|without(?: a)?) doubt\b", r"\bno longer\b"
)
"""Exceptions from them."""

AFTER_NO_ANSWER = _compile(
    r"[!?…]",
    r"\s*+(?:[-+*/×·÷^<>=≤≥≠±√\\|–—:~≈‰]|\)+[-+*/×·÷^!]|\([a-z]\))",
    r"\s*+(?:(?:and|or|to|through|out of)\b.*[0-9]|or\b|out of\b|past\b)",
    r"\s*+per (?:hundred|thousand|mille|million|billion|dozen)",
    r"\s*+(?:is|are|was)(?:n't|n’t)",
    rf"\s*+of {COUNTS}\b|\s*+\)\s*+{COUNTS}\b|\s*+est\.",
    r"\s*+[,(]?\s*+(?:below zero|in (?:binary|hex|octal|base)|base [0-9])",
)
"""Text directly after a number that changes its meaning, or is another number."""

_CHANGING = _any_of(
    """never, cannot, unlikely, impossible, maybe, perhaps, possibly, might, may be,
    approximately, roughly, more or less, give or take, at (?:least|most), minimum, maximum, or,
    nor, plus, minus, times, squared, cubed, (?:short|shy) of, below (?:zero|freezing), is an?,
    (?:and )?(?:a |an )?(?:half|quarter|third)"""
)
_DOUBTS = _any_of(
    """probably, presumably, supposedly, allegedly, apparently, hopefully, seemingly, guess,
    guessing, sic, approx, rounded, rounding, nearest, recurring, repeating, unless, otherwise,
    if \\$?(?!a |I )[a-z]\\b, if lucky, (?:when|where|for) \\$?[a-z]\\$? is, depends, depending,
    assuming, provided, too (?:many|few|much|little|large|small|high|low),
    (?:with|and)(?: a| the)? remainder, partial"""
)
DOUBTS = _compile(rf"\b{_DOUBTS}\b")
"""Words that make a number before them, in the same sentence, a guess, a condition or a part."""

_COMPARING = _any_of(
    """too, only part, close, almost, nearly, about, half, twice, double, triple, less, more,
    greater, larger, smaller, one of"""
)
_DENIED = _any_of(
    """the, an?, it, so, in, quite, exactly, right, correct, true, possible, equal, valid, allowed,
    enough, what, my, our, his, her, necessarily, be, been, always"""
)
_OFF = _any_of("away, off, less, fewer, above, below, under, over")
CHANGES_BEFORE_IT = _compile(
    rf"\b{_CHANGING}\b",
    DOUBTS.pattern,
    r"\b(?:short|shy)\s*+(?:\Z|[.,])",
    r"\b(?:do|does|did|can|could|would|will|should|ca|wo) ?(?:not|n't|n’t)\b",
    rf"(?:\bnot|n't|n’t)\b\s*+(?:\Z|[.,;:!)]|{_DENIED}\b)",
    rf"\b(?:is|are|was|were|seems?|looks?) {_COMPARING}\b",
    rf"\A\s*+(?:(?:{_OFF}|more|greater|larger|smaller)?\s*+than|{_OFF}|ish|odd)\b",
    rf"\A\s*+,?\s*+(?:and )?{COUNTS}\b",
    r"\A\s*+(?:around|about)\s*+\Z",
)
"""Words that change a number before them in the same sentence."""

_TAKING_BACK = _any_of(
    """wrong, incorrect, mistaken?, untrue, false, invalid, disregard, ignore (?:that|this|it),
    scratch that, never mind, kidding, joking, but wait, i mean, on second thought, correction,
    oops, on reflection"""
)
_TRUE = _any_of(
    "right, correct, true, sure, certain, it, so, quite, possible, the answer, the result"
)
RETRACTS = _compile(
    rf"\b{_TAKING_BACK}\b",
    rf"(?:\b(?:not|never)|n't|n’t) (?:\w+ )?{_TRUE}\b",
    rf"\b(?:so|thus|hence|therefore) (?:it|the answer|x) (?:is|equals) {COUNTS}\b",
    r"\b(?:it|this|that|answer|result) (?:should|ought to) (?:\w+ )?(?:be|have been)\b(?! \w+ed\b)",
    r"(?:\A|[.!?\n])[^\S\n]*+[*_]*+(?:edit|update|erratum)[*_]*:",
    r"(?:\A|[.,;:!?(\n–—-])[^\S\n]*+(?:no|not|nope|wait|actually|sorry|hmm+|rather|or rather)\b",
)
"""Words that retract the statement before them."""

CAPITAL = re.compile(r"(?:\A|[.!?:\n]\s*)([A-Z]\w+)[.:#]?\s+\Z|\b([A-Z]{2,})\s+\Z")
NO_LABEL = (
    "No Yes Wait Actually So Thus Hence Therefore Total Answer Result Only Exactly Just Is Final "
    "Sum Get Gets Finally Then Now And Also Altogether Overall It Its Equals There The Has Have "
    "Sells Makes Left Need Needs Costs Earns Pays Leaves Leaving Remaining Difference Product "
    "Quotient Number Value Ans Antwort Respuesta Resposta Output "
    "Profit Cost Price Area Perimeter Volume Distance Speed Age Weight Height Length Width Revenue "
    "Income Savings Change Amount Balance"
).split()
"""Capitalized words that name nothing; a number after another one, as in `Psalm 4`, is its
label."""

NEUTRAL_WORDS = (
    "a an are as at because but by each for from he if in is it of on per she so that the they "
    "this total was we were when which while who with go do did had has have will can would after "
    "during every also altogether left leftover remaining remain remains worth without into onto "
    "where got goes back there here then now today these those his her their its you your i my our "
    "each them than or to not no but more additional extra other"
).split()
"""Words after a number in a sentence that are not units."""

ENDINGS = _compile(
    r"in (?:total|all|sum|the end|each|every|one|a)\b",
    r"of (?:them|the|these|those|his|her|their|its|which|all|each)\b",
    r"(?:per|each|every|a|an) [a-z]{3}",
    r"for (?:each|every|all|the|both)\b",
    r"and (?:we|that|this|it|so|hence|thus|therefore|is|are|the answer)\b",
    r"(?:each|left|leftover|remaining|remains?|total|altogether|overall|exactly|only|is|are|was|were|"
    r"because|since|as|which|that|so|who|more|additional|extra|other|worth|also|rather|correctly)\b",
)
"""Texts that may follow a number which no sentence precedes."""

NO_NOUNS = frozenset(
    """if tens ones twos threes fours fives sixes sevens eights nines hundreds thousands tops always
    sometimes its his this was has does yes thus across besides unless afterwards upwards nowadays
    repeats recurs decimals too so perhaps times probably presumably""".split()
)
"""Words that are not plurals of counted things."""
