"""Images of a run: whether its models can read those of its prompts, the store that they share on a rank, and metrics.

Every rank can compute an image from its bytes, alone and so to the same bits. It does so where the image is needed
first. Ranks that are sent the responses get the rows of their images with them, and so need no tower.
"""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arguments import RoleSettings, RunConfig, Settings
from megarl.batch import Batch
from megarl.checkpoint.resume import IMAGES, change
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.comm.step_batch import ROLLOUT, StepBatch
from megarl.data.conversations import Encoder
from megarl.data.images.book import FOLDER, Images
from megarl.data.images.names import image_ids
from megarl.errors import UsageError, warn_as_first
from megarl.mcore import device
from megarl.mcore.any_model.tower import Tower
from megarl.mcore.vision.store import (
    Image,
    ImageCounts,
    ImageStore,
    attach,
    images_from_bytes,
    images_to_bytes,
    keys_of,
)
from megarl.mcore.weights.hf.folder import HFFolder
from megarl.plain_files import resolved
from megarl.trainers.setup import images_of

READERS = ("actor", "critic", "reference", "teacher")  # roles with models that read the policy's tokens
GB = 10**9


class TowerSource:
    """Computes images that a process knows with a tower."""

    def __init__(self, images: Images, tower: Tower):
        self._images, self._tower = images, tower

    def size(self, key: int) -> tuple[int, int, int]:
        """Its rows in time, height and width, of the header alone."""
        ref = self._images.of_token(image_ids(key, 1)[0])
        if ref is None:
            raise RuntimeError(f"the image {key:#x} of a token stream is in none of the run's data")
        return self._tower.size(self._images.processor.grid(ref.width, ref.height))

    def compute(self, key: int) -> Image:
        """Its rows. UsageError: the image's file has changed, or is damaged."""
        return self._tower.compute(self._images.pixels(key))


