"""The rewards `number` and `math`: a table of spellings, random rationals, answers that are
expensive to compare."""

import asyncio
import importlib.util
import json
import random
import re
import subprocess
import sys
import threading
from fractions import Fraction
from unittest import mock

import pytest

from tests.components import answer_spellings
from torchtitan.components.rollout import answers
from torchtitan.components.rollout.exact_numbers import MAX_CHARACTERS
from torchtitan.components.rollout.math_reward import MathReward, same_answers
from torchtitan.components.rollout.rewards import Rewards, find_reward
from torchtitan.tools.errors import UserError

PAID_BY_BOTH = [
    ("4", "a total of 4"),
    ("4", "It is not 5 but 4."),
    ("4", 'The answer is "4".'),
    ("4", "This adds up to 4."),
    ("4", "She had no eggs left. So the answer is 4"),
    ("4", "The answer is (4)."),
    # The same number.
    ("42", "42"),
    ("0.5", ".5"),
    (".5", "0.5"),
    ("0.5", "0.50"),
    ("0.5", "1/2"),
    ("1/2", "2/4"),
    ("1/2", r"\frac{1}{2}"),
    ("1/2", r"\frac12"),
    ("1/2", r"\dfrac{1}{2}"),
    ("1/2", r"$\tfrac{1}{2}$"),
    ("1/2", "½"),
    ("1.5", "1½"),
    ("3/2", "1 1/2"),
    ("3/2", r"1\frac{1}{2}"),
    ("-1/2", r"-\frac{1}{2}"),
    ("-1/2", r"\frac{-1}{2}"),
    ("-3", "\u22123"),
    ("\u22123", "-3"),
    ("-3", "\uff0d3"),
    ("3", "+3"),
    ("0", "-0"),
    ("3", "3.0"),
    ("3", "3."),
    ("7", "007"),
    ("100000", "1e5"),
    ("1000", "1e3"),
    ("1000", "1E3"),
    ("1000", "1.0e+3"),
    ("0.0015", "1.5e-3"),
    ("300000", "3 × 10^5"),
    ("300000", r"3 \times 10^5"),
    ("300000", r"$3 \times 10^{5}$"),
    ("300000", "3×10⁵"),
    ("0.003", "3 × 10⁻³"),
    ("300000", r"3 \cdot 10^5"),
    ("1000", "10^3"),
    ("1000", "10³"),
    ("12000", "12 000"),
    ("12000", "12\u00a0000"),
    ("12000", "12\u202f000"),
    ("12000", "12\u2009000"),
    ("12000", "12,000"),
    ("12000", r"12{,}000"),
    ("12000", r"12\,000"),
    ("12,000", "12000"),
    ("1234567.5", "1,234,567.5"),
    ("1234567", "1 234 567"),
    ("0.3", "3/10"),
    ("1/3", "2/6"),
    ("0.125", "⅛"),
    # Lists.
    ("1,2,3", "1,2,3"),
    ("1,2,3", "1, 2, 3"),
    ("1, 1/2", "1.0, .5"),
    ("(1, 2)", "(1,2)"),
    ("(1, 2)", "(1.0, 4/2)"),
    ("(1, 2)", "1, 2"),
    ("1,2,3", "(1,2,3)"),
    # Percent is a hundredth, words are factors.
    ("50%", "50%"),
    ("50%", "50 percent"),
    ("0.5", "50%"),
    ("1/2", r"50\%"),
    (r"50\%", r"$50\%$"),
    ("50%", "0.5"),
    ("5000000", "5 million"),
    ("2500", "2.5 thousand"),
    ("24", "2 dozen"),
    # Units.
    ("5 km", "5 km"),
    ("5 km", "5km"),
    ("5 km", "5000 m"),
    ("5 km", "5 kilometers"),
    ("5 km", r"5 \text{ km}"),
    ("5 km", r"5\,\mathrm{km}"),
    ("5 km", "5"),
    ("90 minutes", "1.5 hours"),
    ("$18", "18 dollars"),
    ("18", "$18"),
    ("18", r"\$18"),
    ("18", "18 dollars"),
    ("$0.50", "50 cents"),
    ("-5", "-$5"),
    ("90", r"90^\circ"),
    ("90", "90°"),
    ("90 degrees", r"90^{\circ}"),
    ("36 km/h", "10 m/s"),
    ("1 m^2", "10000 cm^2"),
    ("5 apples", "5 apples"),
    ("5 apples", "5"),
    ("1 apple", "1 apples"),
    # Marks around the answer.
    ("18", "**18**"),
    ("18", "`18`"),
    ("18", "$18$"),
    ("18", "$$18$$"),
    ("18", r"\(18\)"),
    ("18", r"\[18\]"),
    ("18", "18."),
    # The place of the answer.
    ("42", r"\boxed{42}"),
    ("42", r"It is \boxed{42}, which is 7 times 6."),
    ("42", r"First \boxed{41}. No: \boxed{42}"),
    ("42", r"\fbox{42}"),
    ("1/2", r"\boxed{\frac{1}{2}}"),
    ("42", r"\boxed{x = 42}"),
    ("42", r"\boxed{42 \text{ apples}}"),
    (r"The proof is long. \boxed{42}", "42"),
    # Emphasis of Markdown around a box.
    ("42", r"**\boxed{42}**"),
    ("42", r"So **\boxed{42}**"),
    ("42", r"The answer is **\boxed{42}**."),
    ("42", r"**Answer: \boxed{42}**"),
    ("42", r"**$\boxed{42}$**"),
    ("42", r"_\boxed{42}_"),
    ("42", r"*\boxed{42}*"),
    ("42", r"***\boxed{42}***"),
    ("42", r"__\boxed{42}__"),
    ("42", "**Final Answer:**\n\n**\\boxed{42}**"),
    ("42", r"**\boxed{42}.**"),
    ("42", r"Thus, **the answer is $\boxed{42}$.**"),
    ("42", r"**Final answer:** \boxed{42}"),
    ("42", r"**\boxed{42}** apples"),
    ("42", r"**The answer is \boxed{42}**, because 6 times 7 is 42."),
    ("18", "She sells 9 * 2 = 18 eggs.\n#### 18"),
    ("She sells 9 * 2 = 18 eggs.\n#### 18", "#### 18"),
    ("7", "#### Step 2\nThe total is 7"),
    ("18", "The answer is 18."),
    ("18", "The final answer is: $\\boxed{18}$"),
    ("18", "The answer is **18**."),
    ("18", "**Answer:** 18"),
    ("18", "Answer: 18"),
    ("18", "answer = 18"),
    ("18", "The answer is $18$."),
    ("18", "The answer is:\n\n18"),
    ("18", "The answer is 18 dollars per day."),
    ("18", "The answer is 18 because there are 2 of 9."),
    ("18", "The answer is 18, not 19."),
    ("3.5", "The answer is 3.5. It is not 4."),
    ("7", "The answer is 3 + 4 = 7."),
    ("18", "So she makes 18 dollars."),
    ("18", "9 * 2 = 18"),
    ("72", "In April and May she sold 72 clips altogether."),
    ("5 apples", "She has 5 apples left."),
    ("-5", "It is minus 5, so x = -5"),
    ("5", "x = 5"),
    ("12000", "The town has 12 000 inhabitants."),
    ("2", "First 1, then 2"),
    ("18", "The number of eggs is 18 in total."),
    ("18", "18 is the number of eggs."),
]

