"""Makes preference pairs from a policy's responses, ranked by reasoning_gym's scorers; held-out ones provably disjoint.

    python tools/make_preferences.py --prompts data/train.jsonl --samples runs/train/samples.jsonl \\
        --heldout-prompts data/heldout.jsonl --heldout-samples runs/heldout/samples.jsonl --out data/preferences

Samples are those of `megarl.evaluate --save`, several responses per prompt; responses cut by the length limit are
ignored. Writes to DIR train.jsonl, heldout.jsonl (each line: prompt, chosen, rejected, task, metadata) and prompts.json
(arguments and SHA-256). Of two responses to a prompt, the one with the higher score is chosen; two wrong responses of
about the same score make no pair. Further pairs compare the right answer with copies in which characters are changed.
The same arguments give the same bytes. Exit status: 0; 1 if a question of `--heldout-prompts` is in `--prompts`, from
which training draws; 2: wrong use.
"""

import argparse
import itertools
import random
import sys
import typing
from pathlib import Path

from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet, load_prompts
from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line, writing
from megarl.plain_files import MAX_RECORDS, parse_json, read_text, reading
from megarl.rewards.base import Sample
from megarl.rewards.tasks import check_tasks, load_tasks, reasoning_gym
from tools.make_prompts import normalise, write_files

MOST_EDITS = 2  # maximum edits of a corrupted answer
SECONDS = 30.0  # that scoring one response may take
TRIES = 10  # per corrupted answer, since an edit may undo another
FIELDS = {"prompt": str, "response": str, "finished": bool}  # fields of a sample that are read


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked. Raises UsageError."""
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    for prefix, kind in (("", "training"), ("heldout-", "held-out")):
        parser.add_argument(f"--{prefix}prompts", required=True, metavar="FILE", help=f"all {kind} prompts")
        parser.add_argument(f"--{prefix}samples", required=True, metavar="FILE", help=f"responses to {kind} prompts")
    parser.add_argument(
        "--sampled-pairs", type=int, default=4, help="maximum pairs of a prompt's responses; default: %(default)s"
    )
    parser.add_argument(
        "--corrupted-pairs",
        type=int,
        default=2,
        help="maximum pairs of the answer and a corrupted one; default: %(default)s",
    )
    parser.add_argument(
        "--min-gap",
        type=float,
        default=0.25,
        help="minimum score difference of two wrong responses; default: %(default)s",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="random seed of pairs and corrupted answers; default: %(default)s"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the three files")
    chosen = parser.parse_args(argv)
    for name in ("sampled_pairs", "corrupted_pairs", "min_gap", "seed"):
        if (value := getattr(chosen, name)) < 0:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must not be negative")
    return chosen


def read_prompts(path: str, flag: str) -> PromptSet:
    """Prompts that reasoning_gym can score, without duplicates. Raises UsageError."""
    prompts = load_prompts(path, flag)
    check_tasks(prompts)
    load_tasks(prompts)
    first: dict[str, int] = {}
    for prompt in prompts:
        if first.setdefault(prompt.text, prompt.index) != prompt.index:
            raise UsageError(f"{prompts.where(prompt.index)}: repeats the prompt of line {first[prompt.text] + 1}")
    return prompts


def read_samples(path: str, flag: str, prompts: PromptSet) -> dict[int, list[str]]:
    """The distinct finished responses, sorted, by prompt index. Raises UsageError with file and line."""
    indices = {prompt.text: prompt.index for prompt in prompts}
    found: dict[int, set[str]] = {}
    with reading(f"{flag} {path}"):
        lines = read_text(path, MAX_RECORDS).split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        where = f"{flag} {path}:{number}"
        with reading(where, "malformed JSON"):
            sample = parse_json(line)
        if not isinstance(sample, dict) or any(not isinstance(sample.get(key), kind) for key, kind in FIELDS.items()):
            raise UsageError(f"{where}: not a sample; allowed is an object with {', '.join(FIELDS)}")
        if sample["prompt"] not in indices:
            raise UsageError(f"{where}: {prompts.flag} {prompts.path} has no such prompt: {sample['prompt'][:60]!r}")
        if sample["finished"]:
            found.setdefault(indices[sample["prompt"]], set()).add(sample["response"])
    return {index: sorted(found[index]) for index in sorted(found)}


def score(prompt: Prompt, response: str) -> float:
    """Score of a response by the scorer of the prompt's task, 0 to 1."""
    return reasoning_gym(SECONDS)(Sample(prompt.text, response, prompt.answer, prompt.metadata)).reward