class RunImages:
    """The images of a run on this rank."""

    def __init__(self, config: RunConfig, encoder: Encoder):
        """Checks that every model of the run that reads the prompts has a tower for their images. UsageError."""
        assert encoder.images is not None
        self._settings, self._images = config.settings, encoder.images
        self._scorers: dict[str, Images] = {}  # role -> the images as a processor of its own makes them
        self._stores: dict[tuple[str, str, torch.dtype], ImageStore] = {}  # by processor, tower and precision
        self._sent = SentImages()
        _check(config)
        self._towers: dict[str, Tower] = {}  # by folder
        for role in config.with_models():
            if not _is_scorer(role, config):
                folder = self._folder(role)
                if str(folder.path) not in self._towers:
                    self._check_processor(role, folder, encoder)
                self._add_tower(role)
        policy = config.roles["actor" if "actor" in config.roles else "reward"]
        self._policy = self._tower(policy)
        for role in config.with_models() if config.settings.environment is not None else ():
            if role.name in READERS and self._key(role) != self._key(policy) and not config.settings.save:
                raise UsageError(f"the {role.name} has a tower of its own: images of environments need --save then")

    @staticmethod
    def of(config: RunConfig, encoder: Encoder, folders: Sequence[Path] = ()) -> "RunImages | None":
        """Those of a run; None: it has none, so that its models are computed without a tower.

        `folders`: where images of its environments are, beside that of the run. UsageError as of `RunImages`; where an
        environment may have images but has not said so, the environment's are refused instead.
        """
        images, environment = encoder.images, config.settings.environment
        if images is None:
            return None
        if environment is not None:
            images.keep_in(_folder_of(config.settings), folders)
            reward = config.roles.get("reward")
            if reward is not None and reward.has_model:
                images.shown_problem = f"--reward {config.settings.reward} reads none of environments"
            if images.are_shown and images.shown_problem:
                raise UsageError(f"--environment {environment}: has images; {images.shown_problem}")
        if images.of_data or images.are_shown:
            return RunImages(config, encoder)
        if environment is not None:
            return RunImages._or_refused(config, encoder)
        images.refuse("the prompts of this run have none, so its models read none")
        return None

    @staticmethod
    def of_server(config: RunConfig, encoder: Encoder) -> "RunImages | None":
        """Those that clients may send; None: the model reads none, which the server then says."""
        found = None if encoder.images is None else RunImages._or_refused(config, encoder)
        if found is not None:
            encoder.images.when_forgotten = found.trim
        return found

    @staticmethod
    def _or_refused(config: RunConfig, encoder: Encoder) -> "RunImages | None":
        """The images of models that read some; None: they read none, which is said of each image that comes."""
        try:
            return RunImages(config, encoder)
        except UsageError as error:
            encoder.images.refuse(str(error))
            return None

    @staticmethod
    def _folder(role: RoleSettings) -> HFFolder:
        if role.hf_model is None:
            raise UsageError(f"{role.name}: --hf-model is missing: prompts have images, and its folder the tower")
        return role.hf_model.folder

    def add_scorer(self, role: RoleSettings, encoder: Encoder | None):
        """Adds the role of a reward model or judge, which reads prompts by a template and a processor of its own.

        `encoder`: of the role, which knows the images; None: it has no model. UsageError as for other roles.
        """
        if encoder is not None:
            assert encoder.images is not None
            self._scorers[role.name] = encoder.images
            self._add_tower(role)

    def _add_tower(self, role: RoleSettings):
        folder = self._folder(role)
        if str(folder.path) not in self._towers:
            self._towers[str(folder.path)] = Tower(folder)
        self._tower(role).store(role.megatron.params_dtype)  # UsageError for other axes
        self._tower(role).check_reader(role.megatron.model_folder is not None)

    def _check_processor(self, role: RoleSettings, folder: HFFolder, encoder: Encoder):
        found = images_of(folder, encoder.tokenizer, self._settings)
        if found is None or found.fingerprint != self._images.fingerprint:
            raise folder.error(f"the {role.name} reads the policy's images: it needs the same image processor")

    def _tower(self, role: RoleSettings) -> Tower:
        return self._towers[str(self._folder(role).path)]

    def _images_of(self, role: RoleSettings) -> Images:
        """The images as a role reads them: the policy's, but with another processor."""
        own = self._scorers.get(role.name, self._images)
        return self._images if own.fingerprint == self._images.fingerprint else own

    def _key(self, role: RoleSettings) -> tuple[str, str, torch.dtype]:
        """Equal for roles that read the same numbers."""
        tower = self._tower(role).digest if len(self._towers) > 1 else ""
        return self._images_of(role).fingerprint, tower, role.megatron.params_dtype

    def attach(self, role: RoleSettings, model):
        """Has a role's model on this rank read images of its store. `model`: None: it is on other ranks."""
        for chunk in model or ():
            key = self._key(role)
            if key not in self._stores:
                tower = self._tower(role)
                source = TowerSource(self._images_of(role), tower)
                self._stores[key] = tower.store(key[-1], source.size, source.compute)
            attach(chunk, self._stores[key])

    def dispatch(self, batch: StepBatch, roles: dict[str, RoleSettings]):
        """Sends the images of responses to the roles that were sent these. A collective of the world."""
        if self._settings.debug_train_only:  # no rank has generated: each computes what it reads
            return
        source = roles["actor"]
        self._sent.begin_step(self._bytes_kept(batch.mesh, roles))
        for name in (name for name in (*READERS, *self._scorers) if name in batch.mesh.roles):
            if self._key(roles[name]) != self._key(source):
                continue  # it has a tower of its own
            pending, store = batch.pending_sends(ROLLOUT, name), self._stores.get(self._key(source))
            with batch.exchange_phase(ROLLOUT, name) if store is not None else contextlib.nullcontext():
                send_images(batch.mesh, store, batch[ROLLOUT], ROLLOUT, name, batch.dp_assignment, self._sent, pending)

    def _bytes_kept(self, mesh: RoleMesh, roles: dict[str, RoleSettings]) -> float:
        """What each replica keeps of what one of the rollout sends, so that all of it fits in `--image-cache-gb`."""
        stores = {self._key(role) for role in roles.values() if role.has_model}
        layouts = {mesh[name].replicas for name in (*READERS, *self._scorers) if name in mesh.roles}
        return self._settings.image_cache_gb * GB / len(stores) / len(layouts) / len(mesh[ROLLOUT].replicas)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint's manifest says: the tower, and what made the pixels. Reads the tower."""
        return {"tower": self._policy.digest, **self._images.processor.facts}

    def check_resumed(self, manifest: dict[str, Any], load: str):
        """UsageError for a checkpoint of a run with another tower; a warning for another processor."""
        before, now = manifest.get(IMAGES), self.facts()
        if before is None:
            return
        if before["tower"] != now["tower"]:
            raise self._policy.folder.error(
                f"its vision tower is not the one of the checkpoint of --load {load}, whose images had other rows"
            )
        changed = [name for name in now if now[name] != before.get(name)]
        if changed:
            values = ", ".join(change(name, before.get(name), now[name]) for name in changed)
            warn_as_first([f"--load {load}: images are made by another processor: {values}"])

    def take_metrics(self, role_groups: RoleGroups) -> dict[str, float]:
        """Metrics of the images that a role's models read since the last call. A collective of the role."""
        counts = ImageCounts({}, 0.0)
        for store in self._stores.values():
            counts = counts.plus(store.take_counts())
        return counts.metrics(role_groups)

    def write_thumbnails(self, folder: Path, rows: list[dict]):
        """Writes small images of the prompts of samples, first of those that the report shows token by token."""
        texts = [row["prompt"] + row["response"] for row in sorted(rows, key=lambda row: "tokens" not in row)]
        self._images.write_thumbnails(folder, texts)

    def open(self):
        """Has the run's folder hold the images of environments that it goes on with. For one rank."""
        self._images.take_over()

    def trim(self):
        """Forgets the images that do not fit in `--image-cache-gb`; called where no pass needs them."""
        for store in self._stores.values():
            store.trim(self._settings.image_cache_gb * GB / len(self._stores), self._sent.all_to_keep)


