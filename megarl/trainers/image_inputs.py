"""Images of a run: whether its models can read those of its prompts, the store that they share on a rank, and metrics.

Every rank can compute an image from its bytes, alone and so to the same bits. It does so where the image is needed
first; ranks that are sent the responses get their images with them (`megarl.comm.image_exchange`).
"""

from typing import Any

import torch

from megarl.arguments import RoleSettings, RunConfig
from megarl.checkpoint.resume import IMAGES
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.images.book import Images
from megarl.data.images.ids import image_ids
from megarl.errors import UsageError, warn_as_first
from megarl.mcore import device
from megarl.mcore.any_model.tower import Tower
from megarl.mcore.vision.store import Image, ImageStore, attach
from megarl.trainers.setup import images_of

READERS = ("actor", "rollout", "critic", "reference", "teacher")  # roles that read the policy's tokens
GB = 10**9


class TowerSource:
    """Computes images that a process knows with a tower."""

    def __init__(self, images: Images, tower: Tower):
        self._images, self._tower = images, tower

    def size(self, key: int) -> tuple[int, int, int]:
        """As of `ImageSource`; decodes nothing."""
        ref = self._images.of_token(image_ids(key, 1)[0])
        if ref is None:
            raise RuntimeError(f"the image {key:#x} of a token stream is in none of the run's data")
        return self._tower.size(self._images.processor.grid(ref.width, ref.height))

    def compute(self, key: int) -> Image:
        """As of `ImageSource`. UsageError: the image's file has changed, or is damaged."""
        return self._tower.compute(self._images.pixels(key))


class RunImages:
    """The images of a run on this rank."""

    def __init__(self, config: RunConfig, encoder: Encoder):
        """Checks that every model of the run that reads the prompts has a tower for their images. UsageError."""
        assert encoder.images is not None
        self._settings, self._images, self._encoder = config.settings, encoder.images, encoder
        self._stores: dict[tuple, ImageStore] = {}  # by tower and precision
        _check(config)
        self._towers = {role.name: self._tower(role) for role in config.with_models() if role.name in READERS}
        self._actor = next(iter(self._towers.values()))

    @staticmethod
    def of(config: RunConfig, encoder: Encoder) -> "RunImages | None":
        """Those of a run; None: its prompts have none, so that its models are read and computed without a tower."""
        return RunImages(config, encoder) if encoder.images is not None and len(encoder.images) else None

    def _tower(self, role: RoleSettings) -> Tower:
        folder = role.hf_model.folder if role.hf_model is not None else None
        if folder is None:
            raise UsageError(f"{role.name}: --hf-model is missing: prompts have images, whose tower its folder has")
        found = images_of(folder, self._encoder.tokenizer, self._settings)
        if found is None or found.fingerprint != self._images.fingerprint:
            raise folder.error(f"the {role.name} reads the policy's images, and needs the same image processor")
        tower = Tower(folder)
        tower.store(role.megatron.params_dtype)  # UsageError for other axes
        return tower

    def attach(self, role: RoleSettings, model):
        """Has a role's model read images of its store; the chunks on this rank, None: none is here."""
        for chunk in model or ():
            if chunk.images is None and hasattr(chunk, "decoder"):
                attach(chunk, self._store(self._towers[role.model_role], role.megatron.params_dtype))

    def _store(self, tower: Tower, dtype: torch.dtype) -> ImageStore:
        """One of all models with the same tower and precision."""
        is_only = len({str(each.path) for each in self._towers.values()}) == 1
        key = "" if is_only else tower.digest, dtype
        if key not in self._stores:
            self._stores[key] = tower.store(dtype, TowerSource(self._images, tower))
        return self._stores[key]

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint's manifest says: the tower, and what made the pixels. Reads the tower."""
        return {"tower": self._actor.digest, **self._images.processor.facts}

    def check_resumed(self, manifest: dict[str, Any], load: str):
        """UsageError for a checkpoint of a run with another tower; a warning for other pixels."""
        before, now = manifest.get(IMAGES), self.facts
        if before is None:
            return
        if before["tower"] != now["tower"]:
            raise UsageError(
                f"--hf-model {self._actor.path}: its vision tower is not that of the checkpoint of --load {load} "
                f"({now['tower'][:12]}, before {before['tower'][:12]})"
            )
        if changed := [
            f"{name} {now[name]} (before: {before.get(name)})" for name in now if now[name] != before.get(name)
        ]:
            warn_as_first([f"--load {load}: images are made by another processor: {', '.join(changed)}"])

    def end_step(self, role_groups: RoleGroups) -> dict[str, float]:
        """Metrics of the images that a role read since the last call, of all its replicas, on its ranks; forgets those
        that do not fit in `--image-cache-gb`. A collective of the role."""
        counts = torch.zeros(4, dtype=torch.float64)
        for store in self._stores.values():
            counts += torch.tensor(store.take_counts(), dtype=torch.float64)
            store.trim(self._settings.image_cache_gb * GB / len(self._stores))
        if not role_groups.is_member:
            return {}
        images, tokens, hits, seconds = role_groups.dp_all_reduce(counts.to(device.device())).tolist()
        return {
            "images/count": int(images),
            "images/tokens": int(tokens),
            "images/cache_hits": int(hits),
            "time/tower_s": seconds,
        }


def _check(config: RunConfig):
    """UsageError for what does not go with images."""
    s = config.settings
    for role in config.with_models():
        if role.megatron.model_folder is not None:
            raise UsageError(f"{role.name}: --model-source transformers does not go with images in prompts")
        if role.name not in READERS:
            raise UsageError(f"{role.name}: a model that reads prompts by its own template does not go with images")
    if device.has_cuda():
        raise UsageError("prompts have images: on a CUDA device they are not supported yet")
    if s.mtp_drafts or s.predicts:
        raise UsageError("multi-token prediction (--mtp-drafts, --mtp-train) does not go with images in prompts")
    if s.environment is not None:
        raise UsageError(f"--environment {s.environment}: does not go with images in prompts yet")
