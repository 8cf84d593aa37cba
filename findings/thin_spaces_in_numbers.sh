#!/usr/bin/env bash
# math-verify 0.9.0: 10\,000, ten thousand with a thin space, is 10 · 0 inside dollar signs and 10 outside.
# Bare LaTeX with a word after it loses its root: 2\sqrt{3} \text{ units} is 2; inside dollar signs it is right.
# Output: False False; 2 is right: True, the root is right: False; inside dollars: True
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need math-verify==0.9.0
"$PYTHON" - <<'PYTHON'
from math_verify import parse, verify

thin = [verify(parse(text), parse("$10000$")) for text in (r"$10\,000$", r"10\,000")]
bare, root = parse(r"2\sqrt{3} \text{ units}"), parse(r"$2\sqrt{3}$")
found = verify(bare, parse("$2$")), verify(bare, root), verify(parse(r"$2\sqrt{3} \text{ units}$"), root)
print(*thin, *found)
assert thin == [False, False] and found == (True, False, True)
PYTHON
