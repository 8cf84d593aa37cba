"""Exports with each checkpoint: a Hugging Face folder (`--export-hf`) and a PEFT adapter (`--export-peft`)."""

import filecmp
from pathlib import Path

from megarl.arguments import RoleSettings, Settings
from megarl.data.conversations import Encoder
from megarl.data.tokenizers_hf import FILES
from megarl.errors import UsageError
from megarl.observe.files import step_name
from megarl.roles.trainable_model import TrainableModel

TEMPLATE = "chat_template.jinja"


def check_exports(s: Settings, trained: RoleSettings):
    """UsageError if the model of the role that is trained cannot be exported as the flags say."""
    model, lora = trained.hf_model, trained.lora
    if s.export_hf and model is None:
        raise UsageError("--export-hf: needs --hf-model, whose names, types and files the export takes")
    if s.export_hf:
        _check_folder(trained)
    if s.export_peft and (model is None or lora is None):
        raise UsageError("--export-peft: needs --hf-model, whose modules it names, and --lora-rank")
    if s.export_peft:
        model.check_adapters("--export-peft")
    if s.export_peft and trained.megatron.hybrid_layer_pattern is not None and "out_proj" in lora.targets:
        targets = ",".join(name for name in lora.targets if name != "out_proj")
        raise UsageError(f"--export-peft: PEFT refuses the out_proj of Mamba-2; give --lora-targets {targets}")


def _check_folder(role: RoleSettings):
    """UsageError if no folder like the role's can be written, or it would have another tokenizer than the run: a
    SentencePiece model is not converted.
    """
    role.hf_model.check_exportable(role.has_scalar_head)
    own = role.hf_model.folder.path
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
    found: dict[str, bytes] = {}
    folder, own = Path(role.tokenizer_model or ""), role.hf_model.folder.path
    folder = folder if folder.is_dir() else folder.parent
    if role.tokenizer_type == "HuggingFaceTokenizer" and folder.resolve() != own.resolve():
        found = {name: (folder / name).read_bytes() for name in (*FILES, TEMPLATE) if (folder / name).is_file()}
    if encoder.template is not None and encoder.template.source != encoder.tokenizer.template:
        found[TEMPLATE] = encoder.template.source.encode()
    return found
