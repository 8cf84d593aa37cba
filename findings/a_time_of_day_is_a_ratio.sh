#!/usr/bin/env bash
# math-verify 0.9.0: a time of day is read as a ratio, so that other times are equal to it, and numbers are.
# 12:30 is 2/5, as 6:15 is.
# Output: for 12:30: 12:30 True, 6:15 True, 0.4 True, 12:31 False
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need math-verify==0.9.0
"$PYTHON" - <<'PYTHON'
from math_verify import parse, verify

answers = ("12:30", "6:15", "0.4", "12:31")
found = [verify(parse("$12:30$"), parse(f"${answer}$")) for answer in answers]
print("for 12:30:", ", ".join(f"{answer} {equal}" for answer, equal in zip(answers, found, strict=True)))
assert found == [True, True, True, False]
PYTHON
