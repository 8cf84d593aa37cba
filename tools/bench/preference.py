"""A whole DPO step: seconds of megarl.train_preference against TRL's DPOTrainer, with the same weights and pairs.

    PYTHONPATH=. python tools/bench/preference.py --case fixed|ragged [--rounds 3] [--steps 4] [--json FILE]

A step: 16 pairs of a prompt of 64 tokens and two responses, DPO with β 0.1, one AdamW update, clipping at norm 1, fp32.
Every step has the same pairs, and both sides compute the log-probs of the reference before training (TRL's
`precompute_ref_log_probs`). fixed: responses of 64 tokens. ragged: log-normal lengths, median 32, at most 256.

Timing counts only if the losses of all steps agree to 1e-5: then the updates agree, too, since each loss depends on all
updates before it. A step's time is from the end of the previous step to its end; the first step is not counted.
"""

import json
from pathlib import Path

import torch

from tools.bench import common, peer_steps, step

PAIRS, PROMPT, LONGEST, BETA, RATE = 16, 64, 256, 0.1, 1e-4
SHAPE = common.Shape(layers=4, hidden=256, ffn=768, vocab=4096)
CASES = {"fixed": [64] * (2 * PAIRS), "ragged": common.log_normal_lengths(2 * PAIRS, LONGEST, 0.8).tolist()}
TOLERANCE = 1e-5  # of a loss


def make_folder(folder: Path, lengths: list[int]):
    """Makes what both sides read: a tokenizer whose ids are words, pairs, and the exported model."""
    step.make_inputs(folder, step.Case(SHAPE.vocab, LONGEST, ends=True))

    def text(length: int, words) -> str:
        return " ".join(f"w{next(words)}" for _ in range(length))

    words = iter(common.random_prompts([PAIRS * PROMPT + sum(lengths)], SHAPE.vocab)[0])
    rows = [
        {"prompt": text(PROMPT, words), "chosen": " " + text(chosen, words), "rejected": " " + text(rejected, words)}
        for chosen, rejected in zip(lengths[::2], lengths[1::2], strict=True)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chunk, _, namespace = common.build(SHAPE, (PROMPT, LONGEST + 1))
    common.export(chunk, SHAPE, namespace, PROMPT + LONGEST + 1).save_pretrained(folder / "model")


def run_megarl(folder: Path, case: str, steps: int) -> tuple[list[float], list[float]]:
    """(seconds, losses) of each step of a run in this process."""
    from megarl import arguments, train_preference
    from megarl.observe.timers import Timers

    flags = (
        f"--prompts {folder}/pairs.jsonl --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
        f" --max-prompt-length {PROMPT} --max-response-length {LONGEST + 1} --global-batch-size {PAIRS}"
        f" --preference-beta {BETA} --lr {RATE} --lr-decay-style constant --weight-decay 0 --clip-grad 1"
        f" --train-iters {steps} --save {folder}/run --overwrite"
    )
    parsed = arguments.parse([*SHAPE.flags(), *flags.split()], 1, "preference")
    train_preference.train(parsed, Timers())
    torch.distributed.destroy_process_group()
    rows = [json.loads(row) for row in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["time/step_s"] for row in rows], [row["preference/loss"] for row in rows]


def run_trl(folder: Path, case: str, steps: int) -> tuple[list[float], list[float]]:
    """(seconds, losses) of each step of TRL's trainer in this process."""
    import datasets
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    clock = common.trainer_clock()
    config = DPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=PAIRS, max_steps=steps, learning_rate=RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, beta=BETA, precompute_ref_log_probs=True,
        precompute_ref_batch_size=PAIRS, max_length=None, bf16=False, gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(), logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    DPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), args=config,
        train_dataset=datasets.load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train"),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder), callbacks=[clock],
    ).train()  # fmt: skip
    return clock.seconds(), clock.losses


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    peer_steps.main(
        argv, __doc__, __file__, CASES, {common.OURS: run_megarl, "trl": run_trl},
        make_folder=lambda folder, case: make_folder(folder, CASES[case]),
        differences=lambda _, ours, theirs: [abs(one - other) for one, other in zip(ours, theirs, strict=True)],
        tolerance=lambda _: TOLERANCE, sizes=lambda _: {"pairs": PAIRS}, shape=SHAPE,
    )  # fmt: skip


if __name__ == "__main__":
    main()
