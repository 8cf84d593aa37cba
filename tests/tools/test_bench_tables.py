"""Benchmarks of memory, weights, start-up, overlap and log-probs at small sizes: the runs and their tables."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.data.order import PromptOrder
from megarl.observe.timers import TraceEvent, write_timeline
from tests.helpers.programs import ROOT
from tests.helpers.tools import SMALL
from tests.helpers.worlds import run_world
from tools.bench import (
    common,
    distillation_curve,
    generation_lag,
    logprob,
    memory,
    offload,
    operators,
    overlap,
    restart,
    rollout,
    shared_prompts,
    startup,
    weights,
)

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --swiglu --normalization RMSNorm"
    " --disable-bias-linear --make-vocab-size-divisible-by 32 --max-prompt-length 96 --max-response-length 4 --lr 1e-5"
    " --kl-coefficient 0.01 --reward exact-match --prompts-per-step 2 --samples-per-prompt 2 --minibatch-size 4"
)


def peaks_in_a_fork(side: str, inputs: list[str], steps: int, out: Path) -> dict[str, int]:
    """As `memory.peaks_of`, without another process's imports."""
    flags = [*TINY.split(), *memory.SIDES[side].split(), *inputs, "--train-iters", str(steps)]
    run_world(peaks_of_a_rank, 1, flags, out)
    return json.loads(out.read_text())


def peaks_of_a_rank(rank: int, flags: list[str], out: Path):
    offload.run_step(flags, out)


@pytest.mark.long
def test_memory(monkeypatch):
    monkeypatch.setattr(memory, "peaks_of", peaks_in_a_fork)
    found = memory.measure(2)
    phases, peaks = found["phases"], found["peak_bytes"]
    assert phases.keys() == set(memory.SIDES) and not any(phases["nothing"].values())
    assert {"actor/rollout", "actor/update", "critic/update"} <= phases["ppo"].keys() == phases["training"].keys()
    updates = [size for phase, size in phases["training"].items() if phase.endswith("/update")]
    assert peaks == {"training": max(updates), "ppo": max(phases["ppo"].values())}
    assert found["ratio"] == peaks["ppo"] / peaks["training"]
    table = memory.table(found | {"peak_bytes": {"training": 2**21, "ppo": 2**20}, "ratio": 0.5}, markdown=True)
    assert table.splitlines()[2].startswith("| 2 MiB | 1 MiB | 0.500 |")


