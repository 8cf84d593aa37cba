"""Flags of the run: ranks of roles, seeds, kernels, the run folder and its checkpoints, alarms, trackers, debugging."""

import dataclasses
import re
from collections.abc import Iterator

from megarl.flags.conditions import SAVED, Broken, FlagContext, on
from megarl.flags.fields import ALL, DATA, GENERATING, TRAINING, flag, not_negative, one_of, parses, positive
from megarl.observe.alarms import DEFAULT_ALARMS, parse_alarms
from megarl.observe.trackers import TRACKERS, has_remote, parse_names

KEEPS_LAST = on(lambda s: s.keep_last > 0, "needs --keep-last")
EXPORTED = on(lambda s: s.export_hf, "needs --export-hf")
TRACKED = on(lambda s: s.save is not None and has_remote(s.trackers), "needs --save and wandb or mlflow in --trackers")
STEP_RANGE = re.compile(r"([1-9][0-9]{0,17})(?:-([1-9][0-9]{0,17}))?")
PROFILE = on(lambda s: s.profile_steps is not None, "needs --profile-steps")
_PLAIN = "printable text without / and :"


def _is_plain(text: str) -> bool:
    return text.isprintable() and bool(text.strip()) and not set("/:") & set(text)


def parse_step_range(text: str) -> range:
    """`"3-5"` -> the steps 3, 4, 5; `"3"` -> step 3. ValueError for other text."""
    match = STEP_RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise ValueError(f"{text!r} is no range of steps")
    return range(first, last + 1)


