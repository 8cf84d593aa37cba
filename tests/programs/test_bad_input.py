"""Two hundred bad configurations and data files: each is refused by a check of the input, in one line that says why."""

import dataclasses
import json
import random
import re
import types
import typing
from collections import Counter
from pathlib import Path

from megarl.errors import UsageError
from megarl.flags.settings import Settings
from tests.helpers.pages.flag_cases import flag_of
from tests.helpers.programs import inputs, preferences, reward_argv, rl_argv, sft_argv
from tests.helpers.worlds import run_world

PROGRAMS = {"rl": rl_argv, "sft": sft_argv, "reward": reward_argv}
NOT_UTF8, BINARY = b'{"prompt": "1+1=\xff\xfe", "answer": "2"}\n', bytes(range(256)) * 8
GOOD = {"prompt": "1+1=", "answer": "2"}
MISSING = ("--prompts", "not/there", "--tokenizer-model", "not/there")  # errors of flags come before those of files


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line that must be refused with a message that has `needle`; `size`: ranks it is meant for.

    `is_flags`: the flags alone are wrong, so that no file is read.
    """

    kind: str
    program: str
    tokens: tuple[str, ...]
    needle: str
    size: int = 1
    is_flags: bool = False


def case(kind: str, flags: str, needle: str = "", program: str = "rl", size: int = 1) -> Case:
    """A case of flags in one string; the message must name the first of them by default."""
    return Case(kind, program, tuple(flags.split()), needle or flags.split(maxsplit=1)[0], size)


# -- flags ---------------------------------------------------------------------------------------------------------


def kind_of(field) -> type:
    """Type of a setting: of `int | None` int."""
    args = [kind for kind in typing.get_args(field.type) if kind is not types.NoneType]
    return args[0] if args else field.type


def wrong_values(draw: random.Random) -> list[Case]:
    """For each of megarl's flags with numbers, switches or names a value of the wrong type or out of range."""
    found = []
    for field in dataclasses.fields(Settings):
        flag, kind, allowed = flag_of(field), kind_of(field), field.metadata["allowed"] or ""
        program = next((name for name in PROGRAMS if name in field.metadata["programs"]), None)
        if program is None or kind is str and not allowed.startswith("one of"):
            continue
        wrong = {int: ["1.5", "two", "0x10", "1e3", "−1"], float: ["high", "1,5", "--"], bool: ["perhaps", "2"]}
        values = wrong.get(kind, ["no-such-name", "NONE"])
        found.append(Case("type", program, (f"{flag}={draw.choice(values)}",), flag))
        if kind in (int, float) and field.metadata["check"]:
            least = "-inf" if field.name == "reward_fallback" else "-1"
            found.append(
                Case("range", program, (f"{flag}={draw.choice([least, least, 'nan'][: 3 - (kind is int)])}",), flag)
            )
    return found


def unknown_flags(draw: random.Random) -> list[Case]:
    """Names of flags with one letter lost, doubled or moved."""
    names = [flag_of(field)[2:] for field in dataclasses.fields(Settings) if "rl" in field.metadata["programs"]]
    names += ["num-layers", "tensor-model-parallel-size", "lr-decay-style", "critic-lr", "actor-bf16"]
    known, found = set(names), []
    for name in draw.sample(names, 20):
        place = draw.randrange(1, len(name) - 1)
        typo = draw.choice([name[:place] + name[place + 1 :], name[:place] + name[place] + name[place:]])
        if typo not in known and "--" not in typo and not typo.endswith("-"):
            found.append(case("unknown", f"--{typo} 1"))
    return found