PAID_BY_NEITHER = [
    # Two digits with a zero may be day and month.
    ("01/02", "0.5"),
    ("0.5", "The answer is 01/02."),
    ("12/5", "12/05"),
    (r"x \le 5", "x < 5"),
    ("n! = 5", "n != 5"),
    (r"\emptyset", "0"),
    ("0", r"x \in [0,∞)"),
    (r"x \in [0, \infty)", "0"),
    ("0", r"The answer is x \in [0, \infty)."),
    # Words before and after the number.
    ("4", "half of 4"),
    ("4", "a quarter of 4"),
    ("4", "double 4"),
    ("4", "The answer is twice 4."),
    ("4", "the cube of 4"),
    ("4", "the negative of 4"),
    ("4", "the fourth root of 4"),
    ("4", "10 less 4"),
    ("4", "not equal to 4"),
    ("4", "It can't be 4"),
    ("4", "I doubt it is 4"),
    ("4", "all but 4"),
    ("4", "instead of 4"),
    ("4", "4 cannot be right"),
    ("4", "4 (wrong)"),
    ("4", "4 below zero"),
    ("4", "4 degrees below zero"),
    ("11", "11 in binary"),
    ("4", "page 4"),
    ("4", "4 pct"),
    ("4", "4 bps"),
    # Signs next to the number.
    ("4", "The answer is x != 4"),
    ("4", "The answer is —4"),
    ("4", "The answer is ‒4"),
    ("4", "The answer is ⁻4"),
    ("4", "The answer is -​4"),
    ("4", "The answer is - (4)"),
    ("4", "The answer is ∛4"),
    ("4", "The answer is 2＊4"),
    ("4", "The answer is 4̄"),
    ("4", "The answer is 4‰"),
    ("2", "The answer is 1⁄2"),
    ("2", "The answer is 1∕2"),
    ("2", "The answer is 1∶2"),
    ("5", "The answer is 5'"),
    ("5 ft", 'The answer is 5"'),
    ("1", "The answer is 1;2"),
    ("0.3", "The answer is 0.3..."),
    # Dates and other bases.
    ("2024-01-02", "2024-02-01"),
    ("101_2", "101"),
    ("101", "101_2"),
    ("1/2", "3/2"),
    ("1/2", "2"),
    (".5", "5"),
    ("0.5", "5"),
    ("5", ".5"),
    ("3", "-3"),
    ("-3", "3"),
    ("5", "negative 5"),
    ("1e5", "5"),
    ("5", "1e5"),
    ("100", "1e3"),
    ("12", "12 000"),
    ("0", "12 000"),
    ("123", "1,2,3"),
    ("1,2,3", "123"),
    ("3", "1,2,3"),
    ("1,2,3", "1,2"),
    ("1,2,3", "3,2,1"),
    ("1234", "12,34"),
    ("1/3", "0.333333333333"),
    ("0.333333", "1/3"),
    ("3.14", "3.14159"),
    ("1", "0.99999999999999999999"),
    ("1", "1.00000000000000000001"),
    ("9007199254740993", "9007199254740992"),
    ("0.1", "0.1000000000000000055511151231257827"),
    ("50", "50%"),
    ("50%", "50"),
    ("0.5", "0.5%"),
    ("5", "5 million"),
    ("5", "5 thousand"),
    ("5", "5k"),
    ("5", "5M"),
    ("5 km", "5 m"),
    ("5 m", "5 km"),
    ("5 km", "5 miles"),
    ("5 kg", "5 km"),
    ("5 km", "5 km/h"),
    ("5 m", "5 m^2"),
    ("5 hours", "5 minutes"),
    ("$5", "5 cents"),
    ("$5", "€5"),
    ("5", "5 m"),
    ("5 apples", "5 oranges"),
    ("5 apples", "She has 5 oranges."),
    ("5 apples", r"\boxed{5} oranges"),
    ("$20", "$20 an hour"),
    ("$20 an hour", "$20"),
    ("$20 an hour", "$20 a day"),
    ("8 hours", "8 hours a day"),
    ("5", r"\boxed{5} m"),
    ("5 m", r"\boxed{5} m + 3"),
    ("5 m", r"\boxed{5} m x"),
    ("5 m", r"\boxed{5} m/s"),
    ("5 m", r"\boxed{5} m^2"),
    ("5 km", r"\boxed{5} m"),
    ("5", "5x"),
    ("5", "5 x"),
    ("5", "5ab"),
    ("2", "2xy"),
    ("5", r"5\pi"),
    ("5", "5π"),
    ("5", "5 pi"),
    ("5", "5i"),
    ("5", "5!"),
    ("5", "5th"),
    ("5", "5 squared"),
    ("5", "5 tenths"),
    ("5", "5 and a half"),
    ("5", "5 or more"),
    ("5", "5²"),
    ("2", "5²"),
    ("52", "5²"),
    ("5", "5^2"),
    ("2", "5^2"),
    ("3", "√3"),
    ("3", r"\sqrt{3}"),
    ("3", "sqrt(3)"),
    ("3", "f(3)"),
    ("3", "log 3"),
    ("6", "5 or 6"),
    ("5", "5 or 6"),
    ("6", "(5, 6)"),
    ("6", "{5, 6}"),
    ("6", "[5, 6]"),
    ("5", "x > 5"),
    ("5", "x ≠ 5"),
    ("5", "x < 5"),
    ("5", "±5"),
    ("5", "|5"),
    ("5", "The answer is not 5."),
    ("5", "The answer isn't 5."),
    ("5", "It is more than 5"),
    ("5", "We know that 5 is not the answer"),
    ("5", "I think that 5 isn't right"),
    ("5", "No, 5 was wrong."),
    ("5", "It is at least 5"),
    ("5", "Is it 5?"),
    ("5", "between 4 and 5"),
    ("5", "from 4 to 5"),
    ("5", "4–5"),
    ("5", "4-5"),
    ("5", "4 - 5"),
    ("5", "4 -5"),
    ("5", "3 + 5"),
    ("5", "3 * 5"),
    ("5", "10 divided by 5"),
    ("5", "Route-5"),
    ("5", "2020-01-05"),
    ("5", "1.2.5"),
    ("30", "10:30"),
    ("10", "10:30"),
    ("10:30", "10:45"),
    ("10:30", "30"),
    ("1/3", "10:30"),
    ("41", r"First \boxed{41}. No: \boxed{42}"),
    ("7", r"\boxed{42} is 6 times 7"),
    # Other marks than emphasis, and emphasis of what changes the number.
    ("42", r"2**\boxed{42}**"),
    ("42", r"2 * **\boxed{42}**"),
    ("42", r"x_\boxed{42}_"),
    ("42", r"x **\boxed{42}**"),
    ("42", r"**\boxed{42}**2"),
    ("42", r"**\boxed{42}** * 2"),
    ("42", r"**\boxed{42}** or **\boxed{5}**"),
    ("42", r"**\boxed{5}** or **\boxed{42}**"),
    ("42", r"**\boxed{42}** is wrong. The answer is 5."),
    ("42", r"**not \boxed{42}**"),
    ("42", r"-**\boxed{42}**"),
    ("42", r"**\boxed{42}** thousand"),
    ("42", r"**2 * \boxed{42}**"),
    ("42", r"**10 -** \boxed{42}"),
    ("42", r"**2** \boxed{42}"),
    ("42", r"2**3** \boxed{42}"),
    ("42", r"**half of** \boxed{42}"),
    ("42", r"\boxed{5 or 42}"),
    ("42", r"\boxed{} 42"),
    ("42", r"42 \boxed{41"),
    ("2", "#### Step 2\nno idea"),
    ("2", "The answer is 18 because there are 2 eggs."),
    ("19", "The answer is 18, not 19."),
    ("5", "The answer is the sum of 5 and 6, 11"),
    ("3", "The answer is 3 + 4"),
    ("4", "The answer is 3.5. It is not 4."),
    ("5", "9**9**9"),
    ("9", "9**9**9"),
    ("9", "9^9^9"),
    ("1", "1e999999999"),
    ("0", "1e-999999999"),
    ("1", "1" * 5000),
    ("42", ""),
    ("42", "none"),
    ("42", "forty-two"),
    ("", ""),
    ("", "42"),
    ("1/0", "1/0 or so"),
    ("0", "1/0"),
]

