"""Models of Hugging Face folders in parallel layouts: their log-probs, greedy responses, and export."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl import arguments
from megarl.comm import role_mesh
from tests.helpers.folders.hf_folders import Reference, reference
from tests.helpers.models.tiny_models import one_microbatch
from tests.helpers.worlds import SAFETY

# Cases of hf_folders whose models megarl computes.
DENSE = ("llama2", "llama3", "llama32", "llama3_old_style", "llama_linear_rope", "smollm2", "qwen2", "qwen25_tied",
         "qwen25_tied_old_style", "qwen3", "mistral", "phi4", "phi4_mini", "llama_yarn", "qwen3_yarn",
         "qwen3_yarn_old_style", "mistral_window", "qwen2_window", "qwen2_window_old_style", "gemma2", "gemma3",
         "olmo2", "olmo3", "gemma3_vision", "qwen3_vl", "mistral3", "qwen2_vl", "qwen2_5_vl", "seed_oss", "smollm3",
         "glm", "glm4", "ernie4_5", "cwm", "arcee", "ministral", "ministral3", "iquestcoder", "exaone4",
         "exaone4_whole", "mistral3_ministral3", "youtu", "internlm3")  # fmt: skip
LATENT = ("deepseek_v3", "deepseek_v3_yarn", "kimi_k2", "moonlight", "deepseek_v2", "deepseek_v2_lite",
          "glm4_moe_lite", "mistral4", "mistral3_mistral4", "deepseek_v32", "glm_moe_dsa",
          "sarvam_mla")  # fmt: skip
MOE = ("qwen2_moe", "qwen2_moe_window", "qwen2_moe_window_old_style", "qwen3_moe", "qwen3_moe_window", "mixtral",
       "glm4_moe", "glm4_moe_bf16", "gpt_oss", "qwen3_vl_moe", "glm4v_moe", "solar_open", "olmoe", "minimax_m2",
       "dots1", "mellum", "afmoe", "exaone_moe", "hy_v3", "sarvam_moe", *LATENT)  # fmt: skip
RECURRENT = ("nemotron_h", "nemotron_h_moe", "nemotron_h_latent", "qwen3_next", "qwen35_dense", "qwen35_moe",
             "qwen35_vision", "qwen35_moe_vision", "kimi_linear", "ling_3")  # fmt: skip
MOE += ("nemotron_h_moe", "nemotron_h_latent", "qwen3_next", "qwen35_moe", "qwen35_moe_vision", "kimi_linear", "ling_3")
DENSE += ("nemotron_h", "qwen35_dense", "qwen35_vision")
REWARD = ("llama_reward", "qwen3_reward")
SUPPORTED = DENSE + MOE + REWARD
# One case of each family; two where folders differ in their tensors.
FAMILIES = ("llama3", "qwen25_tied", "qwen3_yarn", "mistral_window", "phi4", "gemma2", "gemma3", "olmo2", "olmo3",
            "qwen2_moe_window", "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3_yarn", "kimi_k2",
            "deepseek_v2", "deepseek_v2_lite", "gemma3_vision", "qwen3_vl", "mistral3", "qwen3_vl_moe", "glm4v_moe",
            "qwen2_vl", "qwen2_5_vl", "seed_oss", "smollm3", "glm", "glm4", "ernie4_5", "glm4_moe_lite", "solar_open",
            "olmoe", "minimax_m2", "dots1", "cwm", "arcee", "ministral", "ministral3", "iquestcoder", "exaone4",
            "youtu", "mellum", "mistral4", "afmoe", "deepseek_v32", "exaone_moe", "hy_v3", "sarvam_moe",
            "sarvam_mla", "glm_moe_dsa", "internlm3",
            *(case for case in RECURRENT if case != "nemotron_h_moe"), *REWARD)  # fmt: skip
# One case of each kind of layer that the rollout engine runs.
GENERATED = ("llama3", "mistral_window", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3_yarn", "qwen2_vl",
             "nemotron_h_latent", "qwen3_next", "kimi_linear")  # fmt: skip
# Tokens of a rollout; with the prompt more than any case's attention window.
SHORT, LONG = 24, 64


class InLayout(NamedTuple):
    """What one rank found of a case."""

    difference: float  # largest, of log-probs or scores from the stored ones
    greedy: list[int] | None
    gap: float | None  # of the rollout's log-probs from the training forward


def role_of(folder: Path, flags: str, size: int, is_reward: bool, longest: int = 40):
    """RoleSettings of the actor, or of the reward role, of a folder; prompts have at most `longest` tokens."""
    program = "reward" if is_reward else "sft"
    argv = f"--hf-model {folder} --max-prompt-length {longest} --max-response-length 64 --global-batch-size 2 {flags}"
    (role,) = arguments.parse(argv.split(), size, program).roles.values()
    return role


def run_cases(
    rank: int, flags: str, folders: dict[str, Path], exports: Path, count: int, generating: Collection[str] = ()
) -> dict[str, InLayout]:
    """Each case imported, measured, and exported to a folder of its name in `exports`. A collective of the world.

    `count`: tokens that the rollout engine generates of the cases `generating`. The name of a case that is stored in
    another way has a `+` and what is other after it.
    """
    return {case: _run(case, folder, flags, exports / case, count if case in generating else 0)
            for case, folder in folders.items()}  # fmt: skip


_meshes = {}  # one set of groups for all cases of a kind, as programs have it


def build(folder: Path, flags: str, is_reward: bool, load: bool = True, longest: int = 40):
    """(RoleSettings, role groups, chunks, PretrainedWeights) of a folder's model; `load`: with its weights; `longest`:
    as of `role_of`."""
    from megarl.checkpoint.pretrained import find_pretrained
    from megarl.mcore.model import gpt

    size = dist.get_world_size()
    role = role_of(folder, flags, size, is_reward, longest)
    if is_reward not in _meshes:
        _meshes[is_reward] = role_mesh.create_mesh({role.name: role}, SAFETY)[role.name]
    groups = _meshes[is_reward]
    vocab_size = role.model_vocab_size(0)
    model = gpt.build_frozen_model(role.megatron, vocab_size, groups.pg_collection, is_reward)
    weights = find_pretrained(role, vocab_size, value_head=is_reward)
    if load:
        weights.load(model, groups.pg_collection)
    return role, groups, model, weights


def _run(case: str, folder: Path, flags: str, export: Path, count: int) -> InLayout:
    from megarl.mcore.weights.hf.folder_weights import export_weights

    stored = reference(case.partition("+")[0])
    is_reward = stored.scores is not None
    role, groups, model, weights = build(folder, flags, is_reward)
    export_weights(weights.weight_map, model, groups.pg_collection, export)
    vocab_size = role.model_vocab_size(0)
    if is_reward:
        return InLayout(float((scores(model, groups, stored.tokens) - stored.scores).abs().max()), None, None)
    rows = logprobs(model, groups, stored.tokens, vocab_size)
    difference = max(float((row - expected).abs().max()) for row, expected in zip(rows, stored.logprobs, strict=True))
    return InLayout(difference, *_greedy(case, model, groups, stored, vocab_size, count) if count else (None, None))


def logprobs(model, groups, sequences: list[list[int]], vocab_size: int) -> list[torch.Tensor]:
    """Log-probs of each sequence's tokens from the second on, by the training forward."""
    from megarl.mcore.model.forward_pass import token_scores
    from megarl.roles.passes import forward_only

    def forward(chunk, part):
        return token_scores(chunk, part.tokens, part.lengths, 1.0, vocab_size, part.routing)

    ((found, _),) = forward_only(model, one_microbatch(sequences), forward, groups.pg_collection)
    return [row[1:] for row in found.logprobs.split([len(row) for row in sequences])]


