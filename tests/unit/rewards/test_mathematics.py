"""`math-verify` with answers as data sets publish them: right in several spellings, and wrong ones that are near."""

import pytest

from megarl.rewards import isolated, mathematics
from megarl.rewards.base import Sample, ScoringError

# A reference, right answers, wrong answers. From MATH, GSM8K, OlympiadBench, Minerva, NuminaMath, GAOKAO, AQuA and
# the tests of math-verify; a wrong one is a part of the right one or another number, unit, base or order.
FORMS = [
    # Separators of thousands
    ("10000", [r"10\,000", r"10{,}000", r"10,\!000", "10,000", "10 000", r"10\ 000", "10~000", "10\u2009000",
               "10\u202f000", "10\u00a0000", r"10\;000", "10000.0"], ["10", "0", "1000", r"10\,001", r"1\,000"]),
    (r"1\,010", ["1010", "1,010"], ["11", "1", "10"]),
    ("11,\\! 111,\\! 111,\\! 100", ["11111111100", r"11{,}111{,}111{,}100"], ["11", "100", "11111111000"]),
    (r"32{,}348.5", ["32348.5", r"\$32,348.50"], ["32", "348.5", "32348"]),
    ("10000023", [r"10\,000\,023"], ["23", "33"]),
    # Signs, digits
    ("-5", ["\u22125", "\uff0d5", r"\boxed{-5}"], ["5"]),
    ("12", ["\uff11\uff12", "\u0661\u0662"], ["1", "2"]),
    ("-\\frac{1}{2}", ["\\frac{-1}{2}", "-0.5", "-1/2", "\u2212\u00bd", "-\\tfrac12", "-.5"], ["\\frac12", "1", "2"]),
    # Units
    (r"2\sqrt{3} \text{ units}", [r"2\sqrt{3}", r"$2\sqrt{3}$", r"\sqrt{12}", "2\u221a3"], ["2", "3", r"\sqrt{3}"]),
    (r"3\pi \text{ cm}", [r"3\pi", r"3\pi\ \mathrm{cm}", "3\u03c0"], ["3", r"\pi"]),
    (r"\sqrt{2} \text{ inches}", [r"\sqrt{2}", r"\sqrt2\text{ in}"], ["2", "1"]),
    (r"15\mbox{ cm}^2", ["15", r"15\text{ cm}^2", r"15 \mathrm{~cm}^{2}", "15 cm"], ["2", "152", "225"]),
    (r"5\text{ m} / \text{s}^2", ["5", r"5 \mathrm{~m} / \mathrm{s}^{2}"], ["25", "2"]),
    (r"36\sqrt{7}\,\mathrm{cm}^{3}", [r"36\sqrt{7}"], ["36", "7"]),
    ("125 miles", ["125", r"125\textnormal{ miles}", r"\text{125 miles}"], ["12", "5"]),
    ("9 apples", ["9", r"9\text{ apples}"], ["8"]),
    ("2t", ["2 t", "t+t", "t2"], ["2", "t"]),
    (r"\frac{37}{4} m", [r"\frac{37m}{4}", "9.25m"], [r"\frac{37}{4}"]),
    ("$3 n$", ["3n", "2n+n"], ["3", "n"]),
    ("$10-4 n$", ["10-4n", "-4n+10"], ["10", "6", "4"]),
    (r"8 \text{ hours } 30 \text{ minutes}", [r"8\text{ hours }30\text{ minutes}", "8 hours 30 minutes"], ["8", "30"]),
    (r"5 \text{ if } x \text{ is even}", [r"5\text{ if }x\text{ is even}"], ["5", "x"]),
    ("5 million", ["5000000", r"5 \text{ million}", r"5\times 10^6"], ["5", "5000"]),
    # Money, percents, degrees, ordinals
    (r"\$32,348", ["32348", r"\$32{,}348", "$32,348$", "\u20ac32348"], ["32", "348"]),
    (r"\$5.50", ["5.5", r"\frac{11}{2}", "5.50 dollars"], ["5", "50"]),
    (r"50\%", [r"\frac{1}{2}", "0.5", "50%", "50 percent", r"50\text{ percent}"], ["5", "0.05"]),
    (r"\frac{1}{2}\%", [r"\frac{1}{200}", "0.5%"], [r"5\%", "1"]),
    (r"45^\circ", ["45", r"45^{\circ}", "45\u00b0", r"45\text{ degrees}"], ["4", "5", r"54^\circ"]),
    (r"3^{\text{rd}}", ["3", "3rd", r"3\text{rd}"], ["2"]),
    # Fractions, decimals, powers of ten
    (r"\frac{3}{4}", ["3/4", "0.75", r"\dfrac{3}{4}", r"\tfrac34", r"\frac{6}{8}"], ["3", "4", r"\frac43"]),
    (r"3\frac{1}{2}", ["3.5", "7/2", r"3 \frac{1}{2}", "3\u00bd"], ["3", r"\frac12", r"\frac32"]),
    (r"0.\overline{3}", [r"\frac13", "1/3"], ["0.3", "3"]),
    (r"0.1\overline{6}", [r"\frac16"], ["0.16", "0.1"]),
    ("4.5e33", [r"4.5 \times 10^{33}", r"4.5 \cdot 10^{33}"], ["4.5", r"4.5\times 10^{32}", "33"]),
    ("1.6e-19", [r"1.6 \times 10^{-19}"], ["0", "9.1e-31", r"1.6\times10^{-18}"]),
    ("1.5 \\times 10^{3}", ["1500", "1.5e3", "1.5 \u00d7 10\u00b3"], ["1.5", "1530"]),
    (r"$\approx 15.15^{\circ} \mathrm{F}$", ["15.15", r"15.15\text{ degrees}"], ["15", r"\approx 15.1"]),
    (r"3.00 \times 10^{8} \text{ m/s}", ["3e8", "300000000", r"3\times10^8"], ["30", "3", r"3\times 10^{9}"]),
    ("2**10", ["2^10", "1024", "2^{10}"], ["2", "20", "0"]),
    ("10^-3", ["0.001", r"\frac{1}{1000}"], ["3", "-3", "7"]),
    # Several numbers, sets, intervals, points, matrices
    (r"1 \text{ or } 2", ["1, 2", r"\{1,2\}", "1 or 2", r"1\text{ and }2", "2,1"], ["1", "2", "12"]),
    (r"x=1 \text{ or } x=2", ["1,2", "x=1, x=2", "x = 2 or x = 1"], ["1", "x=2"]),
    ("$48$, $384$", ["48, 384", r"48 \text{ and } 384"], ["48", "384"]),
    ("$5$ or $9$", ["5, 9", r"5\text{ or }9"], ["5", "9"]),
    (r"1 \pm \sqrt{19}", [r"1+\sqrt{19}, 1-\sqrt{19}", "1 \u00b1 \u221a19"], [r"1+\sqrt{19}", "1"]),
    (r"\pm 2", ["2, -2", r"\{-2, 2\}"], ["2", "-2"]),
    (r"\{1\pm\sqrt{5},-2\}", [r"\{-2, 1+\sqrt5, 1-\sqrt5\}"], ["-2", r"1\pm\sqrt5"]),
    ("{1,2,3}", [r"\{1,2,3\}", r"\{3,2,1\}"], ["123", "3", r"\{1,2\}"]),
    ("[0,1)", [r"\left[0,1\right)", r"x \in [0,1)"], ["[0,1]", "(0,1)", "1", "0"]),
    (r"(-\infty, 3] \cup (5, \infty)", [r"(5,+\infty)\cup(-\infty,3]"], ["3", r"(-\infty,3]"]),
    ("(3,-2)", [r"\left(3,-2\right)", "(3, -2)"], ["(-2,3)", "3", "-2"]),
    (r"\left(\frac{1}{2},3,4\right)", ["(0.5,3,4)"], ["(3,0.5,4)", "4"]),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\begin{bmatrix}1\\2\end{bmatrix}"],
     ["2", "1", r"\begin{pmatrix}2\\1\end{pmatrix}"]),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", [r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]"],
     ["4", "1234"]),
    ("1:2:3", ["1 : 2 : 3", "1:2:3"], ["1:6", "6", r"\frac16", "1:3:2"]),
    ("7:32", [r"7:32", r"\frac{7}{32}"], ["7", "32", "32:7"]),
    # Equations, inequalities, expressions, constants
    ("x = 5", ["5", "x=5", r"5\text{ units}"], ["x", "-5"]),
    (r"\text{Area} = 12", ["12"], ["1", "2"]),
    ("x > 3", [r"x \gt 3", "3 < x", r"(3,\infty)"], ["3", "x < 3", r"x\ge 3"]),
    (r"2 \le x < 5", ["[2,5)", r"2\leq x<5"], ["2", "5", "(2,5)"]),
    ("x^2+2x+1", ["(x+1)^2", "1 + 2x + x^2", "x\u00b2 + 2x + 1"], ["1", "x^2", "x^2+2x"]),
    ("y = 2x + 3", ["y=3+2x", "2x+3"], ["3", "y=2x"]),
    (r"\frac{\pi}{3}", ["\u03c0/3", r"60\pi/180"], ["1/3", "3", "60"]),
    (r"-\infty", ["-\u221e", r"-\infty"], [r"\infty", "0"]),
    (r"4-\mathrm{i}", ["4-i", "-i+4"], ["4", "4+i"]),
    ("ln2", [r"\ln 2", r"\ln{2}"], ["2", r"\ln 3"]),
    (r"k\pi, k \in \mathbb{Z}", [r"k\pi,\ k\in\mathbb{Z}"], ["k", r"\pi"]),
    # Bases
    ("1011_2", ["1011_{2}", "1011", "1011\u2082"], ["1011_3", "11", "2", "101"]),
    ("204_5", ["204_{5}"], ["204_6", "54"]),
    # Choices, names, dates
    (r"\text{(A)}", ["A", "(A)", r"\textbf{(A)}", r"\mathrm{A}", r"\text{A}", "A.", "(A).", r"\text{(A) }"],
     ["B", "(B)", "AB"]),
    ("C", [r"\text{C}", r"\textbf{(C)}"], ["D"]),
    (r"\text{Evelyn}", ["Evelyn", "evelyn", r"\textbf{Evelyn}"], ["Evelin", "E", "Briana"]),
    ("Paris", ["Paris", r"\text{Paris}"], ["Pairs", "P"]),
    (r"\text{odd}", ["odd", "Odd"], ["even", "ddo"]),
    (r"\text{no solution}", ["no solution", "No solution."], ["solution", "0", "no"]),
    (r"\text{necessary but not sufficient}", [r"\text{necessary but not sufficient}"],
     [r"\text{sufficient but not necessary}"]),
    ("March 5, 2020", [r"\text{March 5, 2020}", "march 5, 2020"], ["5", "2020", "March 5, 2021", "March 6, 2020"]),
    ("2020-03-05", ["2020-03-05"], ["2012", "2020-05-03", "5"]),
    ("1:58 am", [r"1:58\text{ am}", "1:58 am"], ["1:58 pm", "1:58", "1"]),
    (r"\text{May 5}", ["May 5"], ["5", "May 6"]),
    # Lines of data sets that hold more than the answer
    ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", ["18", r"\$18"], ["9", "2"]),
    (r"so the sum is \boxed{2\sqrt{3}}", [r"2\sqrt{3}"], ["2", "3"]),
    ("The mode is $1 / 3$.", [r"\frac13", "1/3"], ["1", "3"]),
]  # fmt: skip


def reward(reference, response):
    return mathematics.score_inside(Sample("q", response, reference)).reward


@pytest.mark.parametrize("reference, right, wrong", FORMS, ids=[form[0][:40] for form in FORMS])
def test_published_forms(reference, right, wrong):
    found = {answer: reward(reference, rf"So \boxed{{{answer}}}.") for answer in [*right, *wrong]}
    assert found == {**dict.fromkeys(right, 1.0), **dict.fromkeys(wrong, 0.0)}
    assert reward(reference, reference) == 1.0
    dollars = reference if "$" in reference or "box" in reference or "#" in reference else f"${reference}$"
    assert [reward(dollars, rf"\boxed{{{answer}}}") for answer in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize("answer", [r"\text{}", "$$", "."])
def test_an_answer_without_text_is_refused(answer):
    with pytest.raises(ScoringError, match="cannot read the answer"):
        isolated.score("math-verify", 60.0, Sample("q", "1", answer))
