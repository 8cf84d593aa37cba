"""The Hugging Face folders of a run's roles, and the flags of megarl whose defaults they change."""

from typing import TYPE_CHECKING

from megarl.flags import teachers
from megarl.flags.settings import Settings

if TYPE_CHECKING:
    from megarl.mcore.any_model.module_map import AnyModel
    from megarl.mcore.weights.hf.hf_model import HFModel


def read_hf_models(
    program: str, settings: Settings, own: dict[str, dict], lengths: dict[str, int]
) -> "dict[str, HFModel | None]":
    """The folder of each role, read and checked; None for a role without one. UsageError for a wrong one.

    The rollout has the actor's. `--hf-model` does not give the reward model's weights, but it describes the role like
    any common flag.

    Args:
        own: role -> its values of megarl's own flags.
        lengths: role -> its longest sequence, in tokens.
    """
    paths = {role: values["hf_model"] for role, values in own.items()}
    if "rollout" in paths:
        paths["rollout"] = paths["actor"]
    flags = {role: "--hf-model" if path == settings.hf_model else f"--{role}-hf-model" for role, path in paths.items()}
    if settings.teachers is not None:
        flags["teacher"] = teachers.FLAG
    if "reward" in paths and program != "reward" and settings.reward_hf_model:
        paths["reward"], flags["reward"] = settings.reward_hf_model, "--reward-hf-model"
    if settings.judge_hf_model:
        paths["reward"], flags["reward"] = settings.judge_hf_model, "--judge-hf-model"
    sources = {role: own["actor" if role == "rollout" else role]["model_source"] for role in paths}
    keys = {role: (sources[role], path, flags[role], lengths[role]) for role, path in paths.items()}
    read = {key: _read_model(settings, *key) for key in dict.fromkeys(keys.values()) if key[1] is not None}
    return {role: read.get(key) for role, key in keys.items()}


def _read_model(settings: Settings, source: str, path: str, flag: str, longest: int) -> "HFModel | AnyModel":
    if source == "transformers":
        from megarl.mcore.any_model import module_map  # needs transformers

        return module_map.read_model(path, flag, longest)
    from megarl.mcore.weights.hf.hf_model import read_model  # imports Megatron

    return read_model(path, flag, longest, settings.hf_mtp == "keep", settings.mtp_train)


def with_hf_defaults(role: str, own: dict, values: dict[str, object], hf_model: "HFModel | None") -> dict:
    """A role's values of megarl's own flags; without flags for the tokenizer, it is the folder's.

    Args:
        values: the flags that the user gave, by name.
    """
    given = {"tokenizer-type", "tokenizer-model", f"{role}-tokenizer-type", f"{role}-tokenizer-model"}
    prefixes = f"--{role}-", *{"reward": ("--judge-",), "teacher": (teachers.FLAG,)}.get(role, ())
    has_own_folder = hf_model is not None and hf_model.folder.flag.startswith(prefixes)
    if has_own_folder:  # its tokenizer comes before that of the common flags
        given -= {"tokenizer-type", "tokenizer-model"}
    if hf_model is None or given & values.keys():
        return own
    return own | {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(hf_model.folder.path)}