MEGATRON = [
    "--num-layers 0", "--num-layers -2", "--num-layers two", "--num-layers 1.5", "--hidden-size 0", "--hidden-size 33",
    "--num-attention-heads 0", "--num-attention-heads 5", "--ffn-hidden-size 0", "--kv-channels -8", "--kv-channels 7",
    "--num-query-groups 3", "--num-query-groups 0", "--num-experts -1", "--lr nan", "--lr inf", "--lr -1e-3",
    "--min-lr 1", "--clip-grad -1", "--clip-grad nan", "--weight-decay -0.1", "--adam-beta1 1", "--adam-beta2 -0.1",
    "--adam-eps 0", "--lr-decay-style exponential", "--lr-warmup-iters 100", "--lr-warmup-iters -1",
    "--lr-decay-iters 0", "--lr-decay-iters -3", "--lr-warmup-fraction 2", "--init-method-std -1",
    "--init-method-std nan", "--norm-epsilon -1", "--norm-epsilon nan", "--rotary-base 0", "--rotary-base nan",
    "--rotary-percent 1.5", "--max-position-embeddings 3", "--max-position-embeddings -1",
    "--make-vocab-size-divisible-by 0", "--normalization BatchNorm", "--position-embedding-type relative",
    "--attention-backend fused", "--optimizer adafactor", "--hidden-dropout 0.1", "--fp8-format e4m3",
    "--recompute-granularity half", "--recompute-modules mlp",
    "--recompute-granularity selective --recompute-modules x", "--window-size 4", "--window-size x,0",
    "--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq os.getcwd()", "--loss-scale 0", "--loss-scale nan",
    "--distributed-timeout-minutes 0", "--distributed-timeout-minutes -5", "--use-megatron-fsdp", "--moe-router-fusion",
    "--ddp-bucket-size -1", "--num-layers 99999999999999999999999", "--num-layers 9999999999",
    "--hidden-size 99999999999999999999999",
    "--seq-length 8", "--data-path x",
    "--ddp-average-in-collective", "--rope-scaling-factor 4", "--wandb-project x", "--overlap-param-gather",
]  # fmt: skip
LAYOUTS = [  # flags, ranks
    ("--tensor-model-parallel-size 3", 3), ("--tensor-model-parallel-size 4", 2), ("--tensor-model-parallel-size 0", 1),
    ("--tensor-model-parallel-size -1", 1), ("--pipeline-model-parallel-size 2", 1),
    ("--pipeline-model-parallel-size 3", 3), ("--context-parallel-size 2", 1), ("--context-parallel-size 3", 4),
    ("--expert-model-parallel-size 2", 2), ("--sequence-parallel", 2), ("--critic-tensor-model-parallel-size 8", 4),
    ("--num-virtual-stages-per-pipeline-rank 2", 2), ("--decoder-first-pipeline-num-layers 1", 2),
    ("--num-experts 3 --expert-model-parallel-size 2", 2), ("--expert-tensor-parallel-size 2 --num-experts 4", 2),
    ("--use-torch-fsdp2 --pipeline-model-parallel-size 2", 2), ("--use-torch-fsdp2 --use-distributed-optimizer", 2),
    ("--num-experts 4 --tensor-model-parallel-size 2", 2), ("--pipeline-model-parallel-layout E|x|L", 3),
]  # fmt: skip
ROLE_MAPS = [
    "actor", "actor=", "actor=x", "actor=0-", "actor=-1", "actor=1-0", "actor=0;actor=1", "actor=0-9", "judge=0-3",
    "actor=0-1;critic=2", "actor=0-1,critic=2-3", "actor=0-3;critic=0-3;reward=0-3;reference=4", "=0-3", ";;",
    "actor=0.5", "actor=0-3;critic=0-3;reward=0-3;reference=0-3;rollout=", "actor=0-99999999999999999999",
]  # fmt: skip
TOGETHER = [  # flags that contradict each other
    "--advantage grpo --samples-per-prompt 1 --minibatch-size 6", "--minibatch-size 99", "--eval-interval 2",
    "--max-tokens-per-microbatch 3", "--kl-controller adaptive", "--dynamic-sampling", "--generation-lag 1",
    "--partial-rollouts", "--router-replay rollout", "--verify-weights", "--reward regex", "--reward model",
    "--reward remote", "--bf16 --fp16", "--keep-best maybe", "--lora-rank 4 --lora-targets attention",
    "--advantage no.such:function", "--advantage os:getcwd:x", "--policy-loss json:no_such", "--reward os:no_such",
    "--reward exact-match+", "--reward 2*", "--reward nan*length", "--reward exact-match*length", "--reward",
    "--config", "--reward regex --reward-pattern (", "--reward format --reward-format [", "--export-hf --save none",
    "--eval-k 0 --eval-prompts x", "--role-map actor=0;critic=0;reward=0;reference=0;rollout=1",
    "--environment no.such:thing", "--environment guess-number --tool-call-parser no.such:parser",
    "--lora-rank 4 --lora-adapter x --hf-model x --debug-rollout-only",
    "--serve-policy --host 0.0.0.0", "--serve-policy --tool-call-parser xml", "--serve-policy --api-key-file x",
    "--reward remote --reward-url ftp://x", "--policy-loss cispo --cispo-clip-high -1",
    "--group-filter reward --group-filter", "--rollout-correction icepop", "--debug-train-only", "--load-rollouts x",
    "--debug-train-only --debug-rollout-only", "--debug-train-only --load-rollouts x --serve-policy",
    "--profile-ranks 0", "--profile-steps 5-2", "--profile-steps 1 --profile-ranks 4",
    "--profile-steps 1 --profile-ranks all",
]  # fmt: skip
OTHERS = [  # of other programs
    ("sft", "--max-position-embeddings 9"), ("sft", "--target-eval-loss 1"), ("sft", "--export-hf --save none"),
    ("sft", "--global-batch-size 0"), ("sft", "--max-tokens-per-microbatch 9"), ("sft", "--save-interval -3"),
    ("reward", "--reward-max-position-embeddings 9"), ("reward", "--eval-interval 2"),
    ("reward", "--max-tokens-per-microbatch 19"),
    ("rl", "--critic-max-position-embeddings 9"),
    ("rl", "--position-embedding-type learned_absolute --max-position-embeddings 9"),
]  # fmt: skip


