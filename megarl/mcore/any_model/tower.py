"""A folder's vision tower as transformers builds it, frozen: an image becomes rows for the language model.

The tower is all of the folder's model but its language model. An image is computed alone: in a batch, or with another
number of threads, its numbers could have other bits.
"""

import functools
import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from megarl.data.images.names import Pixels
from megarl.mcore.any_model import source
from megarl.mcore.any_model.attention import Unsupported
from megarl.mcore.any_model.module_map import Conversions
from megarl.mcore.vision.store import Compute, Image, ImageStore, SizeOf, axes_of
from megarl.mcore.weights.hf.folder import FolderReader, HFFolder

ATTENTION = "sdpa"  # eager attention keeps a square of the patches of an image
# By `model_type` of config.json: the families whose images were compared with transformers' own forward. How the rotary
# channels are divided among the axes of a position: sections where config.json has none, and whether these alternate.
# None: a token has one position, its index.
FAMILIES: dict[str, tuple[tuple[int, int, int], bool] | None] = {
    "qwen2_vl": ((16, 24, 24), False),
    "qwen2_5_vl": ((16, 24, 24), False),
    "qwen3_vl": ((24, 20, 20), True),
    "qwen3_vl_moe": ((24, 20, 20), True),
    "glm4v_moe": ((8, 12, 12), False),
    "qwen3_5": ((11, 11, 10), True),
    "qwen3_5_moe": ((11, 11, 10), True),
    "mistral3": None,
    "exaone4_5": None,
    "hyperclovax_vision_v2": None,
    "lfm3_vl": None,
    "lighton_ocr": None,
    "llava": None,
    "vipllava": None,
}
WITH_CLASS = ("clip_vision_model",)  # towers whose first row is of no patch; LLaVA's strategy "default" leaves it out
# Entries of config.json beside `vision_config` that say how a tower's numbers become rows.
PROJECTION = (
    "multimodal_projector_bias projector_hidden_act projector_layernorm_eps spatial_merge_size vision_feature_layer "
    "vision_feature_layers vision_feature_select_strategy"
)


class Tower:
    """The tower of a folder: what it says of the language model's reading at once, its weights when they are needed."""

    def __init__(self, folder: HFFolder):
        """Reads config.json. UsageError for a folder whose family is not one of `FAMILIES`, or that is no model."""
        self.folder, kind = folder, folder.config.get("model_type")
        if kind not in FAMILIES:
            raise folder.error(f"model_type {kind!r}: images need a vision tower of {', '.join(FAMILIES)}")
        self.config = source.config_of(folder)
        self._axes, vision = FAMILIES[kind], self.config.vision_config.model_type
        strategy = getattr(self.config, "vision_feature_select_strategy", None)
        if strategy is not None and (strategy == "default") != (vision in WITH_CLASS):
            raise folder.error(
                f"config.json: vision_feature_select_strategy {strategy!r} of {vision}: a row is no patch of an image"
            )

    def check_reader(self, is_module: bool):
        """UsageError if the language model does not read images here. `is_module`: it is a module of transformers."""
        if is_module and self._axes is not None:
            raise self.folder.error(
                f"model_type {self.folder.config['model_type']!r}: {source.FLAG} does not go with images whose rows "
                "have three positions; Megatron's layers compute it"
            )

    @property
    def layers(self) -> int:
        """Layers of the language model that add features of images to their outputs."""
        return len(getattr(self.config.vision_config, "deepstack_visual_indexes", None) or ())

    def size(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """The rows of an image of (t, h, w) patches in time, height and width."""
        # Patches on each side of the square that becomes a row.
        owners = self.config.vision_config, self.config
        merge = next((found for each in owners if (found := getattr(each, "spatial_merge_size", None))), 1)
        return grid[0], grid[1] // merge, grid[2] // merge

    def store(self, dtype: torch.dtype, size_of: SizeOf | None = None, compute: Compute | None = None) -> ImageStore:
        """An empty store for a language model of the folder in a precision; others as of `ImageStore`. UsageError for
        sections of other axes."""
        text = self.config.get_text_config()
        if self._axes is None:
            return ImageStore(None, text.hidden_size, self.layers, dtype, size_of, compute)
        default, is_interleaved = self._axes
        parameters = text.rope_parameters
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        rotated = int(head * parameters.get("partial_rotary_factor", 1))
        sections = parameters.get("mrope_section", default)
        if len(sections) != 3 or sum(sections) != rotated // 2:
            raise self.folder.error(
                f"config.json: mrope_section {sections}: allowed are three numbers whose sum is {rotated // 2}"
            )
        return ImageStore(
            axes_of(tuple(sections), is_interleaved), text.hidden_size, self.layers, dtype, size_of, compute
        )

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of what an image's rows depend on beside its pixels, hexadecimal: the tower's weights and config."""
        config = self.folder.config
        described = [ATTENTION, config["vision_config"]]
        if projection := {name: config[name] for name in PROJECTION.split() if name in config}:
            described.append(projection)
        found = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        for name, tensor in sorted(self._module.state_dict().items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def compute(self, pixels: Pixels) -> Image:
        """The rows of one image, in fp32 on the host. ValueError if they are not as many as its ids."""
        values, more = torch.from_numpy(pixels.values), {}
        if values.dim() == 2:  # patches
            more = {"image_grid_thw": torch.tensor([pixels.grid])}
        elif self.config.vision_config.model_type == "pixtral":
            more = {"image_sizes": torch.tensor([values.shape[2:]])}
        with torch.no_grad():
            found = self._module.model.get_image_features(values, **more, return_dict=True)
        embeddings = _joined(found.pooler_output)
        size = self.size(pixels.grid)
        if not len(embeddings) == size[0] * size[1] * size[2] == pixels.tokens:
            raise ValueError(f"an image of {pixels.tokens} tokens became {len(embeddings)} rows, of {size}")
        features = [_joined(each) for each in getattr(found, "deepstack_features", None) or ()]
        none = embeddings.new_zeros(0, *embeddings.shape)
        return Image(size, embeddings.contiguous(), torch.stack(features) if features else none)

    @property
    def bytes(self) -> int:
        """Bytes of its weights where they are loaded, in fp32."""
        return sum(tensor.nbytes for tensor in self._empty().state_dict().values())

    def _empty(self) -> PreTrainedModel:
        """The model without its language model and without weights. UsageError: transformers cannot build it."""
        whole = source.of_config(self.config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
        try:
            module = whole.module(torch.float32, ATTENTION)
        except Unsupported as error:
            raise self.folder.error(f"config.json: transformers cannot build it ({error})") from None
        module.model.language_model = module.lm_head = None
        return module

    @functools.cached_property
    def _module(self) -> PreTrainedModel:
        """The model without its language model. UsageError if a tensor is missing or has another shape."""
        module = self._empty()
        weights, reader = self.folder.weights, FolderReader(self.folder)
        conversions = Conversions(module, {name: stored.shape for name, stored in weights.items()})
        conversions.check(self.folder)
        for group in conversions.groups:
            made = group.made(reader.read, module).items()
            module.load_state_dict({name: each.float() for name, each in made}, strict=False, assign=True)
        return module.requires_grad_(False)


def _joined(rows: Tensor | tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """[n, H] of one image, which transformers gives as a tensor or as a sequence of them."""
    return rows.flatten(0, -2) if isinstance(rows, Tensor) else torch.cat(list(rows))
