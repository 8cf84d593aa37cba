"""Supervised training: the loss falls, is the same in every layout, counts response tokens alone, and resumes."""

import json
from pathlib import Path

import pytest

from tests.helpers.programs import (
    in_world,
    inputs,
    metrics,
    program,
    sft_argv,
    timeless,
    torchrun,
    train,
    write_lines,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import RankFailed, run_world


def test_the_loss_falls():
    rows = metrics(inputs() / "sft")
    assert sorted(rows) == list(range(1, 41))
    assert rows[40]["sft/loss"] < 0.7 * rows[1]["sft/loss"]
    assert all(row["steps_skipped"] == 0 and row["sft/grad_norm"] > 0 for row in rows.values())


def own_loss(stages, examples, vocab_size) -> float:
    """Mean −log p of response tokens, each example alone through a model of one chunk."""
    import torch

    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    total, count = 0.0, 0
    with inference_mode(stages):
        for ((tokens, mask),) in examples:
            scores = token_scores(stages[0], torch.tensor(tokens), torch.tensor([len(tokens)]), 1.0, vocab_size)
            total -= float(scores.logprobs.double()[torch.tensor(mask)].sum())
            count += sum(mask)
    return total / count


def watched(rank: int, parsed) -> list[tuple[float, float]]:
    """(own, recorded) loss of each step and, last, of the evaluation."""
    from megarl.trainers import sft_trainer

    seen = []

    class Watched(sft_trainer.SFTTrainer):
        def next_batch(self):
            lines = self.order.indices(self.order.position, self.role.megatron.global_batch_size)
            drawn = [self.inputs.examples[line] for line in lines]
            seen.append([own_loss(self.trainable_model.model, drawn, self.vocab_size)])
            return super().next_batch()

        def log(self, step):
            super().log(step)
            seen[-1].append(self.metrics["sft/loss"])
            if "eval/loss" in self.metrics:
                seen.append([own_loss(self.trainable_model.model, self.inputs.held_out[:7], self.vocab_size)])
                seen[-1].append(self.metrics["eval/loss"])

    sft_trainer.SFTTrainer = Watched
    in_world(rank, "sft", parsed)
    return seen


@pytest.mark.parametrize("size", [long(1), 2])
def test_the_loss_counts_response_tokens_alone(size, tmp_path):
    start = f"--pretrained-checkpoint {inputs()}/sft --eval-prompts {inputs()}/heldout.jsonl --eval-samples 7"
    argv = sft_argv(tmp_path, f"--train-iters 3 --global-batch-size 6 {start}")
    for seen in run_world(watched, size, program("sft", argv, size)):
        assert len(seen) == 4
        for own, recorded in seen:
            assert recorded == pytest.approx(own, rel=1e-5)


def lines_read(rank: int, parsed) -> tuple[list[int], list[int]]:
    """The lines of a step's batch, and those that this rank has read."""
    from megarl.observe.timers import Timers
    from megarl.trainers.sft_trainer import SFTTrainer

    trainer, read = SFTTrainer(parsed, Timers()), []
    example = trainer.inputs.examples._example
    trainer.inputs.examples._example = lambda line: (read.append(line), example(line))[1]
    lines = trainer.order.indices(0, trainer.role.megatron.global_batch_size)
    trainer.next_batch()
    return lines, read


def test_a_replica_reads_only_its_share_of_a_batch(tmp_path):
    argv = sft_argv(tmp_path, "--global-batch-size 9 --tensor-model-parallel-size 2")
    found = run_world(lines_read, 4, program("sft", argv, 4))
    shares = [read for _, read in found]
    assert shares[0] == shares[1] and shares[2] == shares[3]  # ranks of one replica
    assert sorted(shares[0] + shares[2]) == sorted(found[0][0]) and all(shares)


def test_examples_hold_prompt_answer_and_end_and_the_mask_skips_the_prompt():
    from megarl.data.conversations import Encoder
    from megarl.data.examples import sft_examples
    from megarl.data.prompts import load_prompts
    from megarl.data.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model"))
    path = inputs() / "heldout.jsonl"
    examples = sft_examples(load_prompts(str(path)), Encoder(tokenizer), 6, 4)
    for line, ((tokens, mask),) in zip(path.read_text().splitlines(), examples, strict=True):
        row = json.loads(line)
        assert tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == row["answer"]
        assert tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if not m]) == row["prompt"]
        assert tokens[-1] == tokenizer.eos_id and mask[-1]


TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}"
    "{% else %}={% endif %}{% endfor %}"
)


def turns(*contents: str) -> dict:
    """A line of a conversation in which user and assistant alternate."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def dialogues(folder: Path, last: str) -> str:
    """Flags of training on multi-turn sums; each conversation ends with the user's `last`, which has no answer."""
    rows = [turns(f"{a}+{b}", str(a + b), f"{a}+{a}", str(a + a), last) for a in range(3, 9) for b in range(2)]
    path, template = write_lines(folder / f"{last}.jsonl", rows), folder / "template.jinja"
    template.write_text(TEMPLATE)
    return f"--prompts {path} --chat-template {template} --max-prompt-length 12 --max-response-length 12"


