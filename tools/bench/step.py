"""A whole GRPO step: seconds of megarl.train_rl against TRL's GRPOTrainer, with the same weights, prompts and work.

    PYTHONPATH=. python tools/bench/step.py --case fixed|ragged [--rounds 3] [--steps 3] [--json FILE] [--markdown]
        [--granite] [--ranks 1] [--trl-ranks 1] [--threads 2] [--trl-batch 64] [--trl-continuous] [--processor-time]

A step: 8 prompts of 16–22 tokens, 8 responses to each at temperature 1, a reward (number of distinct words), GRPO
advantages without KL, and one AdamW update on all 64 responses: one forward and backward over each, the clipped loss as
a mean over tokens, gradient clipping at norm 1, fp32, no recomputation. fixed: vocabulary 4,096, 64 tokens each, since
the model cannot generate the end token. ragged: vocabulary 64 with the end token, at most 256 tokens, so that random
weights end a response after about 60. The model is a Llama, or with --granite a Granite of the same shape: a type that
megarl has no layers for, so that it runs the module of transformers.

Each round starts each side in its own process, on one rank with all cores or on --ranks data-parallel ranks that share
them, over gloo; --trl-ranks gives TRL another number than megarl, --threads each rank another number than its share. A
step's time is from the end of the previous step to its end; the first step is not counted.
--processor-time counts seconds of a side's processor instead of the clock's, for a machine with other work; one rank
and --threads 1 then, since each rank counts its own.
--trl-batch is the number of responses in TRL's forward passes, over all ranks: below 64, it accumulates gradients. With
--trl-continuous, TRL generates with Hugging Face's continuous batching instead of `generate`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tools.bench import common

PROMPTS, SAMPLES, WARM_UP, RATE = 8, 8, 1, 1e-6
PEERS = {"trl": "trl"}
PAGED = {"page_size": 32, "num_blocks": 640, "max_batch_tokens": 4096}  # room for all responses of either case
CHOICES = ("granite", "trl_continuous", "processor_time")  # flags that a side gets, too
SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class Case:
    """Vocabulary size, maximum new tokens, and whether the model can generate the end token."""

    vocab: int
    new_tokens: int
    ends: bool

    @property
    def shape(self) -> common.Shape:
        return common.Shape(layers=4, hidden=256, ffn=768, vocab=self.vocab)


CASES = {"fixed": Case(4096, 64, ends=False), "ragged": Case(64, 256, ends=True)}


def make_inputs(folder: Path, case: Case):
    """Makes prompts and a tokenizer in which every id is a word: w3, w4, …"""
    words = {word: number for number, word in enumerate([*SPECIAL.values(), *(f"w{i}" for i in range(3, case.vocab))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"} | SPECIAL
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    prompts = common.random_prompts([16 + i % 7 for i in range(PROMPTS)], case.vocab)
    rows = [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def distinct(text: str) -> float:
    """The reward: number of distinct words, divided by 64."""
    return len(set(text.split())) / 64


def reward(sample) -> float:
    """The reward as a plug-in of megarl."""
    return distinct(sample.response)


def megarl_flags(
    folder: Path, case: Case, steps: int, model: list[str] | None = None, longest_prompt: int = 32
) -> list[str]:
    """Command line of megarl.train_rl, including the `model`'s flags; default: a Llama's."""
    text = (
        f"--prompts {folder}/prompts.jsonl --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
        f" --reward tools.bench.step:reward --prompts-per-step {PROMPTS} --samples-per-prompt {SAMPLES}"
        f" --max-prompt-length {longest_prompt} --max-response-length {case.new_tokens} --advantage grpo"
        f" --kl-coefficient 0 --lr {RATE} --lr-decay-style constant --weight-decay 0 --clip-grad 1"
        f" --train-iters {steps} --save {folder}/run --overwrite"
    )
    return [*(case.shape.flags() if model is None else model), *text.split()]


def world_size() -> int:
    """Number of ranks of this side, from torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def train_megarl(folder: Path, flags: list[str]) -> list[float]:
    """Seconds of each step of a run of megarl.train_rl in this process, with `{folder}/run` as its --save."""
    from megarl import arguments, train_rl
    from megarl.observe.timers import Timers

    train_rl.train(arguments.parse(flags, world_size(), "rl"), Timers())
    torch.distributed.destroy_process_group()
    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["time/step_s"] for row in rows]


def model_flags(folder: Path, is_granite: bool) -> list[str] | None:
    """The model's flags, as of `megarl_flags`."""
    return ["--hf-model", str(folder / "model"), "--model-source", "transformers"] if is_granite else None


def run_megarl(folder: Path, case: Case, flags: list[str]) -> list[float]:
    """Seconds of each step of a run in this process."""
    from megarl.data.tokenizers_hf import HuggingFaceTokenizer

    if not case.ends:
        HuggingFaceTokenizer.end_ids = property(lambda self: (), lambda self, value: None)
    return train_megarl(folder, flags)


def run_trl(folder: Path, case: Case, steps: int, batch: int, continuous: bool) -> list[float]:
    """Seconds of each step of TRL's trainer in this process."""
    import datasets
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if not case.ends:
        tokenizer.add_special_tokens({"eos_token": "<end>"})  # an id above those of the model
    return train_trl(
        folder, steps, batch, case.new_tokens, use_transformers_continuous_batching=continuous,
        transformers_continuous_batching_config=PAGED if continuous else None,
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [distinct(text) for text in completions],
        train_dataset=datasets.load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train"),
        processing_class=tokenizer,
    )  # fmt: skip


