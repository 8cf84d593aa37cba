"""Where a role's initial weights come from: one of megarl's checkpoints, or a Hugging Face folder."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megarl.arguments import RoleSettings
from megarl.checkpoint import folders
from megarl.data import node_files
from megarl.errors import UsageError
from megarl.mcore.lora.targets import LoRASettings, factor_shapes
from megarl.mcore.lora.transfer import load_factors
from megarl.mcore.model.weight_table import weight_shapes
from megarl.mcore.weights import dist_checkpoint
from megarl.mcore.weights.dist_checkpoint import average_of
from megarl.mcore.weights.hf.folder import HFFolder, damaged_decays, damaged_scales
from megarl.mcore.weights.hf.folder_weights import import_weights
from megarl.mcore.weights.hf.weight_map import WeightMap, weight_map_of

BASES = ("actor", "reward")  # roles whose weights may be under factors
ENTRY = "lora"  # of the manifest: for each role with factors their settings, and where the weights under them come from
POLICIES = ("actor", average_of("actor"))  # whose weights have no scalar head


class CheckpointWeights(NamedTuple):
    """A checkpoint of megarl."""

    folder: Path
    source: str | None = None  # role whose weights they are; None: `folders.source_of` the checkpoint

    def load(self, stages, pg_collection, optimizer=None):
        """Loads them in any layout."""
        load_weights(self.folder, stages, pg_collection, self.source, optimizer)


class FactorWeights(NamedTuple):
    """A checkpoint of low-rank factors, with the weights that they are added to."""

    folder: Path
    source: str  # role whose factors they are
    lora: LoRASettings
    role: RoleSettings  # that they are loaded for
    base: "PretrainedWeights | None"  # None: drawn from the seed

    def load(self, stages, pg_collection, optimizer=None):
        """Loads the weights, then adds the factors to them; a frozen model keeps factors of 16 bits apart.

        Reference and teacher are policies whose weights contain them.
        """
        is_frozen = optimizer is None and self.role.name not in ("reference", "teacher")
        self._load(stages, pg_collection, is_frozen)
        if optimizer is not None:
            optimizer.reload_model_params()

    def _load(self, stages, pg_collection, is_frozen: bool):
        if isinstance(self.base, FactorWeights):
            self.base._load(stages, pg_collection, is_frozen=False)  # as under the factors of a trained model
        elif self.base is not None:
            self.base.load(stages, pg_collection)
        load_factors(self.folder, self.source, self.lora, stages, self.role.megatron, pg_collection, is_frozen)


class StoredFactors(NamedTuple):
    """What a manifest says about a role's factors, and where the weights under them come from: a checkpoint, a Hugging
    Face folder, or the seed."""

    lora: LoRASettings
    pretrained_checkpoint: str | None
    hf_model: str | None
    seed: int


class FolderWeights(NamedTuple):
    """A Hugging Face folder."""

    weight_map: WeightMap

    def load(self, stages, pg_collection, optimizer=None):
        """Reads this rank's slices; no rank waits for another."""
        import_weights(self.weight_map, stages, pg_collection)
        if optimizer is not None:
            optimizer.reload_model_params()


# Weights that were checked against a role's flags. `load`, a collective of the role, fills a model's chunks, and the
# optimizer's master weights if it has them.
PretrainedWeights = CheckpointWeights | FactorWeights | FolderWeights


def load_weights(folder: Path, stages, pg_collection, source: str | None = None, optimizer=None):
    """Loads weights from a checkpoint of any layout into a model; a collective of its role.

    A scalar head is loaded from a reward model or critic, and keeps its initial weights if the source is a policy.
    Buffers of expert balancing keep their initial values if the source has none.

    Args:
        source: role whose weights are loaded; None: `folders.source_of` the checkpoint.
        optimizer: of the model; updates its master weights, if it has them.
    """
    shapes = dist_checkpoint.tensor_shapes(folder)
    source = source or folders.source_of(folder, "--pretrained-checkpoint")
    wanted = dist_checkpoint.model_state(source, stages, pg_collection, shapes)
    dist_checkpoint.load_weights(stages, dist_checkpoint.load_role(wanted, folder, pg_collection), strict=False)
    if optimizer is not None:
        optimizer.reload_model_params()