@pytest.mark.parametrize("size, layout", [long((1, "")), (2, "--context-parallel-size 2")])
def test_training_covers_all_assistant_turns_and_nothing_else(size, layout, tmp_path):
    def flags(last: str) -> list[str]:
        more = f"--eval-prompts {tmp_path}/7+1.jsonl --eval-samples 7 {layout}"
        return sft_argv(tmp_path / last, f"--train-iters 3 --global-batch-size 6 {dialogues(tmp_path, last)} {more}")

    if layout:
        train("sft", flags("7+1"), size)
    else:
        for own, recorded in run_world(watched, size, program("sft", flags("7+1"), size))[0]:
            assert recorded == pytest.approx(own, rel=1e-5)
    train("sft", flags("0+5"), size)
    rows, others = metrics(tmp_path / "7+1"), metrics(tmp_path / "0+5")
    assert sorted(rows) == [1, 2, 3] and rows[3]["eval/loss"] > 0
    assert {step: timeless(row) for step, row in rows.items()} == {step: timeless(row) for step, row in others.items()}


def test_the_mask_of_a_conversation(tmp_path):
    from megarl.data.tokenizers import build_tokenizer
    from megarl.trainers.sft_trainer import SFTTrainer
    from megarl.trainers.supervised_trainer import SupervisedInputs

    parsed = program("sft", sft_argv(tmp_path / "run", dialogues(tmp_path, "7+1")), 1)
    ((tokens, mask),) = SupervisedInputs(parsed, SFTTrainer).examples[1]
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model"))
    assert tokenizer.decode(tokens) == "3+1=43+3=67+1="
    assert tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "46"
    assert [m for t, m in zip(tokens, mask, strict=True) if t == tokenizer.eos_id] == [True, True]


@pytest.mark.long
def test_two_ranks_through_torchrun(tmp_path):
    save = tmp_path / "run"
    done = torchrun("megarl.train_sft", sft_argv(save, "--train-iters 3"), 2)
    assert done.returncode == 0, done.stderr
    kernels, weights, *steps = done.stdout.splitlines()
    assert kernels.startswith("megarl: kernels: ")
    assert weights == "megarl: actor: begins with random weights: no --hf-model, --pretrained-checkpoint or --load"
    assert [line.split("|")[0].split() for line in steps] == [["step", f"{i}/3"] for i in (1, 2, 3)]
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    for name in ("settings.yaml", "metrics.jsonl", "timeline.json", "report.png", "report.html", "tensorboard",
                 "checkpoints/latest", "checkpoints/step_00000003/manifest.json"):  # fmt: skip
        assert (save / name).exists(), name
    assert sorted(metrics(save)) == [1, 2, 3]


def test_a_warm_start_is_kept_in_bf16(tmp_path):
    """The optimizer's copies in full precision start from the same weights, not from those of the seed."""
    start = f"--bf16 --lr 1e-6 --train-iters 3 --pretrained-checkpoint {inputs()}/sft"
    train("sft", sft_argv(tmp_path, start))
    losses = [row["sft/loss"] for row in metrics(tmp_path).values()]
    assert max(losses) < 0.8 * metrics(inputs() / "sft")[1]["sft/loss"]


def test_fp16_lowers_its_loss_scale_before_it_trains_and_no_such_update_counts_as_skipped(tmp_path):
    """The scale starts at 2^32, so more updates overflow than may be skipped in a row."""
    train("sft", sft_argv(tmp_path, "--fp16 --train-iters 26 --max-skipped-steps 3 --lr-decay-iters 40"))
    rows = list(metrics(tmp_path).values())
    lowering = [row for row in rows if row["sft/overflows"]]
    assert 8 < len(lowering) < 24 and "sft/grad_norm" not in lowering[0]
    assert rows[0]["sft/loss_scale"] == 2.0**32 and rows[-1]["sft/loss_scale"] < 2.0**24
    assert rows[-1]["sft/grad_norm"] > 0 and rows[-1]["sft/loss"] < 0.95 * rows[0]["sft/loss"]
    assert not any(row["steps_skipped"] for row in rows)


def test_a_run_in_fp16_with_a_constant_scale_that_overflows_ends_and_names_the_scale(tmp_path):
    argv = sft_argv(tmp_path, "--fp16 --loss-scale 1e9 --train-iters 5 --max-skipped-steps 2 --lr-decay-iters 40")
    with pytest.raises(RankFailed, match="RunStopped: --max-skipped-steps 2: .* over a limit; sft/loss_scale 1e\\+09"):
        train("sft", argv)
    assert [row["actor/updates_skipped"] for row in metrics(tmp_path).values()] == [1, 1]


def test_only_a_warm_start_resets_the_expert_balancing_state(tmp_path):
    """A warm start may add an expert bias; a resumed run needs the saved one; a bias is never dropped silently."""
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid"
    balanced = (
        f"{experts} --moe-router-enable-expert-bias --moe-router-load-balancing-type global_aux_loss"
        " --moe-aux-loss-coeff 0.01"
    )
    plain, warm, steps = tmp_path / "plain", tmp_path / "warm", "--train-iters 3 --lr-decay-iters 9"
    train("sft", sft_argv(plain, f"{steps} {experts}"))
    train("sft", sft_argv(warm, f"{steps} {balanced} --pretrained-checkpoint {plain}"))
    train("sft", sft_argv(tmp_path / "on", f"--train-iters 4 --lr-decay-iters 9 {balanced} --load {warm}"))
    rows = metrics(tmp_path / "on")
    assert rows[4]["router/load_imbalance"] > 0 and rows[4]["router/aux_loss"] > 0
    for flags, message in (
        (f"{balanced} --load {plain}", "has no actor.decoder.layers.mlp.router.expert_bias, which actor needs"),
        (f"{experts} --pretrained-checkpoint {warm}", "which the flags of actor leave out"),
    ):
        with pytest.raises(RankFailed, match=message):
            train("sft", sft_argv(tmp_path / "refused", f"--train-iters 5 --lr-decay-iters 9 {flags}"))
