"""Distillation: several teachers in one run, each sequence with the numbers of its own alone, in any layout; the
loss from whole logits, a policy that is its own teacher, and wrong input."""

import functools
from pathlib import Path

import pytest
import torch

from megarl.arguments import RunConfig
from megarl.planning import summary, traffic
from megarl.planning.parameters import parameter_totals
from megarl.trainers import input_summary
from megarl.trainers.rl_inputs import RLInputs
from tests.helpers.folders import hf_folders
from tests.helpers.forked_programs import refusal
from tests.helpers.models.teacher_runs import hinted_prompts, one_teacher, prompts_of_teachers, teacher, teachers
from tests.helpers.programs import (
    GRADED,
    assert_close,
    in_world,
    metrics,
    program,
    rl_argv,
    sft_argv,
    timeless_rows,
    train,
    write_lines,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world
from tools.train_tokenizer import train as train_tokenizer

ONLY_DISTILS = "--advantage none --kl-coefficient 0 --entropy-coefficient 0 --reward none --ppo-epochs 1"
TP2, APART = "--tensor-model-parallel-size 2", "--role-map actor=0;reward=0;teacher=1"


def argv_of(save: Path, flags: str, in_turn=("math", "code")) -> list[str]:
    own = f"{ONLY_DISTILS} --minibatch-size 12 --train-iters 2 --prompts {prompts_of_teachers(*in_turn)}"
    return rl_argv(save, f"{own} {flags}")


# -- the numbers of each sequence --------------------------------------------------------------------------------


def watched(rank: int, parsed) -> list[dict]:
    """For each step, by sequence: its line, tokens, and what its teacher says of them, on the actor's ranks."""
    from megarl.roles import actor
    from megarl.trainers import rl_trainer

    steps = []

    class Watched(rl_trainer.RLTrainer):
        def dispatch(self, batch):
            super().dispatch(batch)
            steps.append((batch, {}))

        def log(self, step):
            super().log(step)
            batch, compared = steps[-1]
            own, found = batch["actor"], {}
            spans = [] if own is None else zip(own.cu_seqlens.tolist(), own.lengths.tolist(), strict=False)
            for number, (start, length) in enumerate(spans):
                span = slice(start, start + length)
                values = [own.tokens[span].tolist()]
                if own.teacher_logprobs is not None:
                    values.append(own.teacher_logprobs[span].tolist())
                found[int(own.sequence_ids[number])] = (int(own.prompt_ids[number]), *values)
            steps[-1] = found, compared

    forward = actor.Actor._forward_of_update

    def compared(self, chunk, microbatch):
        scores = forward(self, chunk, microbatch)
        if hasattr(scores, "distillation"):
            starts = zip(microbatch.sequence_ids, microbatch.cu_seqlens.tolist(), microbatch.lengths, strict=False)
            for number, start, length in starts:
                at = slice(start, start + int(length))
                if microbatch.response_mask[at].any():  # a blank one has none
                    values = [x.detach()[at].tolist() for x in scores.distillation]
                    steps[-1][1][int(number)] = values
        return scores

    actor.Actor._forward_of_update = compared
    rl_trainer.RLTrainer = Watched
    in_world(rank, "rl", parsed)
    return steps


@functools.cache
def numbers_of(folder: Path, form: str, named: str, layout: str = "", size: int = 1):
    """`watched` of the first rank that has the actor; `named`: the teachers of the lines, in turn."""
    names = named.split()
    flags = f"--distill {form} {teachers(**{name: name for name in dict.fromkeys(names)})} {layout}"
    save = folder / f"{form}{named}{size}{layout}".replace("/", "").replace(" ", "")[:100]
    # One step: with other teachers, the policies of the next would differ.
    argv = [*argv_of(save, flags, tuple(names)), "--train-iters", "1"]
    return run_world(watched, size, program("rl", argv, size))[0]


@pytest.mark.parametrize("form, size, layout", [
    ("loss", 1, ""), long(("reward", 2, APART)),
    long(("reward", 1, "")), long(("loss", 2, TP2)), long(("reward", 2, TP2)), long(("loss", 2, APART)),
    long(("loss", 2, f"{TP2} --sequence-parallel")),
    long(("loss", 4, "--role-map actor=0-1;reward=0;teacher=2-3 --actor-tensor-model-parallel-size 2"
          " --teacher-tensor-model-parallel-size 2")),
])  # fmt: skip
def test_each_sequence_has_exactly_the_numbers_of_its_teacher_alone(folder, form, size, layout):
    mixed, compared = numbers_of(folder, form, "math code", layout, size)[0]
    alone = {name: numbers_of(folder, form, name, layout, size)[0] for name in ("math", "code")}
    assert len(mixed) == 12
    for number, found in mixed.items():
        own, of_alone = alone[("math", "code")[found[0] % 2]]
        assert found == own[number]
        if form == "loss":
            assert compared[number] == of_alone[number] and any(compared[number][0])
    assert alone["math"] != alone["code"]


# -- one teacher under two names ---------------------------------------------------------------------------------


def without_names(rows: dict) -> dict:
    """Metrics without those of single teachers."""
    return {step: {name: x for name, x in row.items() if name.count("/") < 2} for step, row in rows.items()}


@pytest.mark.parametrize("form", ["loss", long("reward")])
def test_two_names_of_one_folder_are_one_teacher_to_the_byte(tmp_path, form):
    argv = argv_of(tmp_path / "one", f"--distill {form} {one_teacher()}")
    train("rl", argv)
    train("rl", argv_of(tmp_path / "two", f"--distill {form} {teachers(math='math', code='math')}"))
    one, two = (timeless_rows(tmp_path / name, (1, 2)) for name in ("one", "two"))
    assert without_names(two) == one and two != one
    weighted = [two[1][f"distill/reverse_kl/{name}"] for name in ("math", "code")]
    assert min(weighted) <= one[1]["distill/reverse_kl"] <= max(weighted)


# -- folders -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_teachers_are_hugging_face_folders_and_runs_of_such_models(tmp_path):
    """The policy's own folder is a teacher from which nothing can be learnt; a run with factors is another."""
    hf_folders.write_folder("llama3", tmp_path / "hf", files=2)
    names = ("same", "run", "step")
    rows = [{"prompt": f"{i} + {i}?", "answer": str(2 * i), "teacher": names[i % 3]} for i in range(24)]
    prompts = write_lines(tmp_path / "prompts.jsonl", rows)
    lengths = "--max-prompt-length 48 --max-response-length 8 --max-tokens-per-microbatch 256 --lr 1e-2"
    common = f"--hf-model {tmp_path}/hf --prompts {prompts} {lengths}"
    sft = f"{common} --global-batch-size 8 --train-iters 2 --save-interval 1 --save {tmp_path}/sft --lora-rank 4"
    train("sft", sft.split())
    rl = f"{common} {ONLY_DISTILS} --distill loss --prompts-per-step 12 --samples-per-prompt 2 --train-iters 1"
    step = f"{tmp_path}/sft/checkpoints/step_00000001"
    named = (
        f"--teachers same={tmp_path}/hf run={tmp_path}/sft step={step} --save {tmp_path}/rl --rollout-buffer-gb 0.01"
    )
    train("rl", [*rl.split(), *named.split(), "--tensor-model-parallel-size", "2"], 2)
    found = metrics(tmp_path / "rl")[1]
    same, of_run, of_step = (found[f"distill/divergence/{name}"] for name in names)
    assert same == 0 < min(of_run, of_step) and of_run != of_step


def test_the_host_has_the_models_that_wait(tmp_path):
    both = teachers(math="math", code="code")
    train("rl", argv_of(tmp_path, f"--distill reward --train-iters 1 {both}"))
    config = program("rl", argv_of(tmp_path, f"--distill loss {both}"), 1)
    plan = summary.role_plans(config, 16)
    of_models = [parameter_totals(role.megatron, 16, False).total * 4 for role in config.teachers.models]
    teacher, actor = plan["teacher"].largest, plan["actor"].largest
    padding = metrics(tmp_path)[1]["memory/teacher/offloaded_bytes"] - teacher.host
    assert sum(of_models) == teacher.host and 0 <= padding < 1024
    assert teacher.resident == 0 and teacher.weights == max(of_models)
    assert plan["teacher"].parameters.total * 4 == teacher.host
    step, widest = traffic.step_sizes(config.settings), 48 * 4
    assert config.teachers.state_bytes == widest
    assert actor.teacher_data == (1 + 1) * step.tokens * widest + 32 * (48 + 40) * 4
    (sent,) = [move for move in traffic.moves(config.settings, config.roles) if move.source == "teacher"]
    assert sorted(sent.fields) == ["teacher_ids", "teacher_states"]


# -- what is said before any work -----------------------------------------------------------------------------------


def checked(argv: list[str]) -> tuple[RunConfig, RLInputs]:
    """A run's config, and what is checked before any work."""
    config = program("rl", argv, 1)
    return config, RLInputs(config)


def test_what_is_not_read_is_said_once(tmp_path):
    named = f"--distill loss {teachers(default='code', math='math')}"
    config, found = checked(argv_of(tmp_path, named, (None,)))
    assert [note for note in found.prompts.notes if note.endswith("no line has the teacher math of --teachers")]
    text = "\n".join(input_summary.summary(config, found))
    assert "2 models, one at a time on the device" in text and "no line has" in text
    assert f"from {teacher('math')}" in text
    _, found = checked(argv_of(tmp_path, f"--distill loss {one_teacher()}"))
    assert found.prompts.notes[-1].endswith("teacher is not read without --teachers")
    assert not checked(argv_of(tmp_path, named, (None, "math")))[1].prompts.notes


# -- one teacher: the loss, a policy that is its own teacher ----------------------------------------


TAU = 0.9  # of the policy; the teacher's is 1
COMPARED = ["distill/divergence", "distill/forward_kl", "distill/reverse_kl", "distill/top1_agreement",
            "teacher/logprob"]  # fmt: skip
MOE = "--actor-num-experts 4 --actor-moe-router-topk 2 --actor-moe-ffn-hidden-size 32"


def argv_of_one(save: Path, flags: str, has_wide: bool = True) -> list[str]:
    """Command line of a run that only distils, from a wider teacher; `flags` win over the defaults."""
    own = f"{ONLY_DISTILS} --minibatch-size 12 --temperature {TAU}"
    return rl_argv(save, f"{own} {one_teacher() * has_wide} {flags}")


# -- the loss ----------------------------------------------------------------------------------------------------


def logits_alone(model, sequence, vocab: int):
    """[T, V] float64 logits before each token of a sequence that is alone in its batch."""
    from megarl.mcore.model.forward_pass import inference_mode, token_states

    with inference_mode(model):
        states = token_states(model[0], sequence, torch.tensor([len(sequence)]))
    head = model[0].output_layer.weight  # None: tied
    head = model[0].embedding.word_embeddings.weight if head is None else head
    return states.double() @ head.detach()[:vocab].double().T


def watched_logits(rank: int, parsed) -> list[dict]:
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


@pytest.mark.parametrize("has_hints", [long(False), True])
def test_the_loss_is_the_divergence_of_whole_logits_sequence_by_sequence(tmp_path, has_hints):
    flags = "--distill loss --train-iters 2 --distill-coefficient 0.5"
    if has_hints:
        flags += f" --teacher-max-prompt-length 14 --prompts {hinted_prompts()}"
    argv = argv_of_one(tmp_path, flags)
    for row, exact in run_world(watched_logits, 1, program("rl", argv, 1))[0]:
        assert exact.pop("shared")  # prompts of a group are computed once
        assert row["actor/loss"] == pytest.approx(0.5 * exact["distill/reverse_kl"], rel=1e-4)
        assert_close(row, exact, COMPARED, 1e-4)


@pytest.mark.parametrize("divergence", ["forward", "jsd"])
def test_a_policy_that_is_its_own_teacher_learns_nothing_to_the_bit(tmp_path, divergence):
    flags = f"--distill loss --distill-divergence {divergence} --teacher self --teacher-temperature {TAU}"
    train("rl", argv_of_one(tmp_path, f"{flags} --train-iters 3 --weight-decay 0", has_wide=False))
    for row in list(metrics(tmp_path).values()):
        assert [row[name] for name in COMPARED[:4]] == [0, 0, 0, 1] and row["teacher/logprob"] < 0
        assert row["actor/loss"] == row["actor/grad_norm"] == row["rollout/logprob_gap_max"] == 0


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


def test_a_teacher_follows_the_average(tmp_path):
    argv = argv_of_one(tmp_path, f"{FOLLOWS} --teacher-temperature {TAU}", has_wide=False)
    assert run_world(of_average, 1, program("rl", argv, 1))[0] == [(True, True), (True, False), (True, False)]
    rows = metrics(tmp_path)
    assert rows[1]["distill/divergence"] == 0 < rows[3]["distill/divergence"]


def test_rewards_of_the_teacher_are_samples_of_the_reverse_divergence(tmp_path):
    train("rl", argv_of_one(tmp_path, "--distill reward --train-iters 2 --distill-coefficient 2"))
    for row in metrics(tmp_path).values():
        # On policy the ratio is 1: the loss is minus the mean advantage.
        assert (
            row["actor/loss"] == pytest.approx(2 * row["distill/reverse_kl"], rel=1e-4) and row["actor/grad_norm"] > 0
        )
        assert "critic/loss" not in row and "kl/reference" not in row


def test_a_start_that_is_drawn_from_the_seed_can_be_the_teacher(tmp_path):
    flags = "--distill loss --distill-divergence forward --distill-sft-coefficient 0 --teacher self --train-iters 3"
    train("sft", sft_argv(tmp_path, f"{flags} --seed 7"))
    first = metrics(tmp_path)[1]
    assert [first[name] for name in COMPARED[:3]] == [0, 0, 0] and first["sft/grad_norm"] == 0


@pytest.mark.parametrize("flags", [
    "--lora-rank 4", long(MOE), long("--bf16 --teacher-bf16"),
    long("--ppo-epochs 2 --minibatch-size 4 --kl-in loss --kl-coefficient 0.1"),
    long("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
])  # fmt: skip
def test_beside_other_features(flags, tmp_path):
    argv = argv_of_one(tmp_path, f"--distill loss {flags} --train-iters 2")
    if flags == MOE:
        del argv[argv.index("--pretrained-checkpoint") : argv.index("--pretrained-checkpoint") + 2]
    train("rl", argv)
    for row in metrics(tmp_path).values():
        assert row["distill/divergence"] > 0 and row["actor/grad_norm"] > 0 and row["actor/updates"] > 0


# -- wrong input -------------------------------------------------------------------------------------------------

NO_TEACHER = "needs a teacher: another --teacher-hf-model or --teacher-pretrained-checkpoint than the policy's, or"
MIXED = ("math", "code")


@pytest.mark.parametrize("name, in_turn, flags, message", [
    ("rl", MIXED, "{math}", "code-train.jsonl:2: teacher 'code' is not in --teachers; allowed: math"),
    ("sft", MIXED, "{math}", "code-train.jsonl:2: teacher 'code' is not in --teachers; allowed: math"),
    ("rl", ("math", None), "{math}", "None-train.jsonl:2: teacher is missing, and --teachers has none called default"),
    ("rl", ("math",), "{math} --teacher-num-layers 3", "--teacher-num-layers: not allowed with --teachers"),
    ("rl", ("math",), "--teachers math", "--teachers math: allowed is NAME=FOLDER"),
    ("rl", ("math",), "{math} --teacher-expert-model-parallel-size 2", "(--teachers math="),
    ("rl", ("math",), "{math} --teacher-tokenizer-model {other}", "token 4 is "),
    ("rl", ("math",), "{both} --teacher-max-tokens-per-microbatch 5", "--teacher-max-tokens-per-microbatch 5: must"),
    ("rl", None, "", NO_TEACHER),
    ("sft", None, "", NO_TEACHER),
    ("rl", None, "--distill reward --teacher self {wide}", "--teacher self: the teacher has the"),
    ("rl", None, "--teacher ema --ema-decay 0.5 --teacher-num-layers 3", "num-layers is 3"),
    ("rl", None, "{wide} --teacher-tokenizer-model {other}", "token 4 is "),
    ("rl", None, "{wide} --role-map actor=0;reward=0;teacher=1", "rank 1 of teacher"),
    ("rl", None, "{wide} --prompts {hinted}", "hinted.jsonl:2: teacher_prompt has "),
    ("rl", None, "{wide} --teacher-max-prompt-length 90 --teacher-max-tokens-per-microbatch 93",
     "microbatch 93: must hold one sequence of --teacher-max-prompt-length + --max-response-length = 94 tokens"),
    ("rl", None, "{wide} --teacher-hidden-size 40", "the flags of teacher describe"),
])  # fmt: skip
def test_wrong_input(tmp_path, name, in_turn, flags, message):
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer(["ab", "ba", "cd", "dc", "ef", "xyz"], 16, False))
    values = {"math": lambda: teachers(math="math"), "both": lambda: teachers(math="math", code="code"),
              "wide": one_teacher, "hinted": hinted_prompts}  # fmt: skip
    flags = flags.format(other=other, **{name: value() for name, value in values.items() if f"{{{name}}}" in flags})
    flags = f"--distill loss {f'--prompts {prompts_of_teachers(*in_turn)}' if in_turn else ''} {flags}"
    argv = rl_argv(tmp_path, f"{ONLY_DISTILS} {flags}") if name == "rl" else sft_argv(tmp_path, flags)
    assert message in refusal(argv, name)