def _is_scorer(role: RoleSettings, config: RunConfig) -> bool:
    """Whether a role is a reward model or judge beside a policy, whose template is its own."""
    return role.name not in READERS and role.name not in config.trained


def _check(config: RunConfig):
    """UsageError for what does not go with images."""
    s = config.settings
    for role in config.with_models():
        if role.megatron.model_folder is not None and _is_scorer(role, config):
            raise UsageError(f"{role.name}: --model-source transformers does not go with images in prompts")
        if role.megatron.virtual_pipeline_model_parallel_size:
            raise UsageError(f"{role.name}: virtual pipeline stages do not go with images in prompts yet")
    if s.mtp_drafts or s.predicts:
        raise UsageError("multi-token prediction (--mtp-drafts, --mtp-train) does not go with images in prompts")
    if s.rollout_server is not None:
        raise UsageError(f"--rollout-server {s.rollout_server}: is sent tokens of texts alone, and prompts have images")


def _folder_of(s: Settings) -> Path | None:
    """Where a run keeps images of environments; None: nowhere."""
    return Path(s.save) / FOLDER if s.save else None


def folders_of(s: Settings) -> list[Path]:
    """Where images of environments are that a run goes on with, or trains on."""
    found = []
    if s.load:
        found += [Path(s.load) / FOLDER, resolved(s.load).parent.parent / FOLDER]
    if s.load_rollouts:
        found += [Path(s.load_rollouts) / FOLDER, resolved(s.load_rollouts).parent / FOLDER]
    own = _folder_of(s)
    return [path for path in found if path.is_dir() and (own is None or resolved(path) != resolved(own))]


# -- images on their way to other ranks: between leaders, then inside the replica ----------------------------------


# What a replica's ranks keep of the images that they were sent: key -> bytes, those used last at the end.
Kept = OrderedDict[int, int]