def test_weights(monkeypatch, tmp_path, capsys):
    small = weights.MODEL.replace("layers 8 --hidden-size 512", "layers 2 --hidden-size 64")
    monkeypatch.setattr(weights, "VOCAB", 64)
    monkeypatch.setattr(weights, "MODEL", small)
    assert weights.main(["--cases", "move", "--rounds", "2", "--json", str(tmp_path / "out.json")]) == 0
    (found,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert (found["case"], found["ranks"]) == ("move", 2) and found["sent_bytes"] == found["model_bytes"] > 0
    assert {name: len(each) for name, each in found["seconds"].items()} == {"transfer": 3, "broadcast": 3}
    for name, median in found["median_s"].items():  # the first round does not count
        assert median == sum(found["seconds"][name][1:]) / 2 > 0
    assert found["ratio"] == found["median_s"]["broadcast"] / found["median_s"]["transfer"]
    assert "move" in capsys.readouterr().out


def span(name: str, begin: float, seconds: float) -> TraceEvent:
    return TraceEvent(name, name.split("/", maxsplit=1)[0], int(begin * 1e9), int(seconds * 1e9))


def test_the_first_rollout_is_that_of_its_last_rank(tmp_path):
    first = [span("actor/exchange", 101, 1), span("actor/rollout", 102, 1), span("actor/rollout", 110, 5)]
    second = [span("critic/update", 100.5, 9), span("actor/rollout", 102.5, 1.5), span("actor/rollout", 110, 5)]
    write_timeline(tmp_path / "timeline.json", [first, second])
    assert startup.first_rollout(tmp_path, 96.5) == pytest.approx({"set_up_s": 6.0, "first_rollout_s": 7.5})


def test_starts_alternate(monkeypatch, tmp_path):
    starts = []

    def run(start, *command):
        starts.append("run.sh" if "launch/run.sh" in command else "torchrun")
        return {"set_up_s": 1.0, "first_rollout_s": float(len(starts) * (2 if starts[-1] == "torchrun" else 1))}

    monkeypatch.setattr(startup.Quickstart, "run", run)
    monkeypatch.setattr(
        startup.Quickstart,
        "parts",
        lambda start: dict.fromkeys(("environment_s", "import_torch_s", "import_all_s", "check_s"), float(len(starts))),
    )
    found = startup.measure(tmp_path, 4, 2)
    assert starts == ["run.sh", "torchrun", "run.sh", "torchrun", "torchrun", "run.sh"]  # the first two do not count
    assert [row["first_rollout_s"] for row in found["rounds"]["run.sh"]] == [3, 6]
    assert (found["run.sh"]["first_rollout_s"], found["torchrun"]["first_rollout_s"]) == (4.5, 9)
    assert (found["parts"]["check_s"], found["ratio"]) == (3, 2)
    line = startup.table([found], markdown=True).splitlines()[-1]
    assert line == "| 4 | 3.00 s | 3.00 s | 3.00 s | 1.00 s | 4.50 s | 9.00 s | 2.00 |"
    assert "OMP_NUM_THREADS" not in startup.environment()


def test_a_restart_is_compared_round_by_round():
    before = {"set_up_s": 4.0, "first_rollout_s": 5.0}
    rows = [{"before": before, "now": {"set_up_s": now, "first_rollout_s": 2.0}} for now in (1.0, 2.0, 1.2)]
    before, now = restart.table(rows, markdown=True).splitlines()[-2:]
    assert (before, now) == ("| before | 4.00 s | 5.00 s |  |", "| now | 1.20 s | 2.00 s | 0.30 |")
    with pytest.raises(SystemExit, match="has 0 ranks instead of 4"):
        restart.last_rank(os.getpid())


def test_overlap_compares_with_before(monkeypatch):
    idle = {"before": [0.3, 0.5, 0.4], "replicas": [0.1, 0.2, 0.1]}
    saved = []

    def run(flags, steps, save):
        name = save.name.rstrip("0123456789")
        assert flags[:1] == ["inputs"] and " ".join(flags[1:-1]) == overlap.SIDES[name] and flags[-1] == "--last"
        saved.append(save.name)
        share = idle[name][int(save.name[-1])]
        return {"time/idle_fraction": share, "time/critic/idle_fraction": 2 * share, "time/step_s": 10 * share}

    monkeypatch.setattr(overlap, "run", run)
    monkeypatch.setattr(overlap, "make_inputs", lambda folder: ["inputs"])
    found = overlap.measure(SimpleNamespace(sides=["before", "replicas"], flags=["--last"], steps=6, rounds=3))
    assert saved == ["before0", "replicas0", "replicas1", "before1", "before2", "replicas2"]
    assert found["sides"]["before"]["idle"] == {"time/idle_fraction": 0.4, "time/critic/idle_fraction": 0.8}
    assert found["idle_ratio"] == {"replicas": 0.25} and found["step_ratio"] == {"replicas": 4}


def test_generation_ahead_is_compared_with_its_model(monkeypatch):
    """The longer of two constant times, and nothing that a lag could hide where the weights are awaited."""
    assert generation_lag.predicted([[1.0] * 4, [2.0] * 4], 0) == [3.0] * 4
    assert generation_lag.predicted([[1.0] * 4, [2.0] * 4], 1) == [3.0, 2.0, 2.0, 2.0]
    assert generation_lag.predicted([[1.0, 4.0, 1.0, 1.0], [2.0] * 4], 2) == [3.0, 4.0, 2.0, 2.0]
    assert generation_lag.predicted([[2.0] * 5, [2.0] * 5, [1.0] * 5], 1) == [5.0, 2.0, 3.0, 2.0, 3.0]
    assert generation_lag.predicted([[2.0] * 5, [2.0] * 5, [1.0] * 5], 2) == [5.0, 2.0, 2.0, 2.0, 2.0]
    # Generation that is always late has the weights of the step before the last, and one that waits has old ones.
    assert generation_lag.predicted_staleness([[4.0] * 4, [3.0] * 4], 2) == [0, 1, 1, 1]
    assert generation_lag.predicted_staleness([[1.0] * 5, [4.0] * 5], 2) == [0, 1, 2, 2, 2]
    assert generation_lag.predicted_staleness([[1.0] * 3, [4.0] * 3], 0) == [0, 0, 0]
    times = {"lag-0": 3.0, "lag-1": 2.2, "lag-1,-recorded": 2.2, "together": 2.5}

    def run(ranks, flags, save):
        layout = generation_lag.LAYOUTS[ranks]
        assert "data" in flags and (layout.together in flags) == (save.name == "together") != (layout.apart in flags)
        assert ("--generation-schedule" in flags) == ("recorded" in save.name)
        row = {"time/rollout/rollout_s": 1.0, "perf/tokens": 30.0, "perf/tokens_per_s": 30 / times[save.name]}
        row |= {"time/reward/score_s": 0.75, "time/reference/logprobs_s": 0.25}
        return [row | {"rollout/staleness": 0.5 * ("lag-1" in save.name)}] * 8

    monkeypatch.setattr(generation_lag, "run", run)
    monkeypatch.setattr(generation_lag, "write_prompts", lambda folder, args: ["data"])
    args = {"steps": 8, "lags": [0, 1], "spread": 0.0, "tool": 0.6, "reward": 0.6}
    found = generation_lag.measure(SimpleNamespace(ranks=4, recorded=False, **args))
    assert found["stages_s"] == [1.0, 1.0, 1.0] and found["sides"]["lag 1"]["predicted_s"] == 1.5
    found = generation_lag.measure(SimpleNamespace(ranks=2, recorded=True, **args))
    lines = generation_lag.table(found, markdown=True).splitlines()
    assert lines[1:] == [
        "| lag 0 | 3.000 | 3.000 | 1.00 | 1.00 | 0.00 | 0.00 |",
        "| lag 1 | 2.200 | 2.000 | 1.10 | 1.36 | 0.50 | 1.00 |",
        "| lag 1, recorded | 2.200 | 2.000 | 1.10 | 1.36 | 0.50 | 1.00 |",
        "| together | 2.500 |  |  | 1.20 |  |  |",
    ]  # fmt: skip


def test_prompts_of_a_step_have_the_same_tool(tmp_path, monkeypatch):
    monkeypatch.setattr(generation_lag, "run_python", lambda arguments: None)
    generation_lag.write_prompts(tmp_path, SimpleNamespace(steps=5, spread=0.6, tool=0.6, reward=0.2))
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    order = PromptOrder(len(rows), 3)
    steps = [{rows[line]["metadata"]["seconds"] for line in order.take(generation_lag.PROMPTS)} for _ in range(5)]
    assert all(len(seconds) == 1 for seconds in steps) and len(set.union(*steps)) == 5


def test_the_quickstart_is_placed_as_the_benchmarks_say():
    text = (ROOT / "launch" / "quickstart.sh").read_text()
    (line,) = [line for line in text.splitlines() if "critic=2-3" in line]
    placed = line.partition("roles=(")[2].rstrip(")").replace('"', "")
    assert placed == overlap.SIDES["replicas"] == " ".join(startup.LAYOUTS[4])


class Bigrams(torch.nn.Embedding):
    """The output of a library's causal model, for a model that depends on the previous token only."""

    def forward(self, ids, attention_mask, use_cache):
        assert attention_mask is None or attention_mask.shape == ids.shape
        return SimpleNamespace(logits=super().forward(ids))


@pytest.mark.parametrize("lengths", [[9, 5, 2, 9], [7, 7]])
def test_peers_score_every_token_but_the_first_and_no_padding(lengths):
    peer, rows = Bigrams(SMALL.vocab, SMALL.vocab), [
        torch.tensor(row) for row in common.random_prompts(lengths, SMALL.vocab)
    ]  # fmt: skip
    own = [peer.weight.log_softmax(-1)[row[:-1]].gather(-1, row[1:, None])[:, 0] for row in rows]
    for side in (logprob.softmax_side, logprob.cross_entropy_side):
        assert torch.allclose(side(peer, rows), torch.cat(own), atol=1e-6)
        means = [logprob.once(lambda side=side: side(peer, rows), peer, gradient) for gradient in (True, False)]
        assert means == pytest.approx([torch.cat(own).mean().item()] * 2) and peer.weight.grad is None


def megarl_scores(rank: int) -> list[tuple[float, float]]:
    """(mean log-prob of sequences together, of each alone) without and with gradients."""
    chunk, *_ = common.build(SMALL, (16, 16), "--init-method-std 0.2")
    rows = [torch.tensor(row) for row in common.random_prompts([9, 5, 2, 9], SMALL.vocab)]
    alone = torch.cat([logprob.megarl_side(chunk, [row]) for row in rows])
    assert len(alone) == sum(len(row) - 1 for row in rows)
    return [(logprob.once(lambda: logprob.megarl_side(chunk, rows), chunk, wanted), float(alone.mean()))
            for wanted in (False, True)]  # fmt: skip


def test_megarl_scores_every_token_but_the_first():
    ((found),) = run_world(megarl_scores, 1)
    for sequences_per_example, alone in found:
        assert sequences_per_example == pytest.approx(alone, abs=1e-6) and alone < -1


def test_shared_prompts():
    (found,) = run_world(measured_prompts, 1)
    assert found["left"] == 1 - 2 * 3 * 15 / (8 * 20)
    assert {side: len(times) for side, times in found["seconds"].items()} == {"shared": 3, "alone": 3}
    assert found["ratio"] == found["medians"]["alone"] / found["medians"]["shared"]


def measured_prompts(rank: int) -> dict:
    sizes = {"prompts": 2, "prompt_length": 16, "samples": 4, "response_length": 4, "cap": 200, "rounds": 2}
    return shared_prompts.measure(SimpleNamespace(**sizes))


def test_operators():
    (found,) = run_world(measured_operators, 1)
    assert found["seconds"].keys() == {"engine", "operators"} and len(found["seconds"]["engine"]) == 2
    assert found["share"] == found["medians"]["operators"] / found["medians"]["engine"] > 0


def measured_operators(rank: int) -> dict:
    return operators.measure(1, SMALL, rollout.Case(common.random_prompts([9, 5] * 3, SMALL.vocab), 1, [8] * 6))


def test_curves_of_distillation(tmp_path):
    """The tokenizer that the peer reads has the ids of the policy's, also of texts that it was not checked with."""
    from transformers import PreTrainedTokenizerFast

    from megarl.data.tokenizers import build_tokenizer
    from tests.helpers.programs import inputs

    ours = build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model"))
    distillation_curve.save_tokenizer(tmp_path, ours, ["1+2="])
    texts = ["29+8=", "37", "1+1=2"]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs(texts)["input_ids"] == [ours.encode(text) for text in texts]
    assert theirs.batch_decode(theirs(texts)["input_ids"]) == texts
    sides = (("megarl", 9, 0.952), ("trl", 21, 0.5))
    curves = {name: [{"responses": 2560, "seconds": s, "accuracy": a}] for name, s, a in sides}
    assert distillation_curve.table(curves).splitlines()[2] == "| 2,560 | 95.2 | 9 | 50.0 | 21 |"