def train_trl(folder: Path, steps: int, batch: int, new_tokens: int, *, model, reward_funcs, train_dataset,
              processing_class, peft_config=None, **options) -> list[float]:  # fmt: skip
    """Seconds of each step of a GRPOTrainer with PROMPTS × SAMPLES responses per step; `options`: of its GRPOConfig."""
    from trl import GRPOConfig, GRPOTrainer

    clock = common.trainer_clock()
    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=batch // world_size(),
        gradient_accumulation_steps=PROMPTS * SAMPLES // batch,
        num_generations=SAMPLES, max_completion_length=new_tokens, max_steps=steps, learning_rate=RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, beta=0.0, temperature=1.0, top_k=0,
        bf16=False, gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), logging_strategy="no",
        report_to=[], save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    GRPOTrainer(
        model=model, reward_funcs=reward_funcs, args=config, train_dataset=train_dataset,
        processing_class=processing_class, callbacks=[clock], peft_config=peft_config,
    ).train()  # fmt: skip
    return clock.seconds()


def in_process(
    program: str, side: str, folder: Path, ranks: int, options: list[str], threads: int | None = None
) -> list[float]:
    """Seconds of the measured steps of one side: runs `program` with `options` on ranks that share the cores.

    `threads`: of each rank; None: OMP_NUM_THREADS, or else a rank's share of the cores.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher * (ranks > 1), program, *options, "--side", side, "--folder", str(folder)]
    share = max(1, os.cpu_count() // ranks)
    environment = {"OMP_NUM_THREADS": str(share), "HF_HUB_OFFLINE": "1", **os.environ}
    environment |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise common.Unusable(f"{side} failed:\n{done.stdout}{done.stderr}")
    return json.loads((folder / "seconds.json").read_text())[WARM_UP:]


def write_seconds(folder: Path, seconds: list[float]):
    """What `in_process` reads, from rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))


def make_folder(folder: Path, case: Case, is_granite: bool = False):
    """Makes all that the sides read: prompts, tokenizer and the model."""
    make_inputs(folder, case)
    if is_granite:
        return make_granite(folder, case)
    chunk, _, namespace = common.build(case.shape, (32, case.new_tokens))
    common.export(chunk, case.shape, namespace, 32 + case.new_tokens).save_pretrained(folder / "model")


def make_granite(folder: Path, case: Case):
    """Makes a Granite with random weights and scales of its own."""
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(1)
    scales = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
    ends = {"eos_token_id": 1} if case.ends else {}
    config = GraniteConfig(**case.shape.entries(32 + case.new_tokens) | ends | scales, attention_multiplier=0.0625)
    GraniteForCausalLM(config).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, folder / "model" / name)


def measure(args: argparse.Namespace) -> dict:
    """Runs the sides alternately, in new processes each round."""
    case, ranks = CASES[args.case], {common.OURS: args.ranks, "trl": args.trl_ranks or args.ranks}
    sides = list(ranks)
    steps = {side: [] for side in sides}

    options = ["--case", args.case, "--steps", str(args.steps), "--trl-batch", str(args.trl_batch)]
    options += [f"--{name.replace('_', '-')}" for name in CHOICES if getattr(args, name)]

    def clock(side: str, folder: Path) -> float:
        steps[side].append(in_process(__file__, side, folder, ranks[side], options, args.threads))
        return sum(steps[side][-1]) / len(steps[side][-1])

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder, case, args.granite)
        common.alternate({side: lambda side=side: clock(side, folder) for side in sides}, args.rounds)
    seconds = {side: sum(rounds, []) for side, rounds in steps.items()}
    settings = {"ranks": ranks, "trl_batch": args.trl_batch} | {name: getattr(args, name) for name in CHOICES}
    return common.report(args.case, seconds, {"responses": PROMPTS * SAMPLES}, **settings)


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    made = common.parser(__doc__, CASES, rounds=3)
    made.add_argument("--steps", type=int, default=3, help="measured steps per round; default: %(default)s")
    made.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of each side; default: %(default)s")
    made.add_argument("--trl-ranks", type=int, help="data-parallel ranks of TRL; default: as --ranks")
    made.add_argument("--threads", type=int, help="threads of a rank; default: its share of the cores")
    made.add_argument(
        "--trl-batch", type=int, default=64, help="responses per forward pass of TRL; default: %(default)s"
    )
    made.add_argument("--granite", action="store_true", help="a Granite as transformers' module instead of a Llama")
    made.add_argument("--trl-continuous", action="store_true", help="TRL generates with continuous batching")
    made.add_argument("--processor-time", action="store_true", help="count seconds of a side's processor")
    made.add_argument("--side", choices=[common.OURS, *PEERS], help="run only this side, in --folder")
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = common.parsed(made, argv)
    if args.side:
        steps, case = WARM_UP + args.steps, CASES[args.case]
        if args.processor_time:
            common.use_processor_time()
        if args.side == common.OURS:
            flags = megarl_flags(args.folder, case, steps, model_flags(args.folder, args.granite))
            seconds = run_megarl(args.folder, case, flags)
        else:
            seconds = run_trl(args.folder, case, steps, args.trl_batch, args.trl_continuous)
        write_seconds(args.folder, seconds)
        return
    common.installed(PEERS)
    found = measure(args)
    common.publish(found, args, CASES[args.case].shape)
    if torch.distributed.is_initialized():  # by the Llama that megarl has exported
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
