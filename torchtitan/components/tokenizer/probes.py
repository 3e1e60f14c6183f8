"""Texts that reveal differences between a converted tokenizer and the library that defines its
ids."""

from collections.abc import Sequence

_TEXTS = (
    "This is a test sentence.",
    "   leading and trailing   ",
    "a  b   c\t\td \n \n\n\r\n  e    ",
    *(" " * n for n in (1, 2, 3, 7, 16, 33)),
    "1 12 123 1234 12345678 3.14159 1,000,000 0xFF",
    "def f(x: int) -> int:\n    return x**2  # ok\n\n\nprint(f(3), 'it''s')\n",
    "IT'S we'LL they've " + "a" * 25 + " ======== -------- ........",
    "Größere Übungen über naïve Fälle, señor: l'été à Łódź. ﬁ Ⅷ ½ ２０",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα.",
    "نص حكيم له سر قاطع وذو شأن عظيم. सभी मनुष्यों को गौरव और अधिकार।",
    "我能吞下玻璃而不伤身体。私はガラスを食べられます。 한국어 ไทย",
    "👩‍👩‍👧‍👦 🎉🏳️‍🌈 e\u0301 \u00a0 \u200b \u2581 ▁▁",
    "<0x41> <s> </s> <unk> <pad> [INST] x [/INST]",
)
_N_ADDED = 300
_N_SAMPLED = 2000
_N_MIXTURES = 50


def probe_texts(added: Sequence[str], vocabulary: Sequence[str]) -> list[str]:
    """Return texts with runs of spaces, digits, code and several scripts, each of (at most 300)
    `added` tokens within text, and mixtures of (about 2,000) texts of the vocabulary."""
    sampled = vocabulary[:: max(1, len(vocabulary) // _N_SAMPLED)]
    mixtures = ["".join(sampled[start::_N_MIXTURES]) for start in range(_N_MIXTURES)]
    return [*_TEXTS, *(f"a{text}b {text} c" for text in added[:_N_ADDED]), *mixtures]