@dataclass
class SentImages:
    """The images that other replicas hold after this rank's sends, and those that this rank keeps for its senders."""

    share: float = 0.0  # bytes that each replica keeps of this rank's images
    kept: dict[tuple[int, ...], Kept] = field(default_factory=dict)  # by the ranks of a replica
    in_step: dict[tuple[int, ...], set[int]] = field(default_factory=dict)  # by the same: images in this step
    to_keep: dict[tuple, list[int]] = field(default_factory=dict)  # by sender and replica

    @property
    def all_to_keep(self) -> set[int]:
        """What this rank keeps."""
        return set(itertools.chain.from_iterable(self.to_keep.values()))

    def begin_step(self, share: float):
        """Begins the sends of a step."""
        self.share = share
        self.in_step.clear()

    def new_for(self, replica: tuple[int, ...], image_bytes: dict[int, int]) -> list[int]:
        """Those of a step's images, key -> bytes, that a replica lacks; from now on it has all of them."""
        kept, in_step = self.kept.setdefault(replica, Kept()), self.in_step.setdefault(replica, set())
        found = [key for key in image_bytes if key not in kept and key not in in_step]
        in_step.update(image_bytes)
        for key, size in image_bytes.items():
            kept[key] = size
            kept.move_to_end(key)
        held = sum(kept.values())
        while held > self.share:
            held -= kept.popitem(last=False)[1]
        return found


def send_images(
    mesh: RoleMesh,
    store: ImageStore | None,
    batch: Batch | None,
    source: str,
    destination: str,
    dp_assignment: dict[str, Tensor],
    sent: SentImages,
    pending: exchange.PendingSends | None = None,
):
    """Sends what the sequences of a batch that a role's replicas get have of images, and these lack. A collective of
    both roles' ranks; others return at once.

    Args:
        store: of this rank's models in either role; None elsewhere.
        batch: this rank's in the source, ignored elsewhere.
        sent: this rank's, of all steps.
        dp_assignment, pending: as of `exchange.send`.
    """
    sender, receiver = mesh[source], mesh[destination]
    if exchange.is_already_there(mesh, source, destination, dp_assignment):
        return
    arrived: list[Tensor] = []
    ranks: list[int] = []
    if sender.is_leader or receiver.is_leader:
        group = mesh.leaders_group(source, destination, False)
        ranks = dist.get_process_group_ranks(group)
        buffers = dict.fromkeys(ranks, torch.empty(0, dtype=torch.uint8))
        if sender.is_leader and batch is not None:
            dp_ranks, tokens = dp_assignment[destination][batch.sequence_ids.cpu()], batch.tokens.cpu()
            of_sequences = tokens.split(batch.lengths.tolist())
            for dp_rank in dp_ranks.unique().tolist():
                own = torch.cat(
                    [each for each, of in zip(of_sequences, dp_ranks.tolist(), strict=True) if of == dp_rank]
                )
                replica = receiver.replicas[dp_rank]
                if replica == sender.replica:
                    continue  # it has computed them
                new = sent.new_for(replica, {key: store[key].bytes for key in keys_of(own)})
                buffers[replica[0]] = images_to_bytes(store, new, list(sent.kept[replica]))
        own_pending = pending if sender.is_leader else None
        arrived = exchange.all_to_all([buffers[rank].to(device.device()) for rank in ranks], group, own_pending)
    if receiver.is_member:
        assert store is not None
        received: set[int] = set()
        for rank, each in zip(ranks, arrived, strict=False):  # nothing arrives where none is expected
            if len(each):
                keys, sent.to_keep[rank, receiver.replica] = images_from_bytes(store, each.cpu())
                received.update(keys)
        _share_in_replica(store, received, sent, receiver)


def _share_in_replica(store: ImageStore, keys: set[int], sent: SentImages, role_groups: RoleGroups):
    """Gives all ranks of a replica the images that its leader has got, and what it keeps."""
    if len(role_groups.replica) == 1:
        return
    buffer = images_to_bytes(store, sorted(keys), sorted(sent.all_to_keep)).to(device.device())
    size = role_groups.broadcast_number(len(buffer))
    if not role_groups.is_leader:
        buffer = torch.empty(size, dtype=torch.uint8, device=device.device())
    role_groups.broadcast(buffer)
    if not role_groups.is_leader:
        _, sent.to_keep[role_groups.replica] = images_from_bytes(store, buffer.cpu())
