"""The example of docs/huggingface.md: a family that megarl lacks, as a file, against its class in transformers."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest
import torch

from megarl.mcore.weights.hf import families
from megarl.mcore.weights.hf.config_flags import model_flags
from tests.helpers.folders import hf_layouts
from tests.helpers.pages import documents
from tests.helpers.programs import ROOT
from tests.helpers.texts import small_tokenizers
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

SEQUENCES = [[5, 9, 40, 7, 23, 11, 60, 2], [31, 8, 8, 14]]


@pytest.fixture
def example() -> str:
    """The file that the page shows."""
    blocks = documents.blocks(documents.text_of(ROOT / "docs" / "huggingface.md"))
    (code,) = (block.text for block in blocks if block.language == "python")
    return code


@pytest.fixture
def folder_of_families(tmp_path, monkeypatch):
    """A folder whose modules are families, too, as those of the package's own folder."""
    place = tmp_path / "families"
    place.mkdir()
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(place)])
    families.families.cache_clear()
    yield place
    families.families.cache_clear()
    sys.modules.pop(f"{families.__name__}.helium", None)


def difference(rank: int, folder: Path, kind: str = "helium", **entries) -> float:
    """The largest difference of log-probs between transformers' class and megarl with the family, on one rank.

    `entries`: of the configuration of the `model_type` `kind`.
    """
    import transformers

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shape = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    entries |= {"initializer_range": 0.3, "max_position_embeddings": 256, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **shape, **heads, **entries)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    small_tokenizers.characters(folder)
    model.save_pretrained(folder)
    expected = []
    for tokens in SEQUENCES:
        with torch.no_grad():
            rows = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].log_softmax(-1)
        expected.append(rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
    assert torch.cat(expected).std() > 0.1  # the model tells tokens apart
    role, groups, built, _ = hf_layouts.build(folder, "", False)
    found = hf_layouts.logprobs(built, groups, SEQUENCES, role.model_vocab_size(0))
    return max(float((row - other).abs().max()) for row, other in zip(found, expected, strict=True))


def test_the_family_of_the_page_computes_what_transformers_computes(example, folder_of_families, tmp_path):
    (folder_of_families / "helium.py").write_text(example)
    assert families.families()["helium"].model_type == "helium"
    (found,) = run_world(difference, 1, tmp_path / "model")
    assert found < 1e-5


def test_the_mistake_that_the_page_names_is_seen(example, folder_of_families, tmp_path):
    (folder_of_families / "helium.py").write_text(example.replace(", turned_in_pairs=1.0", ""))
    (found,) = run_world(difference, 1, tmp_path / "model")
    assert found > 1e-2


# A class of transformers -> its family in megarl, and whether its MLP has a gate.
FAMILIES = {"llama": True, "arcee": False}
OF_PAGE = re.compile(r"^\| `(\w+)`.*\| `(\{.+\})` \| `(\{.+\})` \|$", re.MULTILINE)


def with_activation(monkeypatch, kind: str, value: str, flags: dict):
    """Gives a family another activation."""
    flags_of = lambda config: model_flags(config, ("hidden_act", value, flags))  # noqa: E731
    monkeypatch.setitem(families.families(), kind, families.families()[kind]._replace(flags=flags_of))


@pytest.mark.parametrize("kind", by_default(FAMILIES, ["llama"]))
def test_both_forms_of_gelu_are_those_of_transformers(kind, tmp_path, monkeypatch):
    """The flags of the page's table; those of the other form are seen to be wrong."""
    rows = OF_PAGE.findall(documents.text_of(ROOT / "docs" / "huggingface.md"))
    given = {value: ast.literal_eval(gated if FAMILIES[kind] else plain) for value, gated, plain in rows}
    assert [*given] == ["gelu", "gelu_pytorch_tanh"]
    for value, other in (("gelu", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh", "gelu")):
        run = functools.partial(run_world, lambda rank, folder: difference(rank, folder, kind, hidden_act=value), 1)
        with_activation(monkeypatch, kind, value, given[value])
        (found,) = run(tmp_path / f"{value}-right")
        with_activation(monkeypatch, kind, value, given[other])
        (wrong,) = run(tmp_path / f"{value}-wrong")
        assert found < 1e-5 and wrong > 1e-4, (value, found, wrong)
