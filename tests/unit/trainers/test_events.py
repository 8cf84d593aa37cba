"""Which evaluation was the best: of a higher or a lower metric, on every rank, also after a resume."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.trainers.events import text_files
from megarl.trainers.setup import build_role_encoder, check_training_flags
from tests.helpers.folders import hf_folders
from tests.helpers.programs import inputs
from tests.helpers.texts import small_tokenizers
from tests.helpers.worlds import run_world

CASES = {
    "accuracy": ([0.0, 0.25, 0.25, 0.125, 0.5, 0.25], [True, True, False, False, True, False], 5),
    "loss": ([math.nan, 0.25, 0.25, 0.125, math.nan, 0.5], [False, True, False, True, False, False], 4),
}


def ranked(rank: int, metric: str, values: list[float]) -> tuple:
    """Verdicts and state of a run of evaluations, resumed in the middle."""
    from megarl.trainers.events import BestCheckpoint

    best, verdicts = BestCheckpoint(metric), []
    before = best.state_dict()
    for step, value in enumerate(values, 1):
        verdicts.append(best.update({f"eval/{metric}": value} if rank == 0 else None, step))
        if step == 3:
            state, best = json.loads(json.dumps(best.state_dict())), BestCheckpoint(metric)
            best.load_state_dict(state)
    return verdicts, before, best.state_dict()


@pytest.mark.parametrize("metric", CASES)
def test_every_rank_knows_which_evaluation_is_the_best(metric):
    values, expected, step = CASES[metric]
    states = {metric: None, "step": None}, {metric: values[step - 1], "step": step}
    assert run_world(ranked, 2, metric, values) == [(expected, *states)] * 2


# -- exports with each checkpoint ----------------------------------------------------------------------------------


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
