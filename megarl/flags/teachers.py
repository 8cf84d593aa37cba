"""Several teachers in one run: the names and folders of `--teachers`, and what each folder says about its model."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from megarl.errors import UsageError
from megarl.plain_files import parse_named_paths, resolved
from megarl.yaml_files import read_mapping

FLAG = "--teachers"
DEFAULT = "default"  # the teacher of lines that name none
ALIGNMENT = 8  # bytes of a row of several models' states: a multiple of every dtype's
SETTINGS_FILE = "settings.yaml"  # of a run
# What else gives weights their shapes, besides the attributes of an architecture.
_OTHER_SHAPES = ("make_vocab_size_divisible_by", "max_position_embeddings")


class TeacherModels(NamedTuple):
    """The models of the role teacher. They have the same ranks and layout, and may be of any architecture."""

    names: tuple[str, ...] = ()  # of `--teachers`, in its order; none: a run has one teacher without a name, or none
    models: tuple[Any, ...] = ()  # `RoleSettings`; folders that are the same are one model
    model_of: tuple[int, ...] = ()  # by name: the number of its model

    @property
    def take_turns(self) -> bool:
        """Whether several models share the role's device memory."""
        return len(self.models) > 1

    @property
    def state_bytes(self) -> int:
        """Bytes of a row that holds a hidden state of any of the models; 0 without a model."""
        sizes = (role.megatron.hidden_size * role.megatron.params_dtype.itemsize for role in self.models)
        widest = max(sizes, default=0)
        return -(-widest // ALIGNMENT) * ALIGNMENT if self.take_turns else widest


class TeacherFolder(NamedTuple):
    """What a folder of `--teachers` says about its model."""

    hf_model: str | None  # the Hugging Face folder that describes it; None: `attributes` do
    attributes: dict[str, Any]  # of Megatron's namespace
    run: str | None  # what names a checkpoint of megarl with its weights; None: they are in the Hugging Face folder
    model_source: str | None = None  # of a run; None: that of the flags


def read_folder(path: str) -> TeacherFolder:
    """What a Hugging Face folder, a run folder of megarl, or one of its checkpoints says about its policy.

    Raises:
        UsageError: it is neither, or a run without a policy.
    """
    if (Path(path) / "config.json").is_file():
        return TeacherFolder(path, {}, None)
    run = next((each for each in (Path(path), *Path(path).parents[:2]) if (each / SETTINGS_FILE).is_file()), None)
    if run is None:
        raise UsageError(
            f"{FLAG} {path}: allowed is a Hugging Face folder (with config.json), a run folder of megarl (with "
            f"{SETTINGS_FILE}), or one of its checkpoints"
        )
    where = f"{FLAG} {run / SETTINGS_FILE}"
    settings, _ = read_mapping(str(run / SETTINGS_FILE), where, "settings")
    try:
        of_run, described = settings["megarl"], settings["roles"]["actor"]["megatron"]
        hf_model, model_source = of_run.get("hf_model"), of_run.get("model_source", "megatron")
    except (KeyError, TypeError, AttributeError):
        raise UsageError(f"{where}: describes no policy (roles: actor: megatron)") from None
    return TeacherFolder(hf_model, {} if hf_model else _shape(described), path, model_source)


def _shape(stored: dict[str, Any]) -> dict[str, Any]:
    """The attributes that give the weights of a run's policy their shapes and their meaning."""
    from megarl.mcore.config.supported_flags import ARCHITECTURE  # imports Megatron

    found = {name: stored[name] for name in (*sorted(ARCHITECTURE), *_OTHER_SHAPES) if name in stored}
    if found.get("multi_latent_attention"):
        found["kv_channels"] = None  # Megatron's namespace has those of the values there
    if found.get("position_embedding_type") != "learned_absolute":
        found.pop("max_position_embeddings", None)  # no table of that length
    if isinstance(found.get("window_size"), list):
        found["window_size"] = tuple(found["window_size"])
    return found


def check_flags(text: str | None, options: Collection[str], megatron: dict[str, str]):
    """UsageError for a flag of the role, of the `options` that are given, that says what the folders say."""
    if text is None:
        return
    from megarl.mcore.config.supported_flags import ARCHITECTURE  # imports Megatron

    described = {*ARCHITECTURE, "pretrained_checkpoint"}
    for option in options:
        name = megatron.get("--" + option.removeprefix("--teacher-")) if option.startswith("--teacher-") else None
        if option == "--teacher-hf-model" or name in described:
            raise UsageError(f"{option}: not allowed with {FLAG}, whose folders give models and weights; leave it out")


def teacher_models(text: str, build: Callable[[TeacherFolder], Any]) -> TeacherModels:
    """The models of `--teachers`. `build`: makes the `RoleSettings` for a folder, or raises UsageError."""
    folders: dict[Path, int] = {}
    models, model_of = [], []
    for name, path in parse_named_paths(text).items():
        key = resolved(path)
        if key not in folders:
            folders[key] = len(models)
            models.append(_built(name, path, build))
        model_of.append(folders[key])
    if len(models) > 1 and models[0].megatron.use_torch_fsdp2:
        raise UsageError(
            f"{FLAG} {text}: not allowed with --use-torch-fsdp2: teachers take turns on the device, and sharded "
            "parameters cannot move"
        )
    return TeacherModels(tuple(parse_named_paths(text)), tuple(models), tuple(model_of))


def _built(name: str, path: str, build: Callable[[TeacherFolder], Any]) -> Any:
    try:
        return build(read_folder(path))
    except UsageError as error:
        text = str(error)
        raise UsageError(text if FLAG in text else f"{text} ({FLAG} {name}={path})") from None
