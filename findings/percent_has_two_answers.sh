#!/usr/bin/env bash
# math-verify 0.9.0: 50 % as the reference accepts both 0.5 and 50, and so does a response of 50 % for either reference.
# Output: True True
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need math-verify==0.9.0
"$PYTHON" - <<'PYTHON'
from math_verify import parse, verify

found = [verify(parse(r"$50\%$"), parse(answer)) for answer in ("$0.5$", "$50$")]
print(*found)
assert found == [True, True]
PYTHON
