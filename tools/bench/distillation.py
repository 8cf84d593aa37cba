"""A whole step of distillation: seconds of megarl against TRL's trainers, with the same student, teacher and texts.

    PYTHONPATH=. python tools/bench/distillation.py --case fixed|ragged|own [--rounds 3] [--steps 4] [--json FILE]

fixed, ragged: 32 given texts with a prompt of 64 tokens, generalized JSD with β 0.5, one AdamW update, clipping at norm
1, fp32: megarl.train_sft --distill loss against TRL's GKDTrainer with λ 0. fixed: responses of 64 tokens. ragged:
log-normal lengths, median 32, at most 256. Every step has the same texts. Timing counts only if the losses of all steps
agree to 1e-5.

own: 64 responses of 32 tokens that the student writes, reverse KL: megarl.train_rl --distill loss against TRL's
DistillationTrainer. The texts differ, so that losses cannot be compared; their mean must agree to 5 %.

A step's time is from the end of the previous step to its end; the first step is not counted.
"""

import json
from pathlib import Path

import torch

from tools.bench import common, peer_steps, step

TEXTS, PROMPT, LONGEST, RATE, OWN, NEW = 32, 64, 256, 1e-4, 64, 32
STUDENT = common.Shape(layers=4, hidden=256, ffn=768, vocab=4096)
TEACHER = common.Shape(layers=6, hidden=384, ffn=1024, vocab=4096)
CASES = {"fixed": [64] * TEXTS, "ragged": common.log_normal_lengths(TEXTS, LONGEST, 0.8).tolist(), "own": [NEW] * OWN}
TOLERANCE = {"fixed": 1e-5, "ragged": 1e-5, "own": 0.05}  # of a loss; for own relative, of the first


def make_folder(folder: Path, lengths: list[int]):
    """Makes what both sides read: a tokenizer whose ids are words, texts, and both models."""
    step.make_inputs(folder, step.Case(STUDENT.vocab, LONGEST, ends=True))
    words = iter(common.random_prompts([len(lengths) * PROMPT + sum(lengths)], STUDENT.vocab)[0])

    def text(length: int) -> str:
        return " ".join(f"w{next(words)}" for _ in range(length))

    rows = [{"prompt": text(PROMPT), "response": " " + text(length)} for length in lengths]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, shape, seed in (("student", STUDENT, 1), ("teacher", TEACHER, 2)):
        chunk, _, namespace = common.build(shape, (PROMPT, LONGEST + 1), f"--seed {seed} --init-method-std 0.1")
        common.export(chunk, shape, namespace, PROMPT + LONGEST + 1).save_pretrained(folder / name)


def run_megarl(folder: Path, case: str, steps: int) -> tuple[list[float], list[float]]:
    """(seconds, losses) of each step of a run in this process."""
    from megarl import arguments, train_rl, train_sft
    from megarl.observe.timers import Timers

    flags = (
        f"--prompts {folder}/texts.jsonl --hf-model {folder}/student --teacher-hf-model {folder}/teacher"
        f" --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder} --max-prompt-length {PROMPT}"
        f" --teacher-tokenizer-model {folder} --teacher-tokenizer-type HuggingFaceTokenizer"
        f" --lr {RATE} --lr-decay-style constant --weight-decay 0 --clip-grad 1 --train-iters {steps} --distill loss"
        f" --save {folder}/run --overwrite"
    )
    if case == "own":
        flags += f" --max-response-length {NEW} --prompts-per-step {OWN} --samples-per-prompt 1"
        train_rl.train(arguments.parse(flags.split(), 1, "rl"), Timers())
    else:
        flags += f" --max-response-length {LONGEST + 1} --global-batch-size {TEXTS} --distill-divergence jsd"
        train_sft.train(arguments.parse(flags.split(), 1, "sft"), Timers())
    torch.distributed.destroy_process_group()
    rows = [json.loads(row) for row in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["time/step_s"] for row in rows], [row["distill/divergence"] for row in rows]


def run_trl(folder: Path, case: str, steps: int) -> tuple[list[float], list[float]]:
    """(seconds, losses) of each step of TRL's trainer in this process."""
    import datasets
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DistillationConfig, DistillationTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    clock = common.trainer_clock()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    student, teacher = (
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("student", "teacher")
    )
    rows = datasets.load_dataset("json", data_files=str(folder / "texts.jsonl"), split="train")
    options = {
        "output_dir": str(folder / "trl"), "max_steps": steps, "learning_rate": RATE, "lr_scheduler_type": "constant",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "bf16": False, "gradient_checkpointing": False, "temperature": 1.0,
        "use_cpu": not torch.cuda.is_available(), "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "per_device_train_batch_size": len(rows),
    }  # fmt: skip
    both = {"model": student, "teacher_model": teacher, "processing_class": tokenizer, "callbacks": [clock]}
    if case == "own":
        config = DistillationConfig(**options, beta=1.0, max_completion_length=NEW, top_k=0)
        DistillationTrainer(args=config, train_dataset=rows.select_columns("prompt"), **both).train()
    else:
        config = GKDConfig(**options, beta=0.5, lmbda=0.0, max_length=None)
        GKDTrainer(args=config, train_dataset=rows, data_collator=padded(tokenizer), **both).train()
    return clock.seconds(), clock.losses


def padded(tokenizer):
    """A collator that gives GKDTrainer the token ids that megarl trains on: prompt, response and end."""

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        texts = [(tokenizer(row["prompt"])["input_ids"], tokenizer(row["response"])["input_ids"]) for row in rows]
        texts = [(prompt, [*response, tokenizer.eos_token_id]) for prompt, response in texts]
        width = max(len(prompt) + len(response) for prompt, response in texts)
        ids, labels, mask = (torch.full((len(rows), width), fill) for fill in (tokenizer.pad_token_id, -100, 0))
        for i, (prompt, response) in enumerate(texts):
            length = len(prompt) + len(response)
            ids[i, :length] = torch.tensor(prompt + response)
            labels[i, len(prompt) : length] = torch.tensor(response)
            mask[i, :length] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return collate


def differences(case: str, ours: list[float], theirs: list[float]) -> list[float]:
    """How far the losses are apart; of own responses only the first, relative, because the texts differ."""
    if case == "own":
        return [abs(ours[0] / theirs[0] - 1)]
    return [abs(one - other) for one, other in zip(ours, theirs, strict=True)]


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    peer_steps.main(
        argv, __doc__, __file__, CASES, {common.OURS: run_megarl, "trl": run_trl},
        make_folder=lambda folder, case: make_folder(folder, CASES[case]), differences=differences,
        tolerance=TOLERANCE.get, sizes=lambda case: {"texts": len(CASES[case])}, shape=STUDENT,
    )  # fmt: skip


if __name__ == "__main__":
    main()
