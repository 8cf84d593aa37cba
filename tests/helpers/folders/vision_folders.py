"""Tiny random vision-language folders as transformers saves them, and what transformers computes from them.

A prompt is a list of token ids and names of images. transformers reads a placeholder for each row of an image; a
placeholder that is text has no type of its own.
"""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from megarl.data.images.names import Pixels, content_digest, content_key, image_ids
from tests.helpers.texts import small_tokenizers
from tests.helpers.worlds import run_world

PLACEHOLDER = 100
BASE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
IDS = {"image_token_id": PLACEHOLDER, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
GLM_IDS = {"image_token_id": PLACEHOLDER, "video_token_id": 101, "image_start_token_id": 102,
           "image_end_token_id": 103, "video_start_token_id": 104, "video_end_token_id": 105}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4, "num_heads": 2, "depth": 3,
         "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64}  # fmt: skip
DEEP = TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
INTERLEAVED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
HALF = {"partial_rotary_factor": 0.5}
DELTA = {"head_dim": 32, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "rope_parameters": INTERLEAVED | HALF | {"mrope_section": [4, 2, 2]}}  # fmt: skip
GLM = {"head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
       "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
       "routed_scaling_factor": 1.5, "use_qk_norm": False, "rope_parameters": SECTIONS | HALF}  # fmt: skip
PLAIN = {key: value for key, value in DEEP.items() if key != "deepstack_visual_indexes"}
QWEN2 = {"embed_dim": 32, "hidden_size": 64, "patch_size": 4, "num_heads": 2, "depth": 2, "mlp_ratio": 2,
         "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "patch_size": 4, "image_size": 64,
           "num_attention_heads": 2, "head_dim": 16, "num_hidden_layers": 2}  # fmt: skip
PLAIN_IDS = {"image_token_id": PLACEHOLDER}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "patch_size": 4,
        "image_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "projection_dim": 32}  # fmt: skip
WINDOWS = TOWER | {"fullatt_block_indexes": [1], "window_size": 16}
# By family: the beginning of transformers' classes, the tower, the language model, the tokens.
KINDS = {
    "qwen2_vl": ("Qwen2VL", QWEN2, {"rope_parameters": SECTIONS}, IDS),
    "qwen2_5_vl": ("Qwen2_5_VL", WINDOWS, {"rope_parameters": SECTIONS}, IDS),
    "qwen3_vl": ("Qwen3VL", DEEP, {"head_dim": 32, "rope_parameters": INTERLEAVED}, IDS),
    "qwen3_vl_moe": ("Qwen3VLMoe", DEEP, EXPERTS | {"head_dim": 32, "rope_parameters": INTERLEAVED,
                                                    "mlp_only_layers": []}, IDS),
    "glm4v_moe": ("Glm4vMoe", TOWER | {"image_size": 32}, GLM, GLM_IDS),
    "qwen3_5": ("Qwen3_5", PLAIN, DELTA, IDS),
    "qwen3_5_moe": ("Qwen3_5Moe", PLAIN, DELTA | EXPERTS | {"shared_expert_intermediate_size": 32}, IDS),
    "mistral3": ("Mistral3", PIXTRAL, {"model_type": "mistral", "head_dim": 32}, PLAIN_IDS | {"spatial_merge_size": 2}),
    "exaone4_5": ("Exaone4_5_", WINDOWS | {"num_key_value_heads": 2},
                  {"model_type": "exaone4", "sliding_window": 8, "layer_types": ["sliding_attention"] * 3
                   + ["full_attention"]}, IDS),
    "hyperclovax_vision_v2": ("HyperCLOVAXVisionV2", WINDOWS | {"model_type": "qwen2_5_vl_vision"},
                              {"model_type": "hyperclovax"}, IDS),
    "lfm3_vl": ("Lfm3Vl", {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4, "num_attention_heads": 2,
                           "num_key_value_heads": 2, "num_hidden_layers": 3}, {"model_type": "lfm3"},
                IDS | {"projector_hidden_size": 64}),
    "lighton_ocr": ("LightOnOcr", PIXTRAL, {"model_type": "qwen3", "head_dim": 32},
                    PLAIN_IDS | {"spatial_merge_size": 2}),
    "llava": ("Llava", CLIP, {"model_type": "llama"}, PLAIN_IDS),
    "llava_pixtral": ("Llava", PIXTRAL, {"model_type": "mistral"},
                      PLAIN_IDS | {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "vipllava": ("VipLlava", CLIP, {"model_type": "llama"}, {"image_token_index": PLACEHOLDER,
                                                             "vision_feature_layer": [-1, 1]}),
}  # fmt: skip
MODULES = ("exaone4_5", "hyperclovax_vision_v2", "lfm3_vl", "lighton_ocr", "llava", "llava_pixtral", "vipllava")
OF_ONE_SIZE = ("llava", "vipllava")
GRIDS = {"A": (1, 4, 4), "B": (1, 4, 4), "C": (1, 4, 12), "D": (1, 8, 6)}
# A and B are of one size; some prompts begin alike; one ends, one begins with an image; the last ones have none, but
# the second a placeholder that is text.
PROMPTS = [
    [5, 6, 102, "A", 103, 7, 8, 9], [5, 6, 102, "B", 103, 7, 8, 9], [5, 6, 102, "A", 103, 7, 8, 9],
    [102, "C", 103, 11, 102, "D", 103, 12, 13, 14], [102, "C", 103, 11, 102, "D", 103, 15], ["D", 103, "C"],
    [21, 22, *range(30, 52), 102, "A", 103, 7], [40, 41, 42, 43, 44], [40, PLACEHOLDER, 41],
]  # fmt: skip


class VisionFolder(NamedTuple):
    """A folder, its images by name, and for each of `PROMPTS` what transformers computes."""

    path: Path
    images: dict[str, Pixels]
    kind: str
    greedy: list[list[int]]  # by `generate`
    logprobs: list[torch.Tensor]  # of these tokens, by a plain forward

    def tokens(self, prompt: list) -> list[int]:
        """A prompt's token stream in megarl."""
        return [token for item in prompt for token in (self._ids(item) if isinstance(item, str) else [item])]

    def _ids(self, name: str) -> list[int]:
        pixels = self.images[name]
        return with_breaks(image_ids(pixels.key, pixels.tokens), self.kind, pixels.grid)

    @property
    def prompts(self) -> list[list[int]]:
        return [self.tokens(prompt) for prompt in PROMPTS]


def with_breaks(rows: list[int], kind: str, grid: tuple[int, int, int]) -> list[int]:
    """The rows of an image of a family as they are in a token stream: Pixtral's have a token after each line."""
    if KINDS[kind][1].get("model_type") != "pixtral" or kind == "lighton_ocr":
        return rows
    line = grid[2] // KINDS[kind][3].get("spatial_merge_size", 1)
    broken = [token for first in range(0, len(rows), line) for token in (*rows[first : first + line], 104)]
    return [*broken[:-1], 105]


def inputs_of(kind: str, prompt: list, images: dict[str, Pixels], more: list[int] | tuple[int, ...] = ()) -> dict:
    """Arguments of transformers' forward for a prompt and further tokens."""
    names = [item for item in prompt if isinstance(item, str)]
    places = {name: with_breaks([-1] * images[name].tokens, kind, images[name].grid) for name in names}
    ids = [t for item in prompt for t in (places[item] if item in names else [item])]
    ids = torch.tensor([[*ids, *more]])
    found = {"input_ids": ids.where(ids >= 0, PLACEHOLDER), "attention_mask": torch.ones_like(ids)}
    values = [torch.from_numpy(images[name].values) for name in names]
    if values and values[0].dim() == 2:  # patches
        found["image_grid_thw"] = torch.tensor([images[name].grid for name in names])
        if kind not in MODULES:
            found["mm_token_type_ids"] = (ids < 0).long()
    elif KINDS[kind][1].get("model_type") == "pixtral" and values:
        found["image_sizes"] = torch.tensor([each.shape[2:] for each in values])
        height, width = found["image_sizes"].amax(0).tolist()
        values = [pad(each, (0, width - each.shape[3], 0, height - each.shape[2])) for each in values]
    return found | ({"pixel_values": torch.cat(values)} if values else {})


def module_of(kind: str, more_text: dict | None = None, more_vision: dict | None = None, more_ids: dict | None = None):
    """A model of transformers' class of a family, with random weights that make its logits large."""
    import transformers

    family, vision, text, ids = KINDS[kind]
    text, vision, ids = text | (more_text or {}), vision | (more_vision or {}), ids | (more_ids or {})
    config = getattr(transformers, f"{family}Config")(text_config=BASE | text, vision_config=dict(vision), **ids)
    config.text_config.tie_word_embeddings = config.tie_word_embeddings = False
    config.text_config.eos_token_id = 2
    sharpness = 1.0 if "linear_conv_kernel_dim" in text else 1.5  # recurrent layers: so small that fp32 is precise
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                parameter.copy_(torch.empty_like(parameter).uniform_(0.01, 16).log())
            elif "dt_bias" in name:
                parameter.copy_(torch.empty_like(parameter).uniform_(-5, 1))
            elif parameter.dim() >= 2:
                scale = sharpness * (0.2 if "linear_attn.out_proj" in name else 1) * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape) * scale)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))
        # Never greedy: transformers' forward raises if a response has a placeholder beside an image.
        model.lm_head.weight[PLACEHOLDER:106] = 0
        model.lm_head.weight[0] = 0  # nor the token of padding, which has no gradient in transformers
    return model


