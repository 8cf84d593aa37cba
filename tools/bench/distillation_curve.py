"""What a distilled policy learns: accuracy of megarl and of TRL's DistillationTrainer by responses and seconds.

    PYTHONPATH=. python tools/bench/distillation_curve.py --run runs/quickstart [--updates 400] [--json FILE]

RUN is a run of launch/quickstart.sh: its warm start is the student, its PPO policy the teacher. Both sides learn from
64 own responses an update, one to each prompt, sampled at temperature 1, by the forward KL over the whole vocabulary,
as a mean over tokens, with AdamW (β₂ 0.98), the quickstart's rate after 40 updates of warm-up, linear decay, and
clipping at norm 1, in fp32, in a process of its own. Accuracy is of greedy responses to the held-out prompts; seconds
are without evaluations.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

from megarl.data.tokenizers import build_tokenizer
from tools.bench import common, step

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
UPDATE, WARM_UP = 64, 40  # responses of an update, updates of the warm-up


def shape_of(config: dict, vocab: int) -> dict:
    """The config.json of the quickstart's policy."""
    longest = config["max-prompt-length"] + config["max-response-length"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": vocab,
        "hidden_size": config["hidden-size"], "intermediate_size": config["ffn-hidden-size"],
        "num_hidden_layers": config["num-layers"], "num_attention_heads": config["num-attention-heads"],
        "num_key_value_heads": config["num-query-groups"], "max_position_embeddings": longest, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip


def make_folder(folder: Path, run: Path):
    """Makes what TRL reads: tokenizer, student and teacher."""
    ours = build_tokenizer("SentencePieceTokenizer", str(run / "data" / "tokenizer.model"))
    save_tokenizer(folder, ours, [row["prompt"] for row in rows_of(run, "train")])
    (folder / "shape").mkdir()
    config = yaml.safe_load(CONFIG.read_text())
    (folder / "shape" / "config.json").write_text(json.dumps(shape_of(config, ours.vocab_size)))
    command = [sys.executable, str(ROOT / "tools" / "convert.py"), "to-hf", "--hf-model", str(folder / "shape")]
    command += ["--make-vocab-size-divisible-by", str(config["make-vocab-size-divisible-by"])]
    for name, source in (("student", "sft"), ("teacher", "ppo")):
        files = ["--load", str(run / source), "--save", str(folder / name)]
        done = subprocess.run([*command, *files], text=True, capture_output=True)
        if done.returncode:
            raise common.Unusable(f"{name}: {done.stdout}{done.stderr}")


def save_tokenizer(folder: Path, ours, texts: list[str]):
    """A Hugging Face tokenizer with the ids of a SentencePiece model, whose pieces are few: the longest one fits."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = {ours.piece(number): number for number in range(ours.vocab_size)}
    text = sorted((piece for piece, number in pieces.items() if number > 3), key=len, reverse=True)
    made = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, text))), "isolated")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")
    if theirs(texts)["input_ids"] != [ours.encode(text) for text in texts]:
        raise common.Unusable("the tokenizers differ")
    theirs.save_pretrained(folder)


def rows_of(run: Path, name: str) -> list[dict]:
    """Prompts with answers."""
    return [json.loads(line) for line in (run / "data" / f"{name}.jsonl").read_text().splitlines()]


def run_megarl(run: Path, folder: Path, updates: int, every: int, seed: int) -> list[dict]:
    """The curve of a run in this process."""
    from megarl import arguments, train_rl
    from megarl.observe.timers import Timers

    data = run / "data"
    flags = (
        f"--config {CONFIG} --prompts {data}/train.jsonl --eval-prompts {data}/heldout.jsonl --seed {seed}"
        f" --tokenizer-model {data}/tokenizer.model --pretrained-checkpoint {run}/sft --save {folder}/run"
        f" --teacher-pretrained-checkpoint {run}/ppo --distill loss --distill-divergence forward"
        f" --reward 0*exact-match --advantage none --kl-coefficient 0 --ppo-epochs 1 --minibatch-size {UPDATE}"
        f" --prompts-per-step {UPDATE} --samples-per-prompt 1 --lr-warmup-iters {WARM_UP}"
        f" --train-iters {updates} --lr-decay-iters {updates} --eval-interval {every} --save-interval {updates}"
    )
    train_rl.train(arguments.parse(flags.split(), 1, "rl"), Timers())
    torch.distributed.destroy_process_group()
    curve, seconds = [], 0.0
    for row in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()):
        evaluated = sum(value for name, value in row.items() if re.fullmatch("time/.*/eval_.*_s", name))
        seconds += row["time/step_s"] - evaluated if row["step"] else 0.0
        if "eval/accuracy" in row:
            point = {"responses": row["step"] * UPDATE, "seconds": seconds, "accuracy": row["eval/accuracy"]}
            curve.append(point)
    return curve


def run_trl(run: Path, folder: Path, updates: int, every: int, seed: int) -> list[dict]:
    """The curve of TRL's trainer in this process."""
    import datasets
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    student, teacher = (
        LlamaForCausalLM.from_pretrained(folder / n, dtype=torch.float32) for n in ("student", "teacher")
    )
    config, held_out, curve = yaml.safe_load(CONFIG.read_text()), rows_of(run, "heldout"), []
    new = config["max-response-length"]

    def measure(step: int, seconds: float):
        found = accuracy(student, tokenizer, held_out[: config["eval-samples"]], new)
        curve.append({"responses": step * UPDATE, "seconds": seconds, "accuracy": found})

    class Curve(TrainerCallback):
        """Measures the accuracy every so many updates, and the seconds without these."""

        def on_train_begin(self, *_, **__):
            measure(0, 0.0)
            self.seconds, self.since = 0.0, time.perf_counter()

        def on_step_end(self, args, state, *_, **__):
            self.seconds += time.perf_counter() - self.since
            if state.global_step % every == 0:
                measure(state.global_step, self.seconds)
            self.since = time.perf_counter()

    options = DistillationConfig(
        output_dir=str(folder / "trl"), max_steps=updates, per_device_train_batch_size=UPDATE,
        learning_rate=config["lr"], lr_scheduler_type="linear", warmup_steps=WARM_UP, weight_decay=0.0,
        adam_beta2=config["adam-beta2"], max_grad_norm=config["clip-grad"], beta=0.0, max_completion_length=new,
        temperature=1.0, top_k=0, bf16=False, gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(),
        logging_strategy="no", report_to=[], save_strategy="no", disable_tqdm=True, seed=seed,
    )  # fmt: skip
    prompts = datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in rows_of(run, "train")])
    DistillationTrainer(
        model=student, teacher_model=teacher, args=options, train_dataset=prompts, processing_class=tokenizer,
        callbacks=[Curve()],
    ).train()  # fmt: skip
    return curve