# -- files ---------------------------------------------------------------------------------------------------------


def lines_of(draw: random.Random) -> dict[str, tuple[str, bytes]]:
    """Name -> (what the message has, content): prompt files with one bad line among good ones."""
    bad = {
        "cut": b'{"prompt": "1+1=", "ans', "list": b'["1+1=", "2"]', "number": b"17", "null": b"null", "text": b"1+1=",
        "quotes": b"{'prompt': '1+1='}", "comma": b'{"prompt": "1+1=", "answer": "2",}', "two": b'{"prompt": "1"}{}',
        "no prompt": b'{"answer": "2"}', "empty prompt": b'{"prompt": "", "answer": "2"}',
        "blank prompt": b'{"prompt": " ", "answer": "2"}', "number prompt": b'{"prompt": 1, "answer": "2"}',
        "number answer": b'{"prompt": "1+1=", "answer": 2}', "no answer": b'{"prompt": "1+1="}',
        "field": b'{"prompt": "1+1=", "answr": "2"}', "metadata": b'{"prompt": "1", "answer": "2", "metadata": []}',
        "long": b'{"prompt": "1+1+1+1+1+1=", "answer": "6"}', "deep": b"[" * 100000,
        "messages": b'{"prompt": [{"role": "user"}], "answer": "2"}', "no messages": b'{"prompt": [], "answer": "2"}',
        "role": b'{"prompt": [{"role": 1, "content": "1"}], "answer": "2"}', "NaN": b'{"prompt": NaN, "answer": "2"}',
        "task": b'{"prompt": "1", "answer": "2", "task": true}', "digits": b'{"prompt": ' + b"9" * 5000 + b"}",
        "surrogate": b'{"prompt": "\\ud800", "answer": "2"}', "binary": b"\x00\x01\x02\x03", "blank": b"",
        "latin-1": NOT_UTF8.strip(), "utf-16": '{"prompt": "1"}'.encode("utf-16"),
    }  # fmt: skip
    found, good = {}, json.dumps(GOOD).encode()
    for name, line in bad.items():
        place = draw.randrange(5)
        content = b"\n".join([good] * place + [line] + [good] * 2) + b"\n"
        found[name] = ("not UTF-8" if name in ("latin-1", "utf-16") else f":{place + 1}:", content)
    return found


