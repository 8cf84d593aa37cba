#!/usr/bin/env bash
# reasoning-gym 0.1.25: five verifiers give a wrong answer 1.0. game_of_life_halting any text: it compares truth values
# of texts, so "False" is "True". gsm_symbolic the answer with the other sign; letter_jumble the answer followed by more
# words; coin_flip the answer's first digit; puzzle24 1 * 2 * 3 * 4, whichever numbers the question gives.
# Output: right of 20 wrong answers: game_of_life_halting 20, gsm_symbolic 20, letter_jumble 20, coin_flip 20,
# puzzle24 20; chain_sum, asked the same, 0
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need reasoning-gym==0.1.25
PYTHONHASHSEED=0 "$PYTHON" - 2>/dev/null <<'PYTHON'
import reasoning_gym

SIZE = 20
WRONG = {  # an answer that is wrong, by the right one
    "game_of_life_halting": lambda answer: {"True": "False", "False": "True"}[answer],
    "gsm_symbolic": lambda answer: f"-{answer}",
    "letter_jumble": lambda answer: f"{answer} nonsense",
    "coin_flip": lambda answer: answer[:1],
    "puzzle24": lambda answer: "1 * 2 * 3 * 4",
    "chain_sum": lambda answer: f"-{answer}",
}

found = {}
for name, wrong in WRONG.items():
    data = reasoning_gym.create_dataset(name, size=SIZE, seed=5)
    entries = [data[place] for place in range(SIZE)]
    texts = [wrong(entry["answer"]) for entry in entries]
    assert all(text != entry["answer"] for text, entry in zip(texts, entries))
    if name == "puzzle24":
        assert not any(sorted(entry["metadata"]["numbers"]) == [1, 2, 3, 4] for entry in entries)
    found[name] = sum(data.score_answer(text, entry) == 1.0 for text, entry in zip(texts, entries))
print(f"right of {SIZE} wrong answers: {', '.join(f'{name} {count}' for name, count in found.items())}")
assert found == dict.fromkeys(WRONG, SIZE) | {"chain_sum": 0}
PYTHON
