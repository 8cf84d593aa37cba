"""Which tokenizer and template an export has, and which it cannot have."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.trainers.exports import text_files
from megarl.trainers.setup import build_role_encoder, check_training_flags
from tests.helpers.folders import hf_folders
from tests.helpers.programs import inputs
from tests.helpers.texts import small_tokenizers

LENGTHS = "--max-prompt-length 48 --max-response-length 8 --max-tokens-per-microbatch 256"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of a policy's folder."""
    folder = tmp_path_factory.mktemp("exports")
    hf_folders.write_folder("llama3", folder / "llama3", files=2)
    return folder


def test_an_export_has_the_tokenizer_and_the_template_of_the_run(data, tmp_path):
    other = Path(small_tokenizers.chatml(tmp_path / "other"))
    (tmp_path / "t.jinja").write_text(small_tokenizers.CHATML + "{# mine #}")
    for flags, template in (("", None), (f"--chat-template {tmp_path}/t.jinja", (tmp_path / "t.jinja").read_bytes())):
        config = parse(f"{LENGTHS} --hf-model {data}/llama3 --global-batch-size 2 {flags}".split(), 1, "sft")
        role = config.roles["actor"]
        expected = {} if template is None else {"chat_template.jinja": template}
        assert text_files(role, build_role_encoder(role, config.settings)) == expected
        moved = dataclasses.replace(role, tokenizer_model=str(other))
        files = text_files(moved, build_role_encoder(moved, config.settings))
        assert files.pop("chat_template.jinja", None) == template
        assert files == {name: (other / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}


def test_an_export_with_a_sentencepiece_model_needs_the_folders_own(data, tmp_path):
    model, folder = inputs() / "tokenizer.model", shutil.copytree(data / "llama3", tmp_path / "llama3")
    flags = f"{LENGTHS} --hf-model {folder} --prompts x --tokenizer-model {model} --export-hf --save {tmp_path}/run"
    config = parse(flags.split(), 1, "sft")
    with pytest.raises(UsageError, match=f"of {folder} is not --tokenizer-model {model}, and only a Hugging Face"):
        check_training_flags(config)
    shutil.copy(model, folder / "tokenizer.model")
    check_training_flags(config)
