#!/usr/bin/env bash
# reasoning-gym 0.1.25: several verifiers give a positive score to an empty text, or to one space.
# game_of_life_halting gives a single space 1.0 where the right answer is "no"; a dozen others give 0.01 or 0.05.
# Output: names and scores of the data sets with a score above 0
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need reasoning-gym==0.1.25
"$PYTHON" - 2>/dev/null <<'PYTHON'
import reasoning_gym

found = {}
for name in ("countdown", "sentence_reordering", "arc_agi", "puzzle24", "prime_factorization", "rubiks_cube"):
    data = reasoning_gym.create_dataset(name, size=1, seed=0)
    found[name] = data.score_answer("", data[0])
data = reasoning_gym.create_dataset("game_of_life_halting", size=1, seed=0)
found["game_of_life_halting"] = data.score_answer(" ", data[0])
print(found)
assert all(score > 0 for score in found.values()) and found["game_of_life_halting"] == 1.0
PYTHON