def pairs_of() -> dict[str, bytes]:
    """Preference files with a bad line after a good one."""
    good = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    bad = [
        {"prompt": "1+1=", "chosen": "2"}, {"prompt": "1+1=", "rejected": "2"}, good | {"rejected": "2"},
        good | {"margin": -1}, good | {"margin": "much"}, good | {"chosen": 2},
        good | {"margin": float("inf")}, {"chosen": "2", "rejected": "3"}, good | {"margin": True},
    ]  # fmt: skip
    return {str(i): f"{json.dumps(good)}\n{json.dumps(row)}\n".encode() for i, row in enumerate(bad)}


CONFIGS = {
    "not YAML": b"lr: [1e-3\n", "tabs": b"lr:\n\t- 1\n", "words": b"just words\n", "list": b"- lr: 1\n", "empty": b"",
    "unknown": b"learning-rate: 1e-3\n", "nested": b"actor:\n  lr: 1\n", "twice": b"seed: 1\nseed: 2\n",
    "no value": b"seed:\n", "wrong type": b"seed: many\n", "negative": b"clip-range: -1\n", "binary": BINARY,
    "number key": b"3: 4\n",
    "null character": b'prompts: "a\\0b"\n', "huge": b"top-k: 99999999999999999999999\n",
    "config": b"config: other.yaml\n", "tag": b"lr: !!python/object/apply:os.getcwd []\n",
    "date": b"seed: 2024-01-01\n", "anchor": b"a: &a [*a]\n", "two documents": b"seed: 1\n---\nseed: 2\n",
}  # fmt: skip


def files(folder: Path, draw: random.Random) -> list[Case]:
    """Bad files, folders for files, files for folders, and what does not exist."""
    found = []

    def written(name: str, content: bytes) -> Path:
        path = folder / re.sub(r"\W", "-", name)
        path.write_bytes(content)
        return path

    for name, (needle, content) in lines_of(draw).items():
        path = written(f"prompts {name}", content)
        flag = draw.choice(["--prompts", "--prompts", "--eval-prompts"])
        line = needle if needle.startswith(":") else f": {needle}"
        found.append(Case("line", "rl", (flag, str(path)), f"{flag} {path}{line}"))
    for name, content in pairs_of().items():
        path = written(f"pairs {name}", content)
        found.append(Case("pair", "reward", ("--prompts", str(path)), f"--prompts {path}:2:"))
    for name, content in CONFIGS.items():
        needle = {"wrong type": "--seed", "date": "--seed", "negative": "--clip-range", "unknown": "--learning-rate",
                  "number key": "--3", "anchor": "--config", "null character": "null characters",
                  "huge": "--top-k 99999999999999999999999"}.get(name)  # fmt: skip
        path = written(f"config {name}", content)
        found.append(Case("config", "rl", ("--config", str(path)), needle or f"--config {path}"))
    empty, garbage, nothing = written("empty", b""), written("garbage", BINARY), folder / "nothing"
    (folder / "folder").mkdir()
    taken = ["--prompts", "--eval-prompts", "--tokenizer-model", "--chat-template", "--config"]
    found += [
        Case("path", "rl", (flag, str(path)), flag)
        for flag in taken
        for path in (empty, garbage, nothing, folder / "folder", "/dev/null")
        if (flag, path) not in (("--chat-template", empty), ("--chat-template", "/dev/null"))  # an empty template
    ]
    taken = ["--load", "--pretrained-checkpoint", "--hf-model", "--critic-pretrained-checkpoint"]
    found += [
        Case("path", "rl", (flag, str(path)), flag.replace("--critic-", "--"))
        for flag in taken
        for path in (empty, garbage, nothing, folder / "folder")
    ]
    found += [
        Case("path", "rl", ("--debug-train-only", "--load-rollouts", str(path)), f"--load-rollouts {path}: ")
        for path in (empty, garbage, nothing, folder / "folder")
    ]
    found.append(Case("path", "rl", ("--save", str(garbage / "run")), "--save"))
    found.append(Case("line", "sft", ("--max-response-length", "2"), "train.jsonl:19: the response has 3 tokens"))
    for suffix in ("parquet", "arrow", "json", "jsonl.gz", "jsonl.zst"):
        for name, content in (
            ("garbage", BINARY),
            ("empty", b""),
            ("words", b"1+1=2\n"),
            ("magic", b"PAR1\x1f\x8bPAR1"),
        ):
            path = folder / f"{name}.{suffix}"
            path.write_bytes(content)
            found.append(Case("format", "rl", ("--prompts", str(path)), f"--prompts {path}"))
    found += [
        Case("split", "rl", ("--prompts", f"{folder}{split}"), f"--prompts {folder}") for split in ("", ":x", ",")
    ]
    for part in ("prompt", "response"):
        found.append(
            case("columns", f"--{part}-column x --messages-column y", f"--{part}-column x: not allowed", "sft")
        )
    for program in PROGRAMS:
        path = written("columns", b'{"text": "1+1=", "id": 3}\n')
        found.append(Case("columns", program, ("--prompts", str(path)), f"--prompts {path}:1: "))
        found.append(Case("columns", program, ("--prompt-column", "question"), "--prompt-column question: --prompts"))
    return found


