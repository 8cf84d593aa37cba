"""Names and shapes of a model's weights by its flags alone equal those that a real model describes."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_layouts import FAMILIES, MOE, REWARD, SUPPORTED, build
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

Shapes = dict[tuple[str, tuple[int, ...]], tuple[int, ...]]  # key without the layer, (layer, expert) -> shape


def split(key: str, rest: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A key that names its layer, as one that stacks layers."""
    from megarl.mcore.weights.hf.family import LAYER

    match = LAYER.fullmatch(key)
    return (f"decoder.layers.{match[2]}", (int(match[1]), *rest)) if match and match[1] else (key, rest)


def of_model(model, groups) -> Shapes:
    """What the model itself describes, but for the state of training alone."""
    from megarl.mcore.weights.hf.weight_map import NOT_STORED, WeightMap
    from megarl.mcore.weights.reshard_plan import model_weights

    wholes = model_weights(model, groups.pg_collection).wholes
    return {
        split(key, index): whole.shape[len(index) :]
        for key, whole in wholes.items() if not key.endswith(NOT_STORED)
        for index in WeightMap.indices(key, whole.shape)
    }  # fmt: skip


def of_flags(role, value_head: bool) -> Shapes:
    """What the flags say, with the rows that pad the vocabulary."""
    from megarl.mcore.model.weight_table import stored_weights

    found: Shapes = {}
    for key, expert, shape in stored_weights(role.megatron, role.hf_model.vocab_size, value_head):
        name = split(key, () if expert is None else (expert,))
        assert name not in found, f"{name} is described twice"
        found[name] = shape
    return found


def both(rank: int, folders: Iterable[Path], value_head: bool) -> list[tuple[Shapes, Shapes]]:
    """Of each folder's model what the flags and what the model say."""
    found = []
    for folder in folders:
        role, groups, model, _ = build(folder, "", value_head)
        found.append((of_flags(role, value_head), of_model(model, groups)))
    return found


@pytest.mark.parametrize(
    "value_head, cases", [(True, FAMILIES), long((True, SUPPORTED)), long((False, SUPPORTED))],
    ids=["scalar heads of all families", "scalar heads", "language models"],
)  # fmt: skip
def test_flags_name_the_weights_of_the_model(value_head, cases, tmp_path):
    cases = [case for case in cases if value_head or case not in REWARD]
    folders = [hf_folders.write_folder(case, tmp_path / case) for case in cases]
    (found,) = run_world(both, 1, folders, value_head)
    for case, (by_flags, by_model) in zip(cases, found, strict=True):
        assert by_flags == by_model, case
        heads = {key: shape for (key, _), shape in by_flags.items() if key.startswith("output_layer")}
        is_tied = hf_folders.reference(case).config["tie_word_embeddings"]
        assert [shape[0] for shape in heads.values()] == [1] if value_head else len(heads) == (not is_tied), case
        experts = {index for key, index in by_flags if "mlp.experts." in key}
        assert bool(experts) == (case in MOE), case
