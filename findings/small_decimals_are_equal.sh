#!/usr/bin/env bash
# math-verify 0.9.0: two small numbers are equal if they are written as decimals, and different as powers of ten.
# Decimals are compared after rounding to six places behind the point, however small the reference is; so any decimal
# below 0.0000005 is right for any other. A product with 10^{-7} is compared exactly.
# Output: 0.00000012 for 0.00000047: True; 1.2 \cdot 10^{-7} for 4.7 \cdot 10^{-7}: False; 1200.12 for 1200.47: False
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need math-verify==0.9.0
"$PYTHON" - <<'PYTHON'
from math_verify import parse, verify

PAIRS = (
    ("0.00000047", "0.00000012"), (r"4.7 \cdot 10^{-7}", r"1.2 \cdot 10^{-7}"), ("1200.47", "1200.12"),
)  # fmt: skip
found = [verify(parse(f"${reference}$"), parse(f"${answer}$")) for reference, answer in PAIRS]
print("; ".join(f"{answer} for {reference}: {equal}" for (reference, answer), equal in zip(PAIRS, found, strict=True)))
assert found == [True, False, False]
PYTHON