RUNS = {common.OURS: run_megarl, "trl": run_trl}


@torch.no_grad()
def accuracy(model, tokenizer, rows: list[dict], new_tokens: int) -> float:
    """Share of greedy responses that are the answer."""
    was_training = model.training
    model.eval()
    ids = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
    ids = {name: ids[name].to(model.device) for name in ("input_ids", "attention_mask")}
    written = model.generate(**ids, do_sample=False, max_new_tokens=new_tokens, eos_token_id=tokenizer.eos_token_id)
    model.train(was_training)
    texts = tokenizer.batch_decode(written[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def table(curves: dict[str, list[dict]]) -> str:
    """Accuracy in per cent and seconds of both sides, a row for each number of responses."""
    lines = ["| responses | megarl, accuracy | seconds | TRL, accuracy | seconds |", "|---|---|---|---|---|"]
    for ours, theirs in zip(curves[common.OURS], curves["trl"], strict=True):
        cells = [f"{100 * side['accuracy']:.1f} | {side['seconds']:.0f}" for side in (ours, theirs)]
        lines.append(f"| {ours['responses']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None):
    """Parses flags, runs both sides or one of them, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of launch/quickstart.sh")
    parser.add_argument("--updates", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=WARM_UP, help="updates between evaluations; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the responses; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the curves to this file")
    parser.add_argument("--side", choices=RUNS, help="run only this side, in --folder")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.side:
        curve = RUNS[args.side](args.run, args.folder, args.updates, args.every, args.seed)
        (args.folder / f"curve-{args.side}.json").write_text(json.dumps(curve))
        step.write_seconds(args.folder, [point["seconds"] for point in curve])
        return
    common.installed(step.PEERS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder, args.run)
        options = [f"--{name}={getattr(args, name)}" for name in ("run", "updates", "every", "seed")]
        for side in RUNS:
            step.in_process(__file__, side, folder, 1, options)
        curves = {side: json.loads((folder / f"curve-{side}.json").read_text()) for side in RUNS}
    print(table(curves))
    if args.json:
        args.json.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
