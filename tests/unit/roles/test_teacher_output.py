"""Distillation: the loss from whole logits, a policy that is its own teacher, and wrong input."""

import functools
import json
from pathlib import Path

import pytest
import torch

from tests.helpers.forked_programs import accepted, refusal
from tests.helpers.programs import (
    GRADED,
    assert_close,
    in_world,
    inputs,
    metrics,
    program,
    rl_argv,
    sft_argv,
    train,
    write_lines,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

# Another width and depth than the policy's, and a head of its own.
WIDE = "--num-layers 3 --hidden-size 48 --ffn-hidden-size 96 --untie-embeddings-and-output-weights"
TAU = 0.9  # of the policy; the teacher's is 1
COMPARED = ["distill/divergence", "distill/forward_kl", "distill/reverse_kl", "distill/top1_agreement",
            "teacher/logprob"]  # fmt: skip
MOE = "--actor-num-experts 4 --actor-moe-router-topk 2 --actor-moe-ffn-hidden-size 32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@functools.cache
def teacher(folder: Path) -> str:
    """Flags of a wider teacher."""
    train("sft", sft_argv(folder / "teacher", f"{WIDE} --train-iters 20"))
    shape = WIDE.replace("--", "--teacher-")
    return f"{shape} --teacher-pretrained-checkpoint {folder}/teacher"


def argv_of(folder: Path, save: Path, flags: str) -> list[str]:
    """Command line of a run that only distils; `flags` win over the defaults."""
    own = "--advantage none --kl-coefficient 0 --entropy-coefficient 0 --reward none --ppo-epochs 1 --minibatch-size 12"
    return rl_argv(save, f"{own} --temperature {TAU} {teacher(folder)} {flags}")


# -- the loss ----------------------------------------------------------------------------------------------------


def logits_alone(model, sequence, vocab: int):
    """[T, V] float64 logits before each token of a sequence that is alone in its batch."""
    from megarl.mcore.model.forward_pass import inference_mode, token_states

    with inference_mode(model):
        states = token_states(model[0], sequence, torch.tensor([len(sequence)]))
    head = model[0].output_layer.weight  # None: tied
    head = model[0].embedding.word_embeddings.weight if head is None else head
    return states.double() @ head.detach()[:vocab].double().T


def watched(rank: int, parsed) -> list[dict]:
    """For each step the metrics, and the same from whole logits, sequence by sequence."""
    from megarl.trainers import rl_trainer

    seen = []

    class Watched(rl_trainer.RLTrainer):
        def dispatch(self, batch):
            super().dispatch(batch)
            own, shared = batch["actor"], []
            spans = zip(
                own.tokens.split(own.lengths.tolist()), own.response_mask.split(own.lengths.tolist()), strict=True
            )
            vocab, rows = self.tokenizer.vocab_size, []
            for (tokens, mask), line, start in zip(spans, own.prompt_ids, own.prompt_lengths, strict=True):
                student = (logits_alone(self.actor.trainable_model.model, tokens, vocab) / TAU).log_softmax(-1)[mask]
                text = self.inputs.prompts[int(line)].teacher_prompt
                prompt = tokens[:start] if text is None else torch.tensor(self.tokenizer.encode(text))
                read = torch.cat([prompt, tokens[start:]])
                other = logits_alone(self.teacher.frozen_models[0].model, read, vocab)[len(prompt) :]
                other = other.log_softmax(-1)[mask[start:]]
                forward = (other.exp() * (other - student)).sum(-1)
                reverse = (student.exp() * (student - other)).sum(-1)
                agrees = (student.argmax(-1) == other.argmax(-1)).double()
                chosen = other.gather(-1, tokens[mask].unsqueeze(-1)).squeeze(-1)
                rows.append(torch.stack([reverse, forward, reverse, agrees, chosen], dim=1))
            seen.append(dict(zip(COMPARED, torch.cat(rows).mean(0).tolist(), strict=True)))
            positions = torch.arange(len(own))
            shared = [m.host_metadata.shared for m, _ in self.actor.trainable_model.microbatches(own, positions)]
            seen[-1]["shared"] = any(each is not None for each in shared)

        def log(self, step):
            super().log(step)
            seen[-1] = (self._metrics, seen[-1])

    rl_trainer.RLTrainer = Watched
    in_world(rank, "rl", parsed)
    return seen


def hinted_prompts(folder: Path) -> Path:
    """Prompts, of which every second one has another prompt for the teacher: with a worked sum before it."""
    rows = [json.loads(line) for line in (inputs() / "train.jsonl").read_text().splitlines()[:40]]
    hints = [row | {"teacher_prompt": f"1+{i}={i + 1}{row['prompt']}"} for i, row in enumerate(rows[::2])]
    return write_lines(folder / "hinted.jsonl", [row for pair in zip(rows[1::2], hints, strict=True) for row in pair])


@pytest.mark.parametrize("has_hints", [long(False), True])
def test_the_loss_is_the_divergence_of_whole_logits_sequence_by_sequence(folder, tmp_path, has_hints):
    flags = "--distill loss --train-iters 2 --distill-coefficient 0.5"
    if has_hints:
        flags += f" --teacher-max-prompt-length 14 --prompts {hinted_prompts(folder)}"
    argv = argv_of(folder, tmp_path, flags)
    for row, exact in run_world(watched, 1, program("rl", argv, 1))[0]:
        assert exact.pop("shared")  # prompts of a group are computed once
        assert row["actor/loss"] == pytest.approx(0.5 * exact["distill/reverse_kl"], rel=1e-4)
        assert_close(row, exact, COMPARED, 1e-4)


@pytest.mark.parametrize("divergence", ["forward", "jsd"])
def test_a_policy_that_is_its_own_teacher_learns_nothing_to_the_bit(folder, tmp_path, divergence):
    flags = f"--distill loss --distill-divergence {divergence} --teacher self --teacher-temperature {TAU}"
    train("rl", without_teacher(argv_of(folder, tmp_path, f"{flags} --train-iters 3 --weight-decay 0"), folder))
    for row in list(metrics(tmp_path).values()):
        assert [row[name] for name in COMPARED[:4]] == [0, 0, 0, 1] and row["teacher/logprob"] < 0
        assert row["actor/loss"] == row["actor/grad_norm"] == row["rollout/logprob_gap_max"] == 0


def without_teacher(argv: list[str], folder: Path) -> list[str]:
    """The command line without the flags of the wider teacher."""
    start = argv.index("--teacher-num-layers")
    return argv[:start] + argv[start + len(teacher(folder).split()) :]


def of_average(rank: int, parsed) -> list[bool]:
    """For each step: whether the teacher's weights are those of the policy's moving average, and not the policy's."""
    from megarl.trainers import rl_trainer

    same = []

    class Watched(rl_trainer.RLTrainer):
        def dispatch(self, batch):
            super().dispatch(batch)
            actor, frozen = self.actor.trainable_model, self.teacher.frozen_models[0]
            own = [parameter.clone() for parameter in actor.model.parameters()]
            with actor.averaged():
                average = list(map(torch.clone, actor.model.parameters()))
            found = list(frozen.model.parameters())
            same.append((all(map(torch.equal, average, found)), all(map(torch.equal, own, found))))

    rl_trainer.RLTrainer = Watched
    in_world(rank, "rl", parsed)
    return same


FOLLOWS = f"--distill loss --teacher ema --ema-decay 0.5 {GRADED} --advantage grpo --train-iters 3"


def test_a_teacher_follows_the_average(folder, tmp_path):
    argv = without_teacher(argv_of(folder, tmp_path, f"{FOLLOWS} --teacher-temperature {TAU}"), folder)
    assert run_world(of_average, 1, program("rl", argv, 1))[0] == [(True, True), (True, False), (True, False)]
    rows = metrics(tmp_path)
    assert rows[1]["distill/divergence"] == 0 < rows[3]["distill/divergence"]


def test_rewards_of_the_teacher_are_samples_of_the_reverse_divergence(folder, tmp_path):
    train("rl", argv_of(folder, tmp_path, "--distill reward --train-iters 2 --distill-coefficient 2"))
    for row in metrics(tmp_path).values():
        # On policy the ratio is 1: the loss is minus the mean advantage.
        assert (
            row["actor/loss"] == pytest.approx(2 * row["distill/reverse_kl"], rel=1e-4) and row["actor/grad_norm"] > 0
        )
        assert "critic/loss" not in row and "kl/reference" not in row


def test_a_start_that_is_drawn_from_the_seed_can_be_the_teacher(folder):
    first = sft_run(folder, "--teacher self --distill-sft-coefficient 0 --seed 7", is_wide=False)[1]
    assert [first[name] for name in COMPARED[:3]] == [0, 0, 0] and first["sft/grad_norm"] == 0


# -- layouts -----------------------------------------------------------------------------------------------------


@functools.cache
def sft_run(folder: Path, flags: str = "", size: int = 1, is_wide: bool = True) -> dict[int, dict]:
    save = folder / f"sft{size}{flags}".replace("/", "")[:200].strip()
    own = "--distill loss --distill-divergence forward --distill-sft-coefficient 0.3 --train-iters 3 --eval-interval 3"
    train(
        "sft",
        sft_argv(save, f"{own} --eval-prompts {inputs()}/heldout.jsonl {flags} {teacher(folder) * is_wide}"),
        size,
    )
    return metrics(save)


@pytest.mark.parametrize("flags", [
    "--lora-rank 4", long(MOE), long("--reward exact-match --advantage grpo"),
    long("--bf16 --teacher-bf16"), long("--ppo-epochs 2 --minibatch-size 4 --kl-in loss --kl-coefficient 0.1"),
    long("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
])  # fmt: skip
def test_beside_other_features(flags, folder):
    flags = f"--distill loss {flags}"
    argv = argv_of(folder, folder / flags.replace("/", "")[:80], f"{flags} --train-iters 2")
    if "experts" in flags:
        argv[argv.index("--pretrained-checkpoint") : argv.index("--pretrained-checkpoint") + 2] = []
    if "--reward exact-match" in flags:
        argv.remove("--advantage"), argv.remove("none")
    train("rl", argv)
    for row in metrics(folder / flags.replace("/", "")[:80]).values():
        assert row["distill/divergence"] > 0 and row["actor/grad_norm"] > 0 and row["actor/updates"] > 0


# -- wrong input -------------------------------------------------------------------------------------------------

NO_TEACHER = "needs a teacher: another --teacher-hf-model or --teacher-pretrained-checkpoint than the policy's, or"


@pytest.mark.parametrize("name, flags, message", [
    ("rl", "--distill loss --reward none", NO_TEACHER),
    ("sft", "--distill loss", NO_TEACHER),
    ("rl", "--distill reward --reward none --teacher self {teacher}", "--teacher self: the teacher has the"),
    ("rl", "--distill loss --reward none --teacher ema --ema-decay 0.5 --teacher-num-layers 3", "num-layers is 3"),
    ("rl", "--distill loss --reward none {teacher} --teacher-tokenizer-model {other}", "token 4 is "),
    ("rl", "--distill loss --reward none {teacher} --role-map actor=0;reward=0;teacher=1", "rank 1 of teacher"),
    ("rl", "--distill loss --reward none {teacher} --prompts {hinted}", "hinted.jsonl:2: teacher_prompt has "),
    ("rl", "--distill loss --reward none {teacher} --teacher-max-prompt-length 90 --teacher-max-tokens-per-microbatch"
     " 93", "microbatch 93: must hold one sequence of --teacher-max-prompt-length + --max-response-length = 94 tokens"),
    ("rl", "--distill loss --reward none {teacher} --teacher-hidden-size 40", "the flags of teacher describe"),
])  # fmt: skip
def test_wrong_input(folder, tmp_path, name, flags, message):
    from tools.train_tokenizer import train as train_tokenizer

    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer(["ab", "ba", "cd", "dc", "ef", "xyz"], 16, False))
    flags = flags.format(
        teacher=teacher(folder) if "{teacher}" in flags else "", other=other, hinted=hinted_prompts(folder)
    )
    only = "--advantage none --kl-coefficient 0"
    argv = rl_argv(tmp_path, f"{only} {flags}") if name == "rl" else sft_argv(tmp_path, flags)
    assert message in refusal(argv, name)


def test_check_names_the_teacher(folder, tmp_path):
    argv = argv_of(folder, tmp_path, "--distill loss")
    assert "teacher" in "\n".join(accepted(argv))
    assert program("rl", argv, 1).megarl_settings()["distill"] == "loss"
