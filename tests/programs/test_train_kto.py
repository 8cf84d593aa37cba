"""Training on single responses with labels: the first loss, the formula, layouts, resume, and wrong input."""

import json
import math
from pathlib import Path

import pytest
import torch

from megarl.data.columns import Columns
from megarl.data.conversations import Encoder
from megarl.data.examples import LabelledResponses, next_of_other_prompt
from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import (
    in_world,
    inputs,
    metrics,
    preference_argv,
    preferences,
    program,
    train,
    write_lines,
)
from tests.helpers.worlds import run_world

BETA, DESIRABLE, UNDESIRABLE = 0.5, 1.5, 0.7
KTO = f"--preference-loss kto --preference-beta {BETA}"


def flags_of(folder: Path) -> str:
    """The flags of training and held-out lines: labelled responses, and pairs."""
    lines = [json.loads(line) for line in (preferences() / "preferences.jsonl").read_text().splitlines()]
    # The same response is desirable after every prompt, so that it also becomes more likely where it is mismatched.
    rows = [{"prompt": row["prompt"], "completion": text, "label": text == "4"}
            for row in lines for text in ("4", row["rejected"], "4")]  # fmt: skip
    return f"{KTO} --prompts {write_lines(folder / 'rows.jsonl', rows)} --eval-prompts {held_out()} --eval-interval 10"


def held_out() -> Path:
    return preferences() / "heldout-preferences.jsonl"


@pytest.mark.long
def test_the_policy_comes_to_make_desirable_responses_more_likely(folder):
    flags = f"{KTO} --eval-prompts {held_out()} --eval-interval 10 --lr 5e-3 --train-iters 30"  # on the lines of pairs
    train("preference", preference_argv(folder / "run", flags))
    rows = metrics(folder / "run")
    first = rows[1]  # policy and reference are equal to the last bit
    assert first["preference/loss"] == 0.5 and first["preference/kl"] == first["preference/margin"] == 0
    assert rows[30]["eval/margin"] > 0 and rows[30]["eval/loss"] < rows[10]["eval/loss"] < 0.5


def alone(network, sequence) -> float:
    """Σ log π over the response tokens of a sequence that is alone in its batch."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    tokens, mask = (torch.tensor(column) for column in sequence)
    with inference_mode(network):
        scores = token_scores(network, tokens, torch.tensor([len(tokens)]), 1.0, 16, None, mask)
    return float(scores.logprobs[mask].double().sum())


def watched(rank: int, parsed) -> list[list[float]]:
    """[own loss, own divergence, recorded loss, recorded divergence] of each step."""
    from megarl.trainers import preference_trainer

    seen, reference = [], {}

    class Watched(preference_trainer.KTOTrainer):
        def next_batch(self):
            size = self.role.megatron.global_batch_size
            lines = self.order.indices(self.order.position, size)
            network, examples = self.trainable_model.model[0], self.inputs.examples
            if not reference:
                for number in self.order.indices(0, size * parsed.settings.train_iters):
                    own, mismatched = examples[number]
                    prompt = own[1].index(True)
                    assert own[0][:prompt] == mismatched[0][:prompt] and mismatched[1][prompt]
                    reference[number] = [alone(network, s) for s in (own, mismatched)]
            drifts = {}
            for number in lines:
                now = [alone(network, s) for s in examples[number]]
                drifts[number] = [a - b for a, b in zip(now, reference[number], strict=True)]
            divergence = max(0.0, sum(mismatched for _, mismatched in drifts.values()) / len(drifts))
            terms = []
            for number, (drift, _) in drifts.items():
                sign, weight = (1, DESIRABLE) if examples.labels[number] else (-1, UNDESIRABLE)
                terms.append(weight * (1 - 1 / (1 + math.exp(-sign * BETA * (drift - divergence)))))
            seen.append([sum(terms) / len(terms), divergence])
            return super().next_batch()

        def log(self, step):
            super().log(step)
            seen[-1] += [self.metrics["preference/loss"], self.metrics["preference/kl"]]

    preference_trainer.KTOTrainer = Watched
    in_world(rank, "preference", parsed)
    return seen


def test_losses_and_divergences_equal_the_formulas(folder, tmp_path):
    """Over two replicas, with both weights; the reference stays that of the start."""
    flags = f"{flags_of(folder)} --lr 2e-2 --train-iters 3 --global-batch-size 5 --eval-samples 5"
    flags += f" --preference-desirable-weight {DESIRABLE} --preference-undesirable-weight {UNDESIRABLE}"
    for seen in run_world(watched, 2, program("preference", preference_argv(tmp_path / "run", flags), 2)):
        assert len(seen) == 3 and any(divergence > 0 for _, divergence, *_ in seen)
        for loss, divergence, *recorded in seen:
            assert recorded == pytest.approx([loss, divergence], rel=1e-5, abs=1e-6)


def test_a_batch_without_desirable_responses_has_no_mean_of_them(folder, tmp_path):
    rows = [{"prompt": f"{i}+2=", "response": "7", "desirable": False} for i in range(3)]
    flags = f"{KTO} --prompts {write_lines(tmp_path / 'rows.jsonl', rows)} --train-iters 1 --global-batch-size 3"
    train("preference", preference_argv(tmp_path / "run", flags))
    (row,) = metrics(tmp_path / "run").values()
    assert row["preference/rejected_logprob"] < 0
    assert not {"preference/chosen_logprob", "preference/chosen_reward", "preference/margin"} & set(row)


def test_the_other_prompt_is_the_next_one_that_differs():
    assert next_of_other_prompt(torch.tensor([0, 0, 1, 2, 2, 0]).numpy()).tolist() == [2, 2, 3, 5, 5, 2]
    assert next_of_other_prompt(torch.tensor([1, 1, 0, 1]).numpy()).tolist() == [2, 2, 3, 2]


def test_both_responses_of_every_pair_are_drawn(tmp_path):
    rows = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(2 * n + 1)} for n in range(4)]
    rows.insert(2, {"prompt": "1+2=", "response": "3", "desirable": True})
    prompts = load_prompts(str(write_lines(tmp_path / "p.jsonl", rows)), columns=Columns("kto"))
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model"))
    examples = LabelledResponses(prompts, Encoder(tokenizer), 6, 4)
    drawn = examples.prompts.order(seed=3).take(9)
    assert sorted(drawn) == [*range(9)] and examples.labels.tolist() == [True, False] * 2 + [True] + [True, False] * 2
    texts = [(examples.prompts[number].prompt, tokenizer.decode([i for i, is_own in zip(*own) if is_own]))
             for number, (own, _) in enumerate(examples)]  # fmt: skip
    pairs = [(row["prompt"], row[name]) for row in rows for name in ("chosen", "rejected", "response") if name in row]
    assert texts == pairs


GOOD = {"prompt": "1+2=", "response": "3", "desirable": True}
WRONG = {
    "no label": ({"desirable": None}, "", "rows.jsonl:2: kto needs response and desirable on each line"),
    "a number": ({"desirable": 1}, "", "rows.jsonl:2: desirable must be true or false, not int"),
    "one of a pair": ({"chosen": "3"}, "", "rows.jsonl:2: a preference needs chosen and rejected"),
    "one prompt": ({}, "", "rows.jsonl: all responses are to one prompt"),
    "no column": ({}, "--desirable-column good", "--desirable-column good: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case, tmp_path):
    row, flags, needle = WRONG[case]
    rows = write_lines(tmp_path / "rows.jsonl", [GOOD, GOOD | row])
    argv = preference_argv(tmp_path / "run", f"{KTO} --prompts {rows} {flags}")
    assert needle in refusal(argv, "preference")