PAID_BY_MATH = [
    # Spellings of one symbol.
    (r"x \le 5", r"x\leq 5"),
    ("x ≤ 5", "x <= 5"),
    (r"x \neq 5", r"x \ne 5"),
    (r"x \in [0, \infty)", r"x \in [0,∞)"),
    (r"\emptyset", r"\varnothing"),
    ("A", "The answer is A."),
    ("A", "Answer: A because it is larger"),
    (r"\pi", "π"),
    (r"\frac{\pi}{2}", "π/2"),
    ("yes", "Yes"),
    ("yes", "The answer is yes."),
    ("blue", r"\text{Blue}"),
    ("the blue one", "blue one"),
    ("A", "(A)"),
    ("A", "A."),
    ("B", r"\boxed{\text{(B)}}"),
    ("10:30", "10:30"),
    ("10:30 am", "10:30 a.m."),
    ("22:30", "10:30 pm"),
    ("[0, 1)", r"\left[0, 1\right)"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    (r"[0,1] \cup [2,3]", r"[0, 1]\cup[2, 3]"),
    (r"\sqrt{3}/2", r"\frac{\sqrt{3}}{2}"),
    (r"\frac{\sqrt{3}}{2}", "sqrt(3)/2"),
    (r"\frac{\sqrt{3}}{2}", r"The value is $\frac{\sqrt{3}}{2}$."),
    ("x^2+2x+1", "(x+1)^2"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    ("2^{10}", "1024"),
    ("1024", "2^{10}"),
    ("2", r"\sqrt{4}"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    ("y = 2x+1", "2x + 1"),
    ("y = 2x+1", "y = 1 + 2x"),
    ("x > 5", "x>5"),
    ("24", "4!"),
    (r"(\sqrt{4}, 1)", "(2, 1)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]

PAID_BY_NEITHER += [
    ("east", "seat"),
    ("listen", "silent"),
    ("yes", "no"),
    ("A", "B"),
    ("AB", "BA"),
    ("ab", "AB"),
    ("10:30", "21:00"),
    ("10:30 am", "10:30 pm"),
    ("10:30 am", "10:30"),
    ("2:1", "1:2"),
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "[1, 2]"),
    ("(0, 1)", "[0, 1)"),
    (r"\{1, 2\}", r"\{1, 2, 2\}"),
    (r"\{1, 2\}", "(1, 2)"),
    (r"\sqrt{2}", "1.414214"),
    ("1.414214", r"\sqrt{2}"),
    (r"\pi", "3.14159265"),
    (r"\frac{22}{7}", r"\pi"),
    ("x^2", "x^3"),
    ("X^2", "x^2"),
    ("N + n", "2n"),
    ("5", "3 + 1 = 5"),
    ("x", "y"),
    ("x + 1", "y + 1"),
    ("x = 5", "y = 5"),
    ("x^2 - 1", "(x - 1)^2"),
    ("x > 5", "x < 5"),
    ("x > 5", r"x \geq 5"),
    (r"\sqrt{x^2}", "x"),
    ("5!", "5"),
    (r"\log_2 8", r"\log_3 8"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
]


PAID_BY_BOTH += answer_spellings.PAID_BY_BOTH
PAID_BY_NEITHER += answer_spellings.PAID_BY_NEITHER
PAID_BY_MATH += answer_spellings.PAID_BY_MATH

PLACES = [
    "{}",
    "The answer is {}.",
    "So it is {}.",
    r"\boxed{{{}}}",
    r"$\boxed{{{}}}$",
    r"\boxed{{\text{{{}}}}}",
    "#### {}",
    "<answer>{}</answer>",
    "Total: {}",
    "${}$",
    "**{}**",
    "The final answer is ${}$.",
    "Hence the result is: {}\n\nI hope this helps",
    "We add them up.\n\n{}",
    "x = {}",
]
NOT_FOUR = re.split(
    r" \| |\n",
    r"""not 4 | never 4 | maybe 4 | about 4 | approximately 4 | ≈4 | ≈ 4 | ~4 | \approx 4 | 4 or 5
4-5 | 4 - 5 | 4 to 5 | between 3 and 4 | 4, 5 | 4; 5 | 4 and 5 | (4, 5) | <4 | > 4 | ±4 | 4±1
4 \pm 1 | at least 4 | 4 at most | 4+ | 4 or more | x > 4 | 4 dozen | 4 pairs | 4 couples
4 hundred | 4 million | 4 cents | 4 radians | 4k | 4% | 4\% | 4 percent | 4‰ | 4! | 4th | 4²
4^2 | 4e3 | 4 × 10^3 | 4_5 | 4i | 4π | -4 | −4 | minus 4 | half of 4 | twice 4 | \sqrt{4} | 4/5
4 1/2 | 4½ | 4\frac{1}{2} | 4.5 | 4,5 | 44 | 1,004 | 1'004 | 1 004 | .4 | 3:4 | 4:00 | 4 pm
4 May | May 4 | Option 4 | option 4 | No. 4 | #4 | 4 out of 5 | 4 apples and 5 oranges | IV
four | x = 5 = 4 | 5 = 4 | 2x = 4 | 4 + 1 | 4 - x | 4x | 4 mod 5 | 4 hours 30 minutes | 4?""",
)


def paid(reward: str, gold: str, answer: str) -> float:
    return find_reward(reward)("", answer, {"answer": gold})


def test_the_table_has_enough_rows():
    assert len({*PAID_BY_BOTH, *PAID_BY_NEITHER, *PAID_BY_MATH}) >= 200


@pytest.mark.parametrize(("gold", "answer"), PAID_BY_BOTH)
def test_number_pays(gold, answer):
    assert paid("number", gold, answer) == 1


@pytest.mark.parametrize(("gold", "answer"), PAID_BY_NEITHER + PAID_BY_MATH)
def test_number_does_not_pay(gold, answer):
    assert paid("number", gold, answer) == 0


@pytest.fixture(scope="module")
def math():
    pytest.importorskip("math_verify")
    return find_reward("math")


def test_math_pays(math):
    wrong = [
        pair for pair in PAID_BY_BOTH + PAID_BY_MATH if not math("", pair[1], {"answer": pair[0]})
    ]
    assert wrong == []


def test_math_does_not_pay(math):
    wrong = [pair for pair in PAID_BY_NEITHER if math("", pair[1], {"answer": pair[0]})]
    assert wrong == []


@pytest.mark.parametrize("place", PLACES)
def test_no_place_makes_another_answer_right(place, math):
    texts = [place.format(text) for text in NOT_FOUR]
    assert [text for text in texts if paid("number", "4", text)] == []
    assert [text for text in texts if math("", text, {"answer": "4"})] == []


def test_last_lines_of_real_solutions_are_mostly_paid(assets):
    """The last line of a solution often gives two numbers, or a rounded one, and is then no
    answer."""
    rows = [json.loads(line) for line in (assets / "sft/gsm8k_train.jsonl").open()][:500]
    solutions = [re.sub("<<[^>]*>>", "", row["answer"]).split("\n####") for row in rows]
    number_of_paid = sum(
        paid("number", gold.strip(), text.split("\n")[-1]) for text, gold in solutions
    )
    assert number_of_paid >= 0.85 * len(rows)


SPELLINGS = (
    lambda value: f"{value.numerator}/{value.denominator}",
    lambda value: f"{3 * value.numerator}/{3 * value.denominator}",
    lambda value: f"{value.numerator} / {value.denominator}".replace("-", "\u2212"),
    lambda value: rf"\frac{{{value.numerator}}}{{{value.denominator}}}",
    lambda value: rf"$\dfrac{{{7 * value.numerator}}}{{{7 * value.denominator}}}$",
    lambda value: (
        rf"Since 3 is not 4, it is \boxed{{\tfrac{{{value.numerator}}}{{{value.denominator}}}}}. 5"
    ),
    lambda value: f"It follows.\n#### {value}",
    lambda value: f"The answer is **{value}**.",
    lambda value: f"x = {value}",
)
DECIMAL_SPELLINGS = (
    lambda value: decimal(value),
    lambda value: decimal(value) + "0",
    lambda value: decimal(value).replace("0.", ".") if abs(value) < 1 else decimal(value),
    lambda value: decimal(value * 1000) + "e-3",
    lambda value: decimal(value / 100) + "E+2",
    lambda value: rf"{decimal(value / 1000)} \times 10^{{3}}",
    lambda value: decimal(value * 100) + "%",
    lambda value: decimal(value * 100).replace("-", "\uff0d") + r" \%",
)
WHOLE_SPELLINGS = (
    lambda value: f"{value:,}",
    lambda value: f"{value:,}".replace(",", " "),
    lambda value: f"{value:,}".replace(",", "\u202f"),
    lambda value: f"{value:,}".replace(",", r"\,"),
    lambda value: f"{value}.0",
    lambda value: f"{value} apples",
    lambda value: f"So it is {value} in total.",
)


def decimal(value: Fraction) -> str:
    """Return the exact decimal of a fraction whose denominator divides a power of ten."""
    digits = value * 10**12
    assert digits.denominator == 1
    sign, text = "-" if digits < 0 else "", str(abs(digits.numerator)).rjust(13, "0")
    return f"{sign}{text[:-12]}.{text[-12:]}".rstrip("0") + "0"


def random_values(seed: int):
    """Yield a rational, its spelling, and another rational near it."""
    numbers = random.Random(seed)
    for _ in range(500):
        kind = numbers.randrange(3)
        if kind == 0:
            value, spellings = (
                Fraction(numbers.randint(-999, 999), numbers.randint(2, 99)),
                SPELLINGS,
            )
        elif kind == 1:
            value = Fraction(numbers.randint(-99999, 99999), 10 ** numbers.randint(0, 5))
            spellings = DECIMAL_SPELLINGS
        else:
            value, spellings = Fraction(numbers.randint(-(10**7), 10**7)), WHOLE_SPELLINGS
        spelling = numbers.choice(spellings)(int(value) if kind == 2 else value)
        change = Fraction(numbers.choice((-1, 1)), 10 ** numbers.randint(0, 30))
        yield value, spelling, value + change * abs(value or 1)


def unequal(gold: str, answer: str) -> bool:
    return False


def test_a_rational_equals_all_its_spellings_and_no_other():
    number = find_reward("number")
    for value, spelling, other in random_values(0):
        for pays in (
            lambda gold, answer: number("", answer, {"answer": gold}),
            lambda gold, answer: same_answers(gold, answer, unequal),
        ):
            assert pays(str(value), spelling), spelling
            assert pays(spelling, str(value)), spelling
            assert not pays(str(other), spelling) and not pays(spelling, str(other)), (
                spelling,
                other,
            )


def test_spellings_of_different_rationals_are_different():
    number = find_reward("number")
    pairs = list(random_values(1))
    for (value, spelling, _), (other, another, _) in zip(pairs, pairs[1:], strict=False):
        assert number("", another, {"answer": spelling}) == (value == other), (spelling, another)


@pytest.mark.parametrize("part", ["9", "1e9", "(", "2,", "2 ", "{", "2/", ".", r"\frac"])
@pytest.mark.parametrize("place", ["{}", r"\boxed{{{}}}", "The answer is {}", "#### {}", "${}$"])
def test_a_long_answer_is_not_paid_and_takes_no_process(part, place):
    number = find_reward("number")
    repeats = 200_000 if place == "{}" else 20_000  # reading takes the time
    text = place.format(repeats * part)
    assert number("", text, {"answer": "1"}) == 0
    check = mock.Mock(return_value=False)
    assert not same_answers("1", text, check)
    assert check.call_count == 0


@pytest.mark.parametrize("part", [" so 1", "\nso 4", "\n", ".so", r"\boxed{4} "])
def test_the_text_after_an_answer_is_read_in_parts_of_bounded_length(part, monkeypatch):
    read = mock.Mock(wraps=answers.number_in_sentence)
    monkeypatch.setattr(answers, "number_in_sentence", read)
    text = r"\boxed{4}" + 200_000 // len(part) * part
    is_paid = part in ("\nso 4", "\n", ".so", r"\boxed{4} ")
    assert paid("number", "4", text) == is_paid
    assert all(len(call.args[0]) <= MAX_CHARACTERS + 1 for call in read.call_args_list)
    assert read.call_count < 10


@pytest.mark.parametrize(
    ("start", "part", "times", "end", "pays"),
    [
        ("", ") ", 40, "the word = 4", True),
        ("The answer is +", " ", 900, "4", False),
        ("4", " ", 900, "x", False),
        ("", "_", 900, " the answer is 4", True),
        ("\\boxed{4}\nx", "\n", 200_000, "x", True),
        ("\\boxed{4}\nx", "\n", 200_000, "No, it is 5", False),
        ("", "#### 4\n", 2000, "", True),
        ("", "The answer is \\boxed{4}.\n", 5000, "", True),
        ("", "so \\boxed{4}. ", 5000, "", True),
        ("", "\\boxed{4}\n", 20_000, "", True),
        ("", "\\boxed{4}\n", 20_000, "\\boxed{5}", False),
        ("", "\\boxed{", 20_000, "4", False),
        ("The answer is 4", "</s> ", 20_000, "", True),
        ("", "> a\n", 20_000, "> The answer is 4", True),
        ("", "```\n", 20_001, "4", True),
        ("The answer is 4", "✅ ", 20_000, "", True),
        ("The answer is 4 ", "QED ", 20_000, "x", False),
        ("The answer is 4 ", "\\qed", 20_000, "x", False),
        ("The answer is 4", "✅.", 20_000, "x", False),
        ("The answer is \\boxed{4}", "\n", 20_000, "x", True),
        ("\\begin{align}", "\\\\[", 20_000, "", False),
    ],
)
def test_no_pattern_tries_a_repeated_part_in_many_ways(start, part, times, end, pays):
    """Such a pattern would not end for the first text, and take minutes for others."""
    assert paid("number", "4", start + times * part + end) == pays


@pytest.mark.parametrize(
    ("joint", "contents", "pays"),
    [
        (" ", range(10_000), False),
        (", ", range(10_000), False),
        (" and then ", range(10_000), False),
        (" is {} and ", [4] * 10_000, False),
        (", ", [4] * 10_000, True),
    ],
)
def test_few_of_many_boxes_are_read(joint, contents, pays):
    """The last ones decide; 10,000 took 8 seconds of processor time."""
    read = answers._answer_of_box
    with mock.patch.object(answers, "_answer_of_box", side_effect=read) as reader:
        parts = (rf"\boxed{{{n}}}{joint.format(i)}" for i, n in enumerate(contents))
        assert paid("number", "4", "".join(parts).removesuffix(joint)) == pays
    assert reader.call_count <= answers._MOST_BOXES


def test_a_comparison_that_takes_too_long_is_ended_and_the_next_one_works(caplog):
    """A harmless sum with a time of nearly nothing, in place of one that takes long: the first of a
    process imports SymPy's parsers, which takes many ticks of the timer."""
    pytest.importorskip("math_verify")
    reward = MathReward(seconds=1e-6)
    assert [reward(r"\sqrt{27}", r"3\sqrt{3}") for _ in range(2)] == [0, 0]
    assert (
        reward.n_ended == 2
        and caplog.text.count("took too long; such answers count as unequal") == 1
    )
    reward._seconds = 60
    assert reward(r"\sqrt{27}", r"3\sqrt{3}") == 1
    reward.close()


def test_time_of_other_programs_does_not_count():
    """A comparison that waits, as on a busy machine, is not ended."""
    pytest.importorskip("math_verify")
    code = (
        "import time\n"
        "from torchtitan.components.rollout import math_process\n"
        "math_process.are_equal = lambda gold, answer: time.sleep(1) is None\n"
        "math_process.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], input='[0.5, "a", "b"]\n', capture_output=True, text=True
    )
    assert ended.stdout.split() == ['""', "true"]


def test_math_works_off_the_main_thread_and_in_asyncio(math):
    rows = [(r"\sqrt{8}", r"2\sqrt{2}", 1), (r"\sqrt{8}", r"3\sqrt{2}", 0)] * 3
    found = {}

    def compare(number: int) -> None:
        gold, answer, _ = rows[number]
        found[number] = math("", answer, {"answer": gold})

    threads = [threading.Thread(target=compare, args=(number,)) for number in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(rows))] == [expected for *_, expected in rows]

    async def program() -> float:
        return await asyncio.to_thread(math, "", rows[0][1], {"answer": rows[0][0]})

    assert asyncio.run(program()) == 1


def test_math_is_symmetric(math):
    assert [pair for pair in PAID_BY_MATH if not math("", pair[0], {"answer": pair[1]})] == []
    assert [pair for pair in PAID_BY_NEITHER if math("", pair[0], {"answer": pair[1]})] == []


def test_math_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=r"--rewards: math needs the package math-verify: pip install 'torchtitan\[math",
    ):
        Rewards(["math"], [])


@pytest.mark.parametrize(
    "parameters", ["prompt, completion", "prompt, completion, **row", "prompts, a, b, c"]
)
def test_a_function_with_other_parameters_is_refused_before_it_is_called(parameters, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"def score({parameters}):\n    return 1.0\n")
    with pytest.raises(UserError, match=r"--rewards: .*mine.py:score has the parameters \("):
        Rewards([f"{file}:score"], [])


@pytest.mark.parametrize("parameters", ["*text", "prompt, completion, row, images", "a, b, c=0"])
def test_a_function_that_can_be_called_is_accepted(parameters, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"def score({parameters}):\n    return 1.0\n")
    rating = asyncio.run(Rewards([f"{file}:score"], []).rate("", "", {}))
    assert rating.value == 1.0


def test_a_reference_that_is_no_number_is_named_once(caplog):
    for _ in range(3):
        assert paid("number", "several words of this test", "42") == 0
    assert (
        caplog.text.count("'several words of this test', which is no single number; use math") == 1
    )