def with_stored_factors(role: RoleSettings, weights: PretrainedWeights | None) -> RoleSettings:
    """A role's settings with the low-rank factors of the weights that it runs, if these have any."""
    return dataclasses.replace(role, lora=weights.lora if isinstance(weights, FactorWeights) else None)


def find_pretrained(
    role: RoleSettings, vocab_size: int, sources: tuple[str, ...] = ("actor",), value_head: bool = False
) -> PretrainedWeights | None:
    """The weights that a role starts from, checked before any work starts; None: weights drawn from the seed.

    A checkpoint (`--pretrained-checkpoint`) comes before the folder that describes the model (`--hf-model`). Arguments
    and errors as of `checkpoint_weights`; `value_head`: the role has a scalar head.
    """
    if path := role.megatron.pretrained_checkpoint:
        return checkpoint_weights(path, "--pretrained-checkpoint", role, vocab_size, sources)
    return folder_weights(role, value_head) if role.hf_model else None


def folder_weights(role: RoleSettings, value_head: bool = False) -> FolderWeights:
    """The weights in a role's Hugging Face folder. UsageError unless it holds exactly those of the role's model."""
    weight_map = weight_map_of(role.hf_model, role.megatron, value_head)
    weight_map.check()
    _check_numbers(weight_map)
    return FolderWeights(weight_map)


def _check_numbers(weight_map: WeightMap):
    """UsageError for scales of quantized tensors, and for decays of recurrent states or their biases, that are not
    finite, and for a stored head that is not the embedding to which config.json ties it."""
    folder, args = weight_map.model.folder, weight_map.args
    if folder.weights is not folder.tensors and (names := _found_once("scales", folder, damaged_scales)):
        raise folder.error(f"{names[0]} holds a scale that is not finite{_others(names)}")
    if args.experimental_attention_variant is not None and (
        names := _found_once("decays", folder, lambda folder: damaged_decays(folder, weight_map.expected()))
    ):
        file = folder.weights[names[0]].file
        raise folder.error(f"{names[0]} in {file} holds a number that is not finite{_others(names)}")
    if rows := _found_once(f"tied head {weight_map.value_head}", folder, lambda _: weight_map.differing_head_rows()):
        raise folder.error(
            f"config.json ties lm_head.weight to the embedding (tie_word_embeddings), but row {rows[0]} differs; "
            "set it to false, or remove the tensor"
        )


def _found_once(kind: str, folder: HFFolder, find: Callable[[HFFolder], list[str]]) -> list[str]:
    """What `find` returns; one process of a node calls it. `kind`: of what it looks for."""
    key = kind, [node_files.identity(str(folder.path / file)) for file in folder.files()]
    return node_files.text(key, lambda: "\n".join(find(folder))).splitlines()


def _others(names: list[str]) -> str:
    return f", as {len(names) - 1} other tensors do" if len(names) > 1 else ""


def checkpoint_weights(
    path: str, flag: str, role: RoleSettings, vocab_size: int, sources: tuple[str, ...] = ("actor",)
) -> CheckpointWeights | FactorWeights:
    """The weights in a checkpoint that a role's model starts from, checked before any work starts. UsageError for no
    readable checkpoint, one of another kind, a model of other shapes, or no weights under factors.

    The weights under low-rank factors are those of the role's flags; without flags, those that the factors were trained
    on. `path`: value of `flag`, as for `folders.find`; `sources`: what the model may start from, "actor" (a policy) or
    "reward" (a reward model with its scalar head).
    """
    folder = folders.find(path, flag)
    source = folders.source_of(folder, flag)
    if source not in sources:
        kinds = {"actor": "a policy (of train_sft or train_rl)", "reward": "a reward model (of train_reward)"}
        allowed = " or ".join(kinds[name] for name in sources)
        raise UsageError(f"{flag} {path}: holds {kinds[source]}; {role.name} starts from {allowed}")
    stored = stored_factors(folder, flag, source)
    if stored is not None:
        return factor_weights(folder, flag, role, vocab_size, source, stored)
    shapes = weight_shapes(source, role.megatron, vocab_size, value_head=source == "reward")
    folders.check_weights(folder, flag, role.name, shapes)
    return CheckpointWeights(folder)


