"""After which steps a run evaluates, saves and exports: what the trainers ask, and what `--check` prints; and which
evaluation so far is the best, after which a checkpoint is saved, too.
"""

import filecmp
import math
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megarl.arguments import RoleSettings, RunConfig, Settings
from megarl.data.conversations import Encoder
from megarl.data.tokenizers_hf import FILES
from megarl.errors import UsageError
from megarl.mcore.weights.hf.hf_model import check_adapters
from megarl.observe.files import step_name
from megarl.roles.trainable_model import TrainableModel


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether an action is due after a step that runs every `interval` steps (0: never) and after the last one."""
    return step == last or bool(interval and step % interval == 0)


@dataclass(frozen=True)
class RunEvents:
    """The events of a run that does steps `first` to `last`; a signal, a limit or a target may end it earlier.

    `keeps_best`: it also saves after an evaluation that is the best so far. `exports`: folders that get a folder with
    each checkpoint.
    """

    first: int
    last: int
    evaluates: bool
    evaluates_before: bool
    eval_interval: int
    saves: bool
    save_interval: int
    keeps_best: bool
    exports: tuple[str, ...]

    def evaluations(self) -> list[int]:
        """Steps after which held-out prompts are evaluated; 0: before the first."""
        return [0] * self.evaluates_before + self._due(self.eval_interval) * self.evaluates

    def checkpoints(self) -> list[int]:
        """Steps after which a checkpoint is saved for certain, and with it the exports."""
        return self._due(self.save_interval) * self.saves

    def _due(self, interval: int) -> list[int]:
        return [step for step in range(self.first, self.last + 1) if is_due(step, interval, self.last)]


def events_of(config: RunConfig, done: int) -> RunEvents:
    """The events of a training run. `done`: steps of the checkpoint from which it resumes; 0 for a new run."""
    s = config.settings
    saves = s.save is not None and not s.debug_rollout_only  # which changes no weights
    return RunEvents(
        first=done + 1,
        last=s.train_iters,
        evaluates=s.evaluates,
        evaluates_before=s.evaluates and "rollout" in config.roles and not done,
        eval_interval=s.eval_interval,
        saves=saves,
        save_interval=s.save_interval,
        keeps_best=saves and s.evaluates and s.keep_best,
        exports=tuple(name for name, wanted in (("hf", s.export_hf), ("peft", s.export_peft)) if wanted and saves),
    )


class BestCheckpoint:
    """The best evaluation of a run so far, the same on every rank."""

    def __init__(self, metric: str):
        """`metric`: of which the best value is wanted, without `eval/`; of `loss` the lowest, of others the highest."""
        self.metric, self.sign = metric, -1 if metric == "loss" else 1
        self.value: float | None = None
        self.step: int | None = None

    def update(self, metrics: dict[str, float] | None, step: int) -> bool:
        """Whether the evaluation after `step` is the best so far; of equal ones, the earlier is the best.

        `metrics` are the evaluation's, on rank 0. A value that is not a number, or is missing since all its episodes
        failed, is never the best. A collective of the world.
        """
        found = [math.nan if metrics is None else metrics.get(f"eval/{self.metric}", math.nan)]
        dist.broadcast_object_list(found, src=0)
        (value,) = found
        is_best = not math.isnan(value) and (self.value is None or self.sign * value > self.sign * self.value)
        if is_best:
            self.value, self.step = value, step
        return is_best

    def state_dict(self) -> dict:
        return {self.metric: self.value, "step": self.step}

    def load_state_dict(self, state: dict):
        self.value, self.step = state.get(self.metric), state["step"]


# -- exports with each checkpoint ----------------------------------------------------------------------------------

# A Hugging Face folder (`--export-hf`) and a PEFT adapter (`--export-peft`).

TEMPLATE = "chat_template.jinja"


def check_exports(s: Settings, trained: RoleSettings):
    """UsageError if the model of the role that is trained cannot be exported as the flags say."""
    model, lora = trained.hf_model, trained.lora
    if s.export_hf and model is None:
        raise UsageError("--export-hf: needs --hf-model, whose names, types and files the export takes")
    if s.export_hf and model is not None:
        model.check_exportable(trained.has_scalar_head)
        _check_tokenizer(trained, model.folder.path)
    if not s.export_peft:
        return
    if model is None or lora is None:
        raise UsageError("--export-peft: needs --hf-model, whose modules it names, and --lora-rank")
    check_adapters(model, "--export-peft")
    if trained.megatron.hybrid_layer_pattern is not None and "out_proj" in lora.targets:
        targets = ",".join(name for name in lora.targets if name != "out_proj")
        raise UsageError(f"--export-peft: PEFT refuses the out_proj of Mamba-2; give --lora-targets {targets}")


def _check_tokenizer(role: RoleSettings, own: Path):
    """UsageError if a folder like the role's would have another tokenizer than the run: a SentencePiece model is not
    converted. `own`: the role's folder.
    """
    if role.tokenizer_type == "SentencePieceTokenizer" and role.tokenizer_model:
        of_run, of_folder = Path(role.tokenizer_model), own / "tokenizer.model"
        if of_run.is_file() and of_folder.is_file() and filecmp.cmp(of_run, of_folder, shallow=False):
            return
        raise UsageError(
            f"--export-hf: the tokenizer.model of {own} is not --tokenizer-model {role.tokenizer_model}, and only a "
            "Hugging Face folder's tokenizer is exported"
        )


def export(model: TrainableModel, encoder: Encoder, folder: Path, kinds: tuple[str, ...], step: int):
    """Writes a model as Hugging Face folder `hf/step_N` and adapter `peft/step_N`. A collective of its role.

    `kinds`: which of "hf" and "peft".
    """
    if "hf" in kinds:
        model.export_hf(folder / "hf" / step_name(step), text_files(model.role, encoder))
    if "peft" in kinds:
        model.export_peft(folder / "peft" / step_name(step))


def text_files(role: RoleSettings, encoder: Encoder) -> dict[str, bytes]:
    """Content by name of the files that an export has instead of those of the role's Hugging Face folder.

    They are none if the run used the folder's own tokenizer and template.
    """
    assert role.hf_model is not None  # a check of the flags
    found: dict[str, bytes] = {}
    folder, own = Path(role.tokenizer_model or ""), role.hf_model.folder.path
    folder = folder if folder.is_dir() else folder.parent
    if role.tokenizer_type == "HuggingFaceTokenizer" and folder.resolve() != own.resolve():
        found = {name: (folder / name).read_bytes() for name in (*FILES, TEMPLATE) if (folder / name).is_file()}
    if encoder.template is not None and encoder.template.source != encoder.tokenizer.template:
        found[TEMPLATE] = encoder.template.source.encode()
    return found
