"""`--thinking-budget`: thoughts that go on for too long are ended by tokens that count nowhere as the policy's."""

import functools
import json
import re
from pathlib import Path

import pytest

from megarl.rollout.waiting_groups import UNFINISHED, kept_records
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.programs import metrics, samples, timeless, train
from tests.helpers.rollout.thinkers import BUDGET, FORCED, LONG_TEXT, TEXT, TURNS, thinkers, thinking_argv
from tests.helpers.server.servers import serve_argv, served
from tests.helpers.tiers import long
from tests.helpers.worlds import RankFailed

STEPS = 3
PARTIAL = "--over-sampling 2 --partial-rollouts --rollout-correction tis"
# Rounds stop within the forced tokens of some responses.
LONG = f"{PARTIAL} --max-response-length 60 --max-tokens-per-microbatch 200 --thinking-budget-text {LONG_TEXT}"
APART = "--role-map actor=0;reward=0;rollout=1"
LAG = f"{APART} --generation-lag 1 --rollout-correction tis"


@functools.cache
def run_of(folder: Path, flags: str = "", size: int = 1) -> Path:
    save = folder / f"run{len(list(folder.iterdir()))}"
    train("rl", thinking_argv(save, f"--train-iters {STEPS} --save-interval 1 {flags}"), size)
    return save