@dataclasses.dataclass(frozen=True)
class Run:
    """The run."""

    role_map: str | None = flag(None, programs=GENERATING)
    """ranks per role, as 'actor=0-3;critic=4;…', or 'actor=nodes 0-1;…'; default: every role on all ranks"""
    hf_model: str | None = flag(None, programs=ALL, roles=("actor", "critic", "reference", "teacher"))
    """Hugging Face folder: gives architecture, weights, tokenizer, chat template and end tokens; may differ per role"""
    model_source: str = one_of(
        "megatron",
        ("megatron", "transformers"),
        programs=ALL,
        roles=("actor", "critic", "reference", "reward", "teacher"),
    )
    """whose layers compute the model of --hf-model: Megatron's, of the families that megarl maps, or transformers' own
    of any type; may differ per role"""
    seed: int = not_negative(1, programs=ALL)
    """seed of every random stream"""
    kernels: str = one_of("auto", ("auto", "compiled", "onednn", "blas"), programs=ALL)
    """kernels in fp32 on a CPU: compiled ones, or PyTorch's operators with products by oneDNN or BLAS; auto: the first
    of them that all ranks can use with a gap of 0"""
    deterministic: bool = flag(False, programs=ALL)
    """use deterministic kernels; fails where none exists"""
    alarms: str = flag(DEFAULT_ALARMS, parses(parse_alarms), programs=TRAINING)
    """conditions on metrics and what then happens, as 'actor/ppo_kl > 0.3: skip; critic/loss > 10x: warn' (10x: ten
    times its median); actions: warn, skip the update, stop"""
    max_skipped_steps: int = not_negative(20, programs=TRAINING)
    """end the run after this many steps in a row with a skipped update; 0: never"""
    exit_grace: float = positive(3600.0, programs=TRAINING)
    """seconds that the running step has to end after SIGTERM, SIGINT or SIGUSR1, before it is dropped"""
    # The run folder and its checkpoints.
    save: str | None = flag(None, programs=DATA)
    """run folder for metrics, samples, report and checkpoints"""
    overwrite: bool = flag(False, programs=TRAINING, when=SAVED)
    """start anew in a --save that holds an earlier run, which moves to old-N there; without this flag such a start is
    refused"""
    load: str | None = flag(None, programs=ALL)
    """run folder to resume from (training), to evaluate or to serve"""
    save_interval: int = not_negative(0, programs=TRAINING)
    """steps between checkpoints; 0: only at the end"""
    async_save: bool = flag(False, programs=TRAINING, when=SAVED)
    """write checkpoints during training, from a copy in host memory"""
    save_memory: bool = flag(False, programs=TRAINING, needs=SAVED)
    """also keep the checkpoint of the last complete step in host memory, from which a restart then resumes; on several
    nodes each has its own part and that of the next node"""
    keep_last: int = not_negative(0, programs=TRAINING, when=SAVED)
    """checkpoints to keep besides the best one: the newest; 0: all"""
    keep_every: int = not_negative(0, programs=TRAINING, when=KEEPS_LAST)
    """with --keep-last also keep checkpoints of steps that this number divides; 0: none"""
    on_save_failure: str = one_of("stop", ("stop", "continue"), programs=TRAINING, when=SAVED)
    """what a run does if a checkpoint cannot be written: stop or continue"""
    export_hf: bool = flag(False, programs=TRAINING, needs=SAVED)
    """also write the model of each checkpoint as a Hugging Face folder, hf/step_N in --save"""
    export_peft: bool = flag(False, programs=TRAINING, needs=SAVED)
    """also write the factors of each checkpoint as a PEFT adapter, peft/step_N in --save; needs --hf-model"""
    hf_mtp: str = one_of("keep", ("keep", "drop"), programs=TRAINING, when=EXPORTED)
    """tensors of multi-token prediction in an export: those of the --hf-model folder, or none; train_rl can train
    them"""
    # Trackers and report.
    trackers: str = flag(
        "tensorboard",
        parses(parse_names),
        f"names with commas among {', '.join(TRACKERS)}, each once, or none",
        programs=TRAINING,
        names=TRACKERS,
        when=SAVED,
    )
    """where metrics go besides metrics.jsonl: names with commas among {names}, or plug-ins; or none"""
    tracker_project: str = flag("megarl", _is_plain, _PLAIN, programs=TRAINING, when=TRACKED)
    """project in Weights & Biases, experiment in MLflow"""
    tracker_run: str | None = flag(None, _is_plain, _PLAIN, programs=TRAINING, when=TRACKED)
    """name of the run there; default: that of the folder --save"""
    tracker_folder: str | None = flag(None, programs=TRAINING, when=TRACKED)
    """folder for their files, which several runs may share; default: --save"""
    tracker_offline: bool = flag(False, programs=TRAINING, when=TRACKED)
    """write their files only, without network; `wandb sync` sends them later"""
    token_samples: int = not_negative(8, when=SAVED)
    """responses of each step whose tokens are recorded one by one in tokens/: text, log-probs, advantage, value; 0:
    none"""
    # Debugging.
    save_rollouts: bool = flag(False, needs=SAVED)
    """write the responses of each step to rollouts/step_N in --save"""
    load_rollouts: str | None = flag(None)
    """run folder, or its rollouts folder, whose saved responses --debug-train-only trains on"""
    debug_train_only: bool = flag(False)
    """no engine and no generation: each step trains on its responses in --load-rollouts, with rewards computed again"""
    debug_rollout_only: bool = flag(False)
    """generate and score, without critic, reference, optimizer and updates"""
    profile_steps: str | None = flag(
        None, parses(parse_step_range), "a step or a range of steps, as 3-5", programs=TRAINING, needs=SAVED
    )
    """steps to profile, as '3' or '3-5': operators and phases of --profile-ranks go to profile/ in --save"""
    profile_memory: bool = flag(False, programs=TRAINING, when=PROFILE)
    """with --profile-steps also record the memory that operators allocate"""


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of half a run."""
    s = run.settings
    if s.debug_train_only and s.load_rollouts is None:
        yield "--debug-train-only", "needs --load-rollouts: without an engine the responses come from a folder"
    if s.load_rollouts is not None and not s.debug_train_only:
        yield "--load-rollouts", "needs --debug-train-only: other runs generate their responses"
    if s.debug_rollout_only and s.debug_train_only:
        yield "--debug-rollout-only", "not allowed with --debug-train-only: nothing would be left of a step"
    if s.save_memory and (s.debug_train_only or s.debug_rollout_only):
        yield "--save-memory", "not allowed with --debug-train-only and --debug-rollout-only, which are soon repeated"
    if s.save_rollouts and s.debug_train_only:
        yield "--save-rollouts", "not allowed with --debug-train-only: they are in --load-rollouts already"