def corrupted(answer: str, alphabet: str, draw: random.Random) -> str:
    """`answer` after 1 to `MOST_EDITS` edits: swap with the next character, delete, double or replace one."""
    text = list(answer)
    for _ in range(draw.randint(1, MOST_EDITS)):
        edit, at = draw.choice(("swap", "lose", "double", "replace")), draw.randrange(len(text)) if text else 0
        if not text or edit == "double":
            text[at:at] = text[at : at + 1]
        elif edit == "swap":
            text[at : at + 2] = reversed(text[at : at + 2])
        else:
            text[at : at + 1] = draw.choice(alphabet) if edit == "replace" else ""
    return "".join(text)


def pairs_of(prompt: Prompt, responses: list[str], alphabet: str, chosen: argparse.Namespace) -> list[dict]:
    """Lines of the preference file for one prompt: pairs of its responses, then of its answer and corrupted ones."""
    draw = random.Random(f"{chosen.seed}/{prompt.text}")
    scores = {response: score(prompt, response) for response in responses}
    best = score(prompt, prompt.answer) if prompt.answer else 0.0  # of a right answer
    found = [
        (better, worse)
        for better, worse in itertools.permutations(responses, 2)
        if scores[better] - scores[worse] >= chosen.min_gap or scores[worse] < scores[better] == best
    ]
    draw.shuffle(found)
    found = found[: chosen.sampled_pairs]
    wrong: dict[str, None] = {}
    for _ in range(TRIES * chosen.corrupted_pairs if prompt.answer else 0):
        text = corrupted(prompt.answer, alphabet, draw)
        if len(wrong) < chosen.corrupted_pairs and text not in wrong and score(prompt, text) < best:
            wrong[text] = None
    found += [(prompt.answer, text) for text in wrong]
    return [_line(prompt, *pair) for pair in found]


def _line(prompt: Prompt, chosen: str, rejected: str) -> dict:
    kept = {key: prompt.metadata[key] for key in ("question_id", "source_dataset") if key in prompt.metadata}
    scores = {"chosen_score": score(prompt, chosen), "rejected_score": score(prompt, rejected)}
    line = {"prompt": prompt.prompt, "chosen": chosen, "rejected": rejected, "metadata": kept | scores}
    return line | ({"task": prompt.task} if prompt.task else {})


def make_pairs(chosen: argparse.Namespace, prefix: str = "") -> tuple[PromptSet, list[dict]]:
    """(prompts, their pairs in the same order) of one split; `prefix`: of its flags. Raises UsageError."""
    flags = {name: f"--{prefix}{name}" for name in ("prompts", "samples")}
    paths = {name: getattr(chosen, flag[2:].replace("-", "_")) for name, flag in flags.items()}
    prompts = read_prompts(paths["prompts"], flags["prompts"])
    samples = read_samples(paths["samples"], flags["samples"], prompts)
    alphabet = "".join(sorted({letter for prompt in prompts for letter in prompt.answer or ""}))
    pairs = [line for index, found in samples.items() for line in pairs_of(prompts[index], found, alphabet, chosen)]
    if not pairs:
        raise UsageError(f"{flags['samples']} {paths['samples']}: no two responses to one prompt differ in their score")
    return prompts, pairs


def questions(prompts: typing.Iterable[Prompt]) -> dict[str, str]:
    """Keys that identify a question, normalised text and `question_id` -> text of a prompt with that key."""
    found = {}
    for prompt in prompts:
        found |= {normalise(prompt.text): prompt.text}
        if "question_id" in (prompt.metadata or {}):
            found |= {f"question_id {prompt.metadata['question_id']}": prompt.text}
    return found


@refuses_in_one_line("make_preferences")
def main(argv: list[str]) -> int:
    chosen = parse_arguments(argv)
    with writing(f"--out {chosen.out}"):
        prompts, train = make_pairs(chosen)
        heldout_prompts, heldout = make_pairs(chosen, "heldout-")
        made_from = {name: value for name, value in sorted(vars(chosen).items()) if name != "out"}
        folder = Path(chosen.out)
        write_files(folder, train, heldout, made_from)
    # Compares the written file with all prompts that training may see, not only those of its pairs.
    trained = questions(prompts)
    held_out = questions([*heldout_prompts, *load_prompts(str(folder / "heldout.jsonl"), "--out")])
    if shared := {trained[key] for key in trained.keys() & held_out.keys()}:
        problem = f"{len(shared)} held-out questions are in training prompts, e.g. {min(shared)!r}"
        print(f"make_preferences: {problem}", file=sys.stderr)
        return 1
    print(f"{folder}: {len(train)} training and {len(heldout)} held-out pairs, no held-out prompt in {prompts.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
