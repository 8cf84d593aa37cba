#!/usr/bin/env bash
# math-verify 0.9.0: a number with its base as index, 101_2, is read without it.
# So the wrong base, and none, are right, and the same number in another base is wrong.
# Output: for 101_2: 101_2 True, 101_{10} True, 101 True, 5 False
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need math-verify==0.9.0
"$PYTHON" - <<'PYTHON'
from math_verify import parse, verify

answers = ("101_2", "101_{10}", "101", "5")
found = [verify(parse("$101_2$"), parse(f"${answer}$")) for answer in answers]
print("for 101_2:", ", ".join(f"{answer} {equal}" for answer, equal in zip(answers, found, strict=True)))
assert found == [True, True, True, False]
PYTHON