def factor_weights(
    folder: Path, flag: str, role: RoleSettings, vocab_size: int, source: str, stored: StoredFactors
) -> FactorWeights:
    """The factors of the role `source` in a checkpoint, of which it says `stored`, with the weights under them."""
    shapes = checkpoint_shapes(source, role.megatron, stored.lora, value_head=source not in POLICIES)
    folders.check_weights(folder, flag, role.name, shapes)
    base = _base(folder, flag, role, vocab_size, stored)
    return FactorWeights(folder, source, stored.lora, role, base)


def _base(
    folder: Path, flag: str, role: RoleSettings, vocab_size: int, stored: StoredFactors
) -> PretrainedWeights | None:
    """The weights under the factors of a checkpoint."""
    given = role.megatron.pretrained_checkpoint
    path = given if given and flag != "--pretrained-checkpoint" else stored.pretrained_checkpoint
    if path is not None:
        return checkpoint_weights(path, f"{flag} {folder}: --pretrained-checkpoint", role, vocab_size, BASES)
    if role.hf_model is not None:
        return folder_weights(role, value_head=role.has_scalar_head)
    if stored.hf_model is not None:
        raise UsageError(f"{flag} {folder}: has low-rank factors of the weights in {stored.hf_model}; give --hf-model")
    if stored.seed != role.megatron.seed:
        raise UsageError(
            f"{flag} {folder}: has low-rank factors of weights drawn from --seed {stored.seed}; the flags give "
            f"{role.megatron.seed}"
        )
    return None


# -- low-rank factors ----------------------------------------------------------------------------------------------

# Checkpoints of low-rank factors: which factors and which weights under them, and a check that both are the run's.


def manifest_entry(roles: dict[str, RoleSettings]) -> dict:
    """The manifest's entry about all roles with factors; {} if there are none."""
    found = {}
    for role in (role for role in roles.values() if role.lora and role.name != "rollout"):
        checkpoint, hf_model = role.megatron.pretrained_checkpoint, role.hf_model
        if checkpoint:
            checkpoint = str(folders.find(checkpoint, "--pretrained-checkpoint").resolve())
        folder = str(hf_model.folder.path.resolve()) if hf_model else None
        base = {"pretrained_checkpoint": checkpoint, "hf_model": folder, "seed": role.megatron.seed}
        found[role.name] = {"factors": role.lora.values(), "base": base}
    return {ENTRY: found} if found else {}


def stored_factors(folder: Path, flag: str, role: str) -> StoredFactors | None:
    """What a checkpoint says about a role's factors; None: it holds all weights of the role."""
    entry = folders.read_manifest(folder, flag).get(ENTRY, {}).get(role)
    if entry is None:
        return None
    try:
        return StoredFactors(LoRASettings.from_values(entry["factors"]), **entry["base"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{flag} {folder}: manifest.json is damaged ({ENTRY}: {error!r})") from None


def check_factors(path: str, roles: list[RoleSettings]):
    """UsageError unless a checkpoint to resume from has exactly the factors that the roles' flags describe."""
    folder = folders.find(path, "--load")
    for role in roles:
        stored, given = stored_factors(folder, "--load", role.name), role.lora
        if bool(stored) != bool(given):
            has, said = ("low-rank factors", "no --lora-rank") if stored else ("no low-rank factors", "--lora-rank")
            raise UsageError(f"--load {path}: has {has} of the {role.name}, whose flags give {said}")
        for name, value in stored.lora.values().items() if stored else ():
            if (now := given.values()[name]) != value:
                raise UsageError(
                    f"--load {path}: the factors of the {role.name} have {name} {value}; the flags give {now}"
                )


def checkpoint_shapes(source: str, args, lora: LoRASettings, value_head: bool) -> dict[str, tuple[int, ...]]:
    """Global shapes by key that a role's factors, and its scalar head if it has one, must have in a checkpoint."""
    shapes = factor_shapes(args, lora) | ({"output_layer.weight": (1, args.hidden_size)} if value_head else {})
    return {f"{source}.{key}": shape for key, shape in shapes.items()}


def resume_shapes(role: RoleSettings, tokens: int) -> dict[str, tuple[int, ...] | None]:
    """Global shapes that a role's checkpoint must have to resume, as for `folders.check_weights`. `tokens`: of the
    run's tokenizer."""
    if role.lora:
        return checkpoint_shapes(role.name, role.megatron, role.lora, role.has_scalar_head)
    vocab_size = role.model_vocab_size(tokens)
    return weight_shapes(role.name, role.megatron, vocab_size, resumes=True, value_head=role.has_scalar_head)