def token_rows(save: Path, step: int) -> list[dict]:
    text = (save / "tokens" / f"step_{step:08d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def cuts(row: dict, text: str) -> list[bool]:
    """Whether the budget has cut each turn of a response. Fails unless what is not the policy's is where it must be."""
    tokens, observed, start, found = row["tokens"], row["observed"], 0, []
    while start < len(tokens):
        thinks = {"</think>", "</s>"}.isdisjoint(tokens[start : start + BUDGET])  # its prompt has begun that
        after = observed.index(True, start) if True in observed[start:] else len(tokens)
        found.append(thinks and start + BUDGET < min(after + 1, len(tokens)))
        if found[-1]:
            end = min(start + BUDGET + FORCED[text], len(tokens))
            assert after == start + BUDGET and text.startswith("".join(tokens[after:end])) and all(observed[after:end])
            assert not any(row["advantages"][after:end]) and not any(row["rollout_logprobs"][after:end])
            after = observed.index(True, end) if True in observed[end:] else len(tokens)
        between = re.match(r"\+\d+=<think>", "".join(tokens[after:]))
        assert between or after == len(tokens), row
        start = after + len(between[0].replace("<think>", "B")) if between else after
    return found


def check(save: Path, flags: str, is_stale: bool):
    """All of a run's recorded responses have forced tokens where they are due, and these are not the policy's."""
    found, rows, text = [], metrics(save), LONG_TEXT if LONG_TEXT in flags else TEXT
    for step in range(1, STEPS + 1):
        for row in token_rows(save, step):
            found += cuts(row, text)
        assert 0 < rows[step]["rollout/thinking_cut_fraction"] <= 1
        if not is_stale:
            assert rows[step]["rollout/logprob_gap_max"] <= largest_gap_allowed()
        assert rows[step]["actor/ppo_kl_first"] == 0
    assert found.count(True) >= 5 and found.count(False) >= 5
    assert rows[STEPS]["actor/grad_norm"] > 0


@pytest.mark.parametrize(("flags", "size"), [
    long(("", 1)), long((LAG, 2)), (LONG, 1), long((f"{LONG} {APART}-2", 3)),
    long(("--router-replay rollout --num-experts 4 --moe-router-topk 2", 1)),
    (TURNS, 1), long((f"{TURNS} {LAG}", 2)), long((f"{TURNS} {PARTIAL}", 1)), long(("--bf16", 1)),
    long(("--advantage gae --critic-lr 1e-3", 1)), long((f"{TURNS} --advantage gae --critic-lr 1e-3", 1)),
], ids=str)  # fmt: skip
def test_forced_tokens_are_where_they_are_due_and_not_trained_on(flags, size, folder):
    check(run_of(folder, flags, size), flags, is_stale="correction" in flags or "bf16" in flags)


@pytest.mark.parametrize(("one", "other", "size"), [
    ("", "--speculative-rollout --rollout-prefix-caching --rollout-max-requests 6", 1),
    long(("", "--rollout-max-requests 4 --rollout-buffer-gb 0.0003", 1)),
    long((APART, "--role-map actor=0;reward=0;rollout=1-2 --rollout-dispatch static", 3)),
    long((f"{LONG} {APART}", f"{LONG} --role-map actor=0;reward=0;rollout=1-2 --speculative-rollout", 3)),
    long((TURNS, f"{TURNS} --speculative-rollout --rollout-prefix-caching", 1)),
    long((f"{TURNS} {PARTIAL} {APART}", f"{TURNS} {PARTIAL} --role-map actor=0;reward=0;rollout=1-2", 3)),
], ids=str)  # fmt: skip
def test_how_responses_are_generated_changes_nothing(one, other, size, folder):
    saves = run_of(folder, one, 2 if APART in one else 1), run_of(folder, other, size)
    for step in range(1, STEPS + 1):
        assert samples(saves[0], step) == samples(saves[1], step)
        rows = [metrics(save)[step] for save in saves]
        assert rows[0]["actor/grad_norm"] == rows[1]["actor/grad_norm"]


def cut_within(save: Path, step: int) -> int:
    """Responses in a checkpoint that a round has cut within their forced tokens."""
    found = 0
    for _, state in kept_records(save / "checkpoints" / f"step_{step:08d}").read(UNFINISHED):
        masks = state["response_mask"].split(state["lengths"].tolist()) if "lengths" in state else ()
        ends = zip(masks, state["lengths"].tolist(), state["prompt_lengths"].tolist(), strict=True) if masks else ()
        found += sum(length > prompt and not mask[-1] for mask, length, prompt in ends)
    return found


@pytest.mark.parametrize("flags", [LONG, long(f"{TURNS} {PARTIAL}")], ids=["one turn", "turns"])
def test_a_resumed_run_goes_on_within_forced_tokens(flags, folder):
    whole, start = run_of(folder, flags, 1), 2
    assert cut_within(whole, start)
    resumed = run_of(folder, f"{flags} --load {whole / 'checkpoints' / f'step_{start:08d}'}")
    for step in range(start + 1, STEPS + 1):
        assert samples(resumed, step) == samples(whole, step)
        assert timeless(metrics(resumed)[step]) == timeless(metrics(whole)[step])


@pytest.mark.parametrize("flags", [
    "--top-k 9", f"{TURNS} --max-response-length 60",
    f"{TURNS} --max-response-length 60 --environment tests.helpers.envs.agents:thinking_sums",
], ids=["one turn", "turns", "an agent"])  # fmt: skip
@pytest.mark.long
def test_a_server_forces_what_an_evaluation_of_its_own_forces(flags, folder, tmp_path):
    start, sizes = run_of(folder, "", 1), "--max-prompt-length 12 --max-response-length 16"
    common = f"{sizes} --tokenizer-model {thinkers() / 'tokenizer.model'}"
    budget = f"--thinking-budget {BUDGET} --thinking-budget-text {TEXT} --eval-responses 3 --eval-temperature 1"
    flags = f"{common} {budget} {flags.replace(' --max-tokens-per-microbatch 300', '')} --reward length"
    files = {"prompts": thinkers() / "heldout.jsonl", "load": start}
    run_evaluate(evaluate_argv(tmp_path / "own", flags, **files))
    with served(serve_argv(f"{common} --max-response-length 60", start)) as running:
        argv = evaluate_argv(tmp_path / "remote", f"{flags} --rollout-server {running.url}", **files)
        at = argv.index("--load")
        run_evaluate(argv[:at] + argv[at + 2 :])
        answer = running.post("/v1/completions", {
            "prompt": "1+2=<think>", "max_tokens": 20, "seed": 1, "logprobs": 0, "ignore_eos": True, "n": 16,
            "thinking_budget": BUDGET, "thinking_budget_text": TEXT,
        }).json()  # fmt: skip
    own, other = ((tmp_path / name / "samples.jsonl").read_text() for name in ("own", "remote"))
    assert own == other and own.count(TEXT) >= 5
    place, cut = slice(BUDGET, BUDGET + FORCED[TEXT]), 0
    for found in (choice["logprobs"] for choice in answer["choices"]):
        if "".join(found["tokens"][place]) == TEXT:
            cut += found["token_logprobs"][place] == [0] * FORCED[TEXT]
        else:
            assert "</think>" in found["tokens"][:BUDGET]
    assert 5 <= cut < 16


@pytest.mark.long
def test_an_agent_gets_whole_turns(folder):
    flags = f"{TURNS.replace('sum_environments:ThinkingSums', 'agents:thinking_sums')} --advantage rloo"
    save = run_of(folder, flags, 1)
    for step in range(1, STEPS + 1):
        row = metrics(save)[step]
        assert row["rollout/logprob_gap_max"] <= largest_gap_allowed() and row["actor/ppo_kl_first"] == 0
        turns = [turn["text"] for line in samples(save, step).splitlines() for turn in json.loads(line)["turns"]]
        assert sum(TEXT in text for text in turns) >= 3 and not all(TEXT in text for text in turns)


@pytest.mark.long
def test_unfinished_groups_go_on_with_their_budget(folder):
    start = run_of(folder, LONG, 1) / "checkpoints" / "step_00000002"
    turns = run_of(folder, f"{TURNS} {PARTIAL}", 1) / "checkpoints" / "step_00000002"
    train("rl", thinking_argv(folder / "other", f"{LONG} --load {start} --train-iters 3 --thinking-budget 9"))
    with pytest.raises(RankFailed, match="--thinking-budget None: the checkpoint of --load .* that were generated"):
        argv = thinking_argv(folder / "none", f"{TURNS} {PARTIAL} --load {turns} --train-iters 3")
        at = argv.index("--thinking-budget")
        train("rl", argv[:at] + argv[at + 4 :])
