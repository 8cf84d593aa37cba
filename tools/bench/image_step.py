"""A whole GRPO step on pictures: seconds of megarl.train_rl against TRL's GRPOTrainer, with the same folder and files.

    PYTHONPATH=. python tools/bench/image_step.py --case fixed|ragged [--rounds 3] [--steps 3] [--json FILE]
        [--markdown] [--ranks 1] [--trl-ranks 1] [--threads 2] [--trl-batch 64] [--processor-time]

The work is that of tools/bench/step.py with a picture of noise in each prompt: 256 × 256 pixels, 256 patches, 64 rows.
No picture comes twice in a run. The folder is a Qwen3-VL with random weights, made by transformers' own classes: a
language model of the sizes of step.py, 5.2 M parameters (fixed), and a tower of 2.2 M, whose features enter two layers.
The tower is frozen on both sides. Times count only if both sides read as many tokens of prompts.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from tools.bench import common, step

PICTURES, SIDE, WORDS, ROWS = 128, 256, 18, 64  # of a run at most; pixels; of a prompt's text; of its picture
PROMPT, MOST_STEPS = WORDS + 2 + ROWS, PICTURES // step.PROMPTS - step.WARM_UP  # tokens; measured in a round
VISION = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": SIDE**2}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
TOWER = {
    "hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "depth": 4, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 256,
    "deepstack_visual_indexes": [1, 3],
}  # fmt: skip


def make_folder(folder: Path, case: step.Case):
    """Makes what both sides read: pictures, prompts, tokenizer, image processor and model."""
    from PIL import Image
    from tokenizers import Tokenizer
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    step.make_inputs(folder, case)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(VISION)
    model, random = folder / "model", np.random.default_rng(3)
    image, video, start, end = map(tokenizer.token_to_id, VISION)
    entries = case.shape.entries(PROMPT + case.new_tokens) | {"eos_token_id": 1 if case.ends else None}
    entries |= {"vocab_size": tokenizer.get_vocab_size(), "head_dim": case.shape.hidden // case.shape.heads}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config=entries | {"rope_parameters": rotary}, vision_config=TOWER | {"out_hidden_size": case.shape.hidden},
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    Qwen3VLForConditionalGeneration(config).save_pretrained(model)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, model / name)
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    lines = []
    for number, words in enumerate(common.random_prompts([WORDS] * PICTURES, case.vocab)):
        Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(folder / f"{number}.png")
        prompt = [{"role": "user", "content": " ".join(f"w{word}" for word in words)}]
        lines.append({"prompt": prompt, "images": [f"{number}.png"]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def refuse_other_prompts(tokens: float):
    """Raises Unusable if a side's prompts do not have as many tokens as the other's."""
    if tokens != PROMPT:
        raise common.Unusable(f"a prompt has {tokens} tokens, not {PROMPT}")


def megarl_flags(folder: Path, case: step.Case, steps: int) -> list[str]:
    """Command line of megarl.train_rl."""
    return step.megarl_flags(folder, case, steps, ["--hf-model", str(folder / "model")], PROMPT)


def run_megarl(folder: Path, case: step.Case, steps: int) -> list[float]:
    """Seconds of each step of a run in this process."""
    seconds = step.run_megarl(folder, case, megarl_flags(folder, case, steps))
    responses = step.PROMPTS * step.SAMPLES
    for row in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()):
        refuse_other_prompts(row["perf/tokens"] / responses - row["rollout/response_length_mean"])
    return seconds


def run_trl(folder: Path, case: step.Case, steps: int, batch: int) -> list[float]:
    """Seconds of each step of TRL's trainer in this process."""
    import datasets
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "model")
    if not case.ends:
        tokenizer.add_special_tokens({"eos_token": "<end>"})  # an id above those of the model
    pictures = transformers.AutoImageProcessor.from_pretrained(folder / "model")
    videos = transformers.Qwen3VLVideoProcessor()
    processor = transformers.Qwen3VLProcessor(pictures, tokenizer, videos, chat_template=TEMPLATE)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    rows = [row | {"images": [str(folder / name) for name in row["images"]]} for row in rows]
    dataset = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    content = [
        {"type": "image", "image": dataset[0]["images"][0]},
        {"type": "text", "text": rows[0]["prompt"][0]["content"]},
    ]
    chat = [{"role": "user", "content": content}]
    found = processor.apply_chat_template([chat], add_generation_prompt=True, tokenize=True, return_dict=True)
    refuse_other_prompts(len(found["input_ids"][0]))
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32)
    model.model.visual.requires_grad_(False)
    return step.train_trl(
        folder, steps, batch, case.new_tokens, model=model, train_dataset=dataset, processing_class=processor,
        reward_funcs=lambda completions, **_: [step.distinct(chat[0]["content"]) for chat in completions],
    )  # fmt: skip


def measure(args: argparse.Namespace) -> dict:
    """Runs the sides alternately, in new processes each round."""
    case, ranks = step.CASES[args.case], {common.OURS: args.ranks, "trl": args.trl_ranks}
    options = ["--case", args.case, "--steps", str(args.steps), "--trl-batch", str(args.trl_batch)]
    options += ["--processor-time"] * args.processor_time
    seconds = {side: [] for side in ranks}

    def clock(side: str, folder: Path) -> float:
        seconds[side] += step.in_process(__file__, side, folder, ranks[side], options, args.threads)
        return sum(seconds[side][-args.steps :]) / args.steps

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder, case)
        common.alternate({side: lambda side=side: clock(side, folder) for side in ranks}, args.rounds)
    responses = step.PROMPTS * step.SAMPLES
    return common.report(args.case, seconds, {"responses": responses}, ranks=ranks, trl_batch=args.trl_batch)


def main(argv: list[str] | None = None):
    """Parses flags, measures, prints."""
    made = common.parser(__doc__, step.CASES, rounds=3)
    made.add_argument("--steps", type=int, default=3, help="measured steps per round; default: %(default)s")
    made.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of megarl; default: %(default)s")
    made.add_argument("--trl-ranks", type=int, default=1, help="data-parallel ranks of TRL; default: %(default)s")
    made.add_argument("--threads", type=int, help="threads of a rank; default: its share of the cores")
    made.add_argument(
        "--trl-batch", type=int, default=64, help="responses per forward pass of TRL; default: %(default)s"
    )
    made.add_argument("--processor-time", action="store_true", help="count seconds of a side's processor")
    made.add_argument("--side", choices=[common.OURS, *step.PEERS], help="run only this side, in --folder")
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = common.parsed(made, argv)
    if not 1 <= args.steps <= MOST_STEPS:
        made.error(f"--steps {args.steps}: allowed is 1 to {MOST_STEPS}, so that no picture comes twice")
    case, steps = step.CASES[args.case], step.WARM_UP + args.steps
    if args.processor_time:
        common.use_processor_time()
    if args.side == common.OURS:
        return step.write_seconds(args.folder, run_megarl(args.folder, case, steps))
    if args.side:
        return step.write_seconds(args.folder, run_trl(args.folder, case, steps, args.trl_batch))
    common.installed(step.PEERS)
    common.publish(measure(args), args, case.shape)


if __name__ == "__main__":
    main()
