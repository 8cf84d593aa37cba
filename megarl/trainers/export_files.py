"""What an exported Hugging Face folder says about text: the tokenizer and the chat template of the run."""

import filecmp
from pathlib import Path

from megarl.arguments import RoleSettings
from megarl.data.conversations import Encoder
from megarl.data.tokenizers_hf import FILES
from megarl.errors import UsageError

TEMPLATE = "chat_template.jinja"


def check_exportable(role: RoleSettings):
    """UsageError if no folder like the role's can be written, or it would have another tokenizer than the run: a
    SentencePiece model is not converted.
    """
    role.hf_model.check_exportable(role.has_scalar_head)
    own = role.hf_model.folder.path
    if role.tokenizer_type == "SentencePieceTokenizer" and role.tokenizer_model:
        files = Path(role.tokenizer_model), own / "tokenizer.model"
        if all(file.is_file() for file in files) and filecmp.cmp(*files, shallow=False):
            return
        raise UsageError(
            f"--export-hf: the tokenizer.model of {own} is not --tokenizer-model {role.tokenizer_model}, and only a "
            "Hugging Face folder's tokenizer is exported"
        )


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
