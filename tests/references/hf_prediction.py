"""Records what transformers computes from layers of multi-token prediction: writes hf_prediction.json for
tests/unit/mcore/model/test_prediction_layer.py.

    PYTHONPATH=. python tests/references/hf_prediction.py

Run from the root of the repository: the version of transformers is recorded. Its `MtpModel` knows where DeepSeek-V3 and
GLM-4.5 have their layer after the last. For Qwen3-Next, whose layer it does not load, the same class gets the family's
own layer and norm.
"""

import json
import re
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.helpers.folders.hf_damage import SINGLE
from tests.helpers.folders.hf_prediction import MODULE, ROWS, STORED, of_case

OF_MODULE = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "post_norm"}


def prediction_model(model, folder: Path) -> MtpModel:
    """The prediction layer of a folder, beside its model."""
    if model.config.model_type not in MODULE:
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
        return MtpModel.from_pretrained(model).eval()
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    found = MtpModel(model, 1).eval()
    own = {}
    for name, tensor in load_file(folder / SINGLE).items():
        if match := re.fullmatch(r"mtp\.(?:layers\.0\.(?P<layer>.+)|(?P<other>\w+)\.weight)", name):
            other = match["other"] and f"{OF_MODULE[match['other']]}.weight"
            own["layers.0." + (other or f"mtp_block.{match['layer']}")] = tensor
    left = found.load_state_dict(fused_experts(own), strict=False)
    assert not left.unexpected_keys and not [name for name in left.missing_keys if name.startswith("layers.0.")], left
    return found


def fused_experts(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers 5 has them in memory: one tensor for all of them."""
    prefix, gates = "layers.0.mtp_block.mlp.experts.", {}
    count = len({name for name in held if re.fullmatch(rf"{re.escape(prefix)}\d+\.gate_proj\.weight", name)})
    for i in range(count):
        parts = [held.pop(f"{prefix}{i}.{name}_proj.weight") for name in ("gate", "up", "down")]
        gates[i] = torch.cat(parts[:2]), parts[2]
    if gates:
        held[f"{prefix}gate_up_proj"] = torch.stack([gates[i][0] for i in range(count)])
        held[f"{prefix}down_proj"] = torch.stack([gates[i][1] for i in range(count)])
    return held


@torch.no_grad()
def logprobs(model, prediction: MtpModel, row: list[int]) -> list[float]:
    """Of the tokens from the third on, from the hidden states of all before."""
    hidden = model(torch.tensor([row]), output_hidden_states=True).hidden_states[-1]
    count, cache = len(row) - 1, MtpCache(config=prediction.config)
    positions, following = torch.arange(1, count + 1).unsqueeze(0), torch.tensor([row[1:]])
    states = prediction.forward_layer(0, hidden[:, :count], positions, cache, input_ids=following)
    scores = prediction._project_to_logits(states)[0].double().log_softmax(-1)
    return scores[:-1].gather(1, torch.tensor(row[2:]).unsqueeze(1)).squeeze(1).tolist()


def main():
    found: dict = {"transformers": transformers.__version__}
    for case in ("deepseek_v3", "glm4_moe", "qwen3_next"):
        with tempfile.TemporaryDirectory() as scratch:
            folder = of_case(case, Path(scratch) / case)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            ).eval()
            prediction = prediction_model(model, folder)
            found[case] = [[round(x, 8) for x in logprobs(model, prediction, row)] for row in ROWS]
    STORED.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