def scores(model, groups, sequences: list[list[int]]) -> torch.Tensor:
    """The scalar head at each sequence's last token."""
    from megarl.mcore.model.forward_pass import sequence_scores
    from megarl.roles.passes import forward_only

    def forward(chunk, part):
        return sequence_scores(chunk, part.tokens, part.lengths, part.routing)

    ((found, _),) = forward_only(model, one_microbatch(sequences), forward, groups.pg_collection)
    return found


def _greedy(case: str, model, groups, stored: Reference, vocab_size: int, count: int) -> tuple[list[int], float]:
    """The rollout's greedy continuation of the stored prompt, and its gap to the training forward.

    Two shorter prompts share its beginning, and no step has room for all three.
    """
    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest

    prompt = stored.prompt
    engine = RolloutEngine(
        model[0], groups.pg_collection, vocab_size, len(prompt) + count, 0.01, 4, prefix_caching=True,
        chunked_prefill=True, step_tokens=len(prompt) // 2,
    )  # fmt: skip
    requests = [GenerationRequest(prompt[:length], 0, count) for length in (len(prompt), len(prompt) // 2, 3)]
    completions = engine.generate(requests, (), SamplingSettings(greedy=True))
    sequences = [request.prompt + found.tokens for request, found in zip(requests, completions, strict=True)]
    rows = logprobs(model, groups, sequences, vocab_size)
    gaps = [
        (row[-len(found.tokens) :] - torch.tensor(found.logprobs)).abs().max()
        for row, found in zip(rows, completions, strict=True)
    ]
    return completions[0].tokens, float(max(gaps))
