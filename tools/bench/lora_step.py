"""A whole GRPO step with LoRA on a pretrained model: seconds of megarl.train_rl against TRL's GRPOTrainer with PEFT.

    PYTHONPATH=. python tools/bench/lora_step.py --model runs/smollm2-135m-instruct [--rounds 3] [--steps 3]
        [--ranks 2] [--trl-ranks 1] [--threads 1] [--trl-batch 64] [--json FILE] [--markdown] [--processor-time]

The work is that of launch/smollm2_grpo.sh: a step has 8 prompts of tools/make_products.py in the model's chat template,
8 responses of at most 32 tokens to each at temperature 1, the reward for a right last number, GRPO advantages without
KL, and one AdamW update of factors of rank 16 in all linear layers, in fp32. The learning rate is so small that the
policy stays what it is. Otherwise as tools/bench/step.py. `modules` is megarl with transformers' modules
(--model-source transformers) instead of Megatron's layers. Each side has its own number of data-parallel ranks, which
share the cores: set each to what is fastest on the machine. Needs the extra `bench`.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path

import torch

from tools import make_products
from tools.bench import common, step

NEW_TOKENS, RANK, ALPHA = 32, 16, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PEERS = ("trl", "peft")
MODULES = "modules"
SIDES = (common.OURS, MODULES, "trl")
LAST_NUMBER = r"(\d+)\D*\Z"


def make_inputs(folder: Path):
    """Writes the prompts, as lines of megarl and as conversations with an answer for TRL."""
    if make_products.main(["--out", str(folder)]) != 0:
        raise common.Unusable("the prompts cannot be made")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def is_right(response: str, answer: str) -> float:
    """1 if the last number of the response is the answer, else 0."""
    found = re.search(LAST_NUMBER, response)
    return float(found is not None and found[1] == answer)


def megarl_flags(folder: Path, model: Path, steps: int) -> list[str]:
    """Command line of megarl.train_rl."""
    text = (
        f"--hf-model {model} --prompts {folder}/train.jsonl --reward regex --reward-pattern {LAST_NUMBER}"
        f" --prompts-per-step {step.PROMPTS} --samples-per-prompt {step.SAMPLES} --max-prompt-length 64"
        f" --max-response-length {NEW_TOKENS} --advantage grpo --kl-coefficient 0 --lr {step.RATE}"
        f" --lr-decay-style constant --weight-decay 0 --clip-grad 1 --lora-rank {RANK} --lora-alpha {ALPHA}"
        f" --train-iters {steps} --save {folder}/run --overwrite"
    )
    return text.split()


def run_megarl(folder: Path, model: Path, steps: int, source: str = "megatron") -> list[float]:
    """Seconds of each step of a run in this process; `source`: of the model's layers."""
    return step.train_megarl(folder, [*megarl_flags(folder, model, steps), "--model-source", source])


def run_trl(folder: Path, model: Path, steps: int, batch: int) -> list[float]:
    """Seconds of each step of TRL's trainer in this process."""
    import datasets
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def rewards(completions, answer, **_):
        return [is_right(chat[0]["content"], right) for chat, right in zip(completions, answer, strict=True)]

    return step.train_trl(
        folder, steps, batch, NEW_TOKENS, reward_funcs=rewards,
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        train_dataset=datasets.load_dataset("json", data_files=str(folder / "chats.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS),
    )  # fmt: skip


def measure(args: argparse.Namespace) -> dict:
    """Runs the sides alternately, in new processes each round."""
    ranks = {common.OURS: args.ranks, MODULES: args.ranks, "trl": args.trl_ranks}
    options = ["--model", str(args.model), "--steps", str(args.steps), "--trl-batch", str(args.trl_batch)]
    options += ["--processor-time"] * args.processor_time
    seconds = {side: [] for side in ranks}

    def clock(side: str, folder: Path) -> float:
        seconds[side] += step.in_process(__file__, side, folder, ranks[side], options, args.threads)
        return sum(seconds[side][-args.steps :]) / args.steps

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        common.alternate({side: lambda side=side: clock(side, folder) for side in ranks}, args.rounds)
    responses = step.PROMPTS * step.SAMPLES
    return common.report("lora", seconds, {"responses": responses}, ranks=ranks, trl_batch=args.trl_batch)


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    made = common.parser(__doc__, {}, rounds=3)
    made.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder")
    made.add_argument("--steps", type=int, default=3, help="measured steps per round; default: %(default)s")
    made.add_argument("--ranks", type=int, default=2, help="data-parallel ranks of megarl; default: %(default)s")
    made.add_argument("--trl-ranks", type=int, default=1, help="data-parallel ranks of TRL; default: %(default)s")
    made.add_argument("--threads", type=int, help="threads of a rank; default: its share of the cores")
    made.add_argument(
        "--trl-batch", type=int, default=64, help="responses per forward pass of TRL; default: %(default)s"
    )
    made.add_argument("--processor-time", action="store_true", help="count seconds of a side's processor")
    made.add_argument("--side", choices=SIDES, help="run only this side, in --folder")
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = common.parsed(made, argv)
    if not (args.model / "config.json").is_file():
        made.error(f"--model {args.model}: no Hugging Face folder, it has no config.json")
    if args.side:
        if args.processor_time:
            common.use_processor_time()
        run, *more = {
            common.OURS: (run_megarl,),
            MODULES: (run_megarl, "transformers"),
            "trl": (run_trl, args.trl_batch),
        }[args.side]
        step.write_seconds(args.folder, run(args.folder, args.model, step.WARM_UP + args.steps, *more))
        return
    for module in PEERS:
        common.installed({module: module})
    found = measure(args)
    print(common.table(found, args.markdown))
    if args.json:
        args.json.write_text(json.dumps(found | {"model": args.model.name}, indent=2) + "\n")


if __name__ == "__main__":
    main()