def drawn_pixels(kind: str, grid: tuple[int, int, int], seed: int) -> Pixels:
    """An image of noise for a family, with so many patches, or a quarter if each is a row; some have one size."""
    _, vision, _, ids = KINDS[kind]
    is_flat = vision.get("model_type") in ("pixtral", "clip_vision_model")
    patch, merge = vision["patch_size"], (ids | vision).get("spatial_merge_size", 1 if is_flat else 2)
    grid = (1, grid[1] // 2, grid[2] // 2) if merge == 1 else grid
    if kind in OF_ONE_SIZE:
        grid = 1, vision["image_size"] // patch, vision["image_size"] // patch
    if not is_flat:
        shape = grid[0] * grid[1] * grid[2], 3 * 2 * patch**2
    else:
        shape = 1, 3, grid[1] * patch, grid[2] * patch
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    digest = content_digest(repr(grid).encode(), values.tobytes())
    return Pixels(values, grid, grid[0] * grid[1] * grid[2] // merge**2, content_key(digest), digest)


@functools.cache
def folder_of(kind: str, count: int = 16) -> VisionFolder:
    """The folder of a family, with greedy continuations of so many tokens; made once, in a world: transformers starts
    threads."""
    return run_world(_made, 1, kind, count, temporary() / kind)[0]


def temporary() -> Path:
    """A folder that is removed when the test process ends."""
    path = Path(tempfile.mkdtemp(prefix="vision-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _made(rank: int, kind: str, count: int, path: Path) -> VisionFolder:
    model = module_of(kind)
    small_tokenizers.characters(path)
    model.save_pretrained(path)
    images = {name: drawn_pixels(kind, grid, i) for i, (name, grid) in enumerate(GRIDS.items())}
    model.generation_config.eos_token_id = None
    greedy = [_greedy(model, kind, prompt, images, count) for prompt in PROMPTS]
    logprobs = [scored(model, kind, *each, images).detach() for each in zip(PROMPTS, greedy, strict=True)]
    return VisionFolder(path, images, kind, greedy, logprobs)


def _greedy(model, kind: str, prompt: list, images: dict[str, Pixels], count: int) -> list[int]:
    """By `generate`. After a prompt that ends with an image it goes on from that row's three positions, other than the
    forward: then by forwards."""
    model.model.rope_deltas = None  # else that of the last prompt
    found: list[int] = []
    with torch.no_grad():
        if not isinstance(prompt[-1], str):
            given = inputs_of(kind, prompt, images)
            limits = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
            return model.generate(**given, **limits)[0, given["input_ids"].shape[1] :].tolist()
        while len(found) < count:
            model.model.rope_deltas = None
            found.append(int(model(**inputs_of(kind, prompt, images, found), use_cache=False).logits[0, -1].argmax()))
    return found


def scored(model, kind: str, prompt: list, more: list[int], images: dict[str, Pixels]) -> torch.Tensor:
    """Log-probs of the tokens after a prompt by a forward of transformers' model without a cache."""
    model.model.rope_deltas = None
    logits = model(**inputs_of(kind, prompt, images, more), use_cache=False).logits[0].log_softmax(-1)
    return logits[-len(more) - 1 : -1].gather(1, torch.tensor(more)[:, None])[:, 0]


def store_of(folder: VisionFolder, dtype: torch.dtype = torch.float32):
    """A store with the images of a folder."""
    from megarl.mcore.any_model.tower import Tower
    from megarl.mcore.weights.hf.folder import HFFolder

    tower = Tower(HFFolder(folder.path))
    store = tower.store(dtype)
    for pixels in folder.images.values():
        store.put(pixels.key, tower.compute(pixels))
    return store


def source_of(kind: str) -> str:
    """The flag of a family that Megatron's layers do not compute."""
    return "--model-source transformers" if kind in MODULES else ""


def model_of(folder: VisionFolder, flags: str = ""):
    """As `hf_layouts.build`, on a store with the folder's images."""
    from megarl.mcore.vision.store import attach
    from tests.helpers.folders import hf_layouts

    role, groups, model, weights = hf_layouts.build(folder.path, f"{source_of(folder.kind)} {flags}", False)
    store = store_of(folder, role.megatron.params_dtype)
    for chunk in model:
        attach(chunk, store)
    return role, groups, model, weights


def write_program_folder(rank: int, folder: Path, family: str = "qwen3_vl"):
    """Writes `model`, a small Qwen3-VL, Qwen3.5, Mistral 3 or LLaVA with a tokenizer, a chat template and an image
    processor, and prompts with pictures of three sizes: pictures.jsonl, answered.jsonl with responses, and pairs.jsonl
    with preferences."""
    from tests.helpers.programs import write_lines
    from tests.helpers.texts import picture_prompts

    folder.mkdir(parents=True)
    of_qwen = {"size": {"longest_edge": 16384, "shortest_edge": 1024}}, {"patch_size": 16, "depth": 2}
    settings, vision = {
        "qwen3_vl": of_qwen,
        "qwen3_5": of_qwen,
        "mistral3": ({"size": {"longest_edge": 64}, "patch_size": 8}, {"patch_size": 8}),
        "llava": ({"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}, {}),
    }[family]
    processor = "qwen3_vl" if family.startswith("qwen3") else family
    model = picture_prompts.write_folder(folder / "model", processor, **settings)
    config = json.loads((model / "config.json").read_text())
    layers = 4 if family == "qwen3_5" else 2  # one in four of it attends
    vocabulary = {"vocab_size": 512, "num_hidden_layers": layers, "eos_token_id": 2}
    place = {"image_token_id": config["image_token_id"]}
    module_of(family, vocabulary, vision, place).save_pretrained(model)
    rows = []
    for i, (width, height) in enumerate([(64, 64), (96, 64), (64, 96), (64, 64)] * 3):
        (folder / f"{i % 5}.png").write_bytes(picture_prompts.encoded(picture_prompts.picture(width, height, i % 5)))
        content = [{"type": "image", "image": f"{i % 5}.png"}, {"type": "text", "text": f"the picture {i}"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "answer": str(i % 5)})
    write_lines(folder / "pictures.jsonl", rows)
    write_lines(folder / "answered.jsonl", [row | {"response": row["answer"]} for row in rows])
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "none"} for row in rows]
    write_lines(folder / "pairs.jsonl", pairs)