# -- the check -----------------------------------------------------------------------------------------------------


def cases(folder: Path) -> list[Case]:
    """All cases, the same each time."""
    draw = random.Random(1)
    flags = [
        *wrong_values(draw),
        *unknown_flags(draw),
        *(case("megatron", tokens, re.findall("--([a-z0-9-]+)", tokens)[-1]) for tokens in MEGATRON),
    ]
    flags += [case("layout", tokens, "--", size=size) for tokens, size in LAYOUTS]
    flags += [case("together", tokens, "--", program) for program, tokens in OTHERS]
    flags += [Case("role map", "rl", ("--role-map", text), "--role-map", 4) for text in ROLE_MAPS]
    flags += [case("together", tokens, "--") for tokens in TOGETHER]
    return [dataclasses.replace(one, is_flags=True) for one in flags] + files(folder, draw)


def check(rank: int, folder: Path, todo: list[Case]) -> list[str]:
    """What the check of each case's input raises: 'UsageError: …', another error, or 'accepted'."""
    from megarl import arguments, train_reward, train_rl, train_sft
    from megarl.observe.timers import Timers

    mains = {"rl": train_rl.train, "sft": train_sft.train, "reward": train_reward.train}
    found = []
    for one in todo:
        argv = [*PROGRAMS[one.program](folder / "run"), *(MISSING if one.is_flags else ()), *one.tokens, "--check"]
        try:
            mains[one.program](arguments.parse(argv, one.size, one.program), Timers())
        except BaseException as error:  # also SystemExit, which ends the check of right input
            accepted = isinstance(error, SystemExit) and error.code == 0
            found.append("accepted" if accepted else f"{type(error).__name__}: {error}")
    return found


def test_bad_input_is_refused_in_one_line_that_names_it(tmp_path):
    from megarl import train_reward, train_rl, train_sft  # noqa: F401  imported once, before the fork

    inputs(), preferences()
    todo = cases(tmp_path)
    (said,) = run_world(check, 1, tmp_path, todo)
    wrong = [
        (one.program, " ".join(one.tokens), message)
        for one, message in zip(todo, said, strict=True)
        if not message.startswith(UsageError.__name__)
        or MISSING[1] in message
        or one.needle not in message + message.replace("_", "-")
        or "\n" in message
    ]
    for row in wrong:
        print(row)
    assert len(todo) >= 200 and len(Counter(one.kind for one in todo)) >= 8
    assert not wrong
    assert not (tmp_path / "run").exists()
