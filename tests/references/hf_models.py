"""Records what transformers computes from small models of every family: writes hf_models/CASE.json for
tests/helpers/folders/hf_folders.py.

    python -m venv scratch && scratch/bin/pip install transformers==5.23.0 sentencepiece==0.2.3 torch safetensors
    PYTHONPATH=. scratch/bin/python tests/references/hf_models.py [CASE ...]

Run from the root of the repository, in a separate environment: the version of transformers is recorded.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from tests.helpers.folders import hf_folders
from tests.references import hf_model_configs
from tests.references.hf_model_configs import Case

PROMPT, NEW, PROMPTS = 8, 64, 128
FIRST_ID = 4  # those before it are special tokens
LEAST_MARGIN = 1e-3
# Weights and products in fp64 may change no log-prob by more, for comparisons within 1e-5; a unit of fp32 is 5e-7 here.
PRECISE = 6e-6


def parsed(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def load(model: type, folder: Path, dtype: torch.dtype | str = torch.float32):
    """The folder's model; every tensor of the folder is read, and every parameter filled."""
    loaded, report = model.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return loaded.eval()


def layout(case: Case, scratch: Path) -> dict[str, Any]:
    """Configurations and the list of tensors as `save_pretrained` writes them, in the order of a model that was read
    from a folder."""
    model = case.model._from_config(case.config, dtype=getattr(torch, case.dtype))
    if model.can_generate():
        model.generation_config.eos_token_id = case.end
    model.save_pretrained(folder := scratch / "saved")
    load(case.model, folder, "auto").save_pretrained(scratch / "again", max_shard_size=1)  # a file for each block
    places = parsed(scratch / "again" / "model.safetensors.index.json")["weight_map"]
    tensors = []
    blocks = {file: block for block, file in enumerate(sorted(set(places.values())))}
    for key, file in sorted(places.items(), key=lambda item: item[1]):
        with safe_open(scratch / "again" / file, "pt") as content:
            stored = content.get_slice(key)
            tensors.append([key, stored.get_dtype(), stored.get_shape(), blocks[file]])
    return {
        "transformers": transformers.__version__,
        "config": parsed(folder / "config.json"),
        "generation_config": parsed(folder / "generation_config.json"),
        "parameters": model.num_parameters(),
        "tensors": tensors,
    }


def next_logprobs(model, tokens: list[int]) -> torch.Tensor:
    """Log-probs of every token after each of the sequence's [n, vocabulary]."""
    logits = model(torch.tensor([tokens])).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def digits(tensor: torch.Tensor) -> list[float]:
    return [float(f"{number:.9g}") for number in tensor.tolist()]


def ids(name: str, shape: list[int], vocabulary: int) -> list[list[int]]:
    drawn = (hf_folders.uniform(name, shape).astype("float64") + 1) / 2
    return (FIRST_ID + drawn * (vocabulary - FIRST_ID)).astype(int).tolist()


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    difference = (found - exact).abs().max().item()
    assert difference < PRECISE, f"fp32 and fp64 differ by {difference}"


def continuations(model, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [prompts, NEW], and the least lead of the best token over the second [prompts]."""
    model.generation_config.eos_token_id = None  # else it fills the one below
    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NEW, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    made = model.generate(torch.tensor(prompts), generation_config=config)
    best = torch.stack(made.logits, dim=1).topk(2, dim=-1).values
    assert made.sequences.shape == (len(prompts), PROMPT + NEW)
    return made.sequences[:, PROMPT:], (best[..., 0] - best[..., 1]).amin(1)


def greedy(model, name: str, vocabulary: int) -> dict[str, Any]:
    """The continuation with the most different tokens, of several prompts, that no rounding changes."""
    prompts = ids(f"prompts of {name}", [PROMPTS, PROMPT], vocabulary)
    found, margins = continuations(model, prompts)
    stable = [number for number in range(PROMPTS) if margins[number] > 2 * LEAST_MARGIN]
    prompt = prompts[max(stable, key=lambda number: len(set(found[number].tolist())))]
    (tokens,), (margin,) = continuations(model, [prompt])
    assert margin > LEAST_MARGIN
    # The whole sequence at once gives what generation gave token by token.
    whole = next_logprobs(model, prompt + tokens.tolist())
    assert torch.equal(whole[PROMPT - 1 : -1].argmax(-1), tokens)
    return {"prompt": prompt, "greedy": tokens.tolist(), "margin": round(margin.item(), 6)}


def numbers(name: str, case: Case, folder: Path) -> dict[str, Any]:
    vocabulary = case.config.get_text_config().vocab_size
    model, exact = load(case.model, folder), load(case.model, folder, torch.float64)
    tokens = [ids(f"tokens {n} of {name}", [n], vocabulary) for n in case.lengths]
    if not model.can_generate():
        scores, precise = (torch.cat([m(torch.tensor([each])).logits[0] for each in tokens]) for m in (model, exact))
        close(scores, precise)
        return {"tokens": tokens, "scores": digits(scores)}
    logprobs = [next_logprobs(model, each) for each in tokens]
    for found, each in zip(logprobs, tokens, strict=True):
        close(found, next_logprobs(exact, each))
    taken = [found[range(len(each) - 1), each[1:]] for found, each in zip(logprobs, tokens, strict=True)]
    content = {"tokens": tokens, "logprobs": [digits(each) for each in taken], "last_logprobs": digits(logprobs[0][-1])}
    return content | greedy(model, name, vocabulary)


def record(name: str, case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        content = layout(case, Path(scratch))
        content["weights_hash"] = hf_folders.hash_of(hf_folders.weights_of(content))
        return content | numbers(name, case, hf_folders.write(content, Path(scratch) / "drawn"))


def as_before(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration in the fields of transformers 4."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype", "layer_types")}
    rope = dict(config["rope_parameters"])
    old |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config["dtype"], "transformers_version": "4.44.0"}
    kind = rope.pop("rope_type")
    if kind == "default":
        return old | {"rope_scaling": None}
    return old | {"rope_scaling": rope | {"rope_type" if kind == "llama3" else "type": kind}}


def record_old_style(same_as: str, fields: dict[str, Any], case: Case) -> dict[str, Any]:
    content = hf_folders.stored(same_as)
    config = as_before(content["config"]) | fields
    known = content | {"config": config | {"model_type": case.config.model_type}}  # transformers lacks that of Kimi-K2
    with tempfile.TemporaryDirectory() as scratch:
        model = load(case.model, hf_folders.write(known, Path(scratch) / "drawn"))
    for tokens, logprobs in zip(content["tokens"], content["logprobs"], strict=True):
        found = next_logprobs(model, tokens)[range(len(tokens) - 1), tokens[1:]]
        assert digits(found) == logprobs
    return {"same_as": same_as, "config": config}


def write(name: str, content: dict[str, Any]) -> None:
    """One line for each entry, and for each tensor."""
    lines = [f'"{key}": {json.dumps(value)}' for key, value in content.items() if key != "tensors"]
    if "tensors" in content:
        listed = ",\n".join(json.dumps(each) for each in content["tensors"])
        lines.append(f'"tensors": [\n{listed}\n]')
    (hf_folders.STORED / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


@torch.no_grad()
def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    cases = hf_model_configs.basic() | hf_model_configs.further() | hf_model_configs.recurrent()
    for name, case in cases.items():
        if not names or name in names:
            write(name, content := record(name, case))
            print(name, content.get("margin"), sorted(content.get("last_logprobs") or content["scores"])[::16])
    for name, (same_as, fields) in hf_model_configs.old_style().items():
        if not names or name in names:
            write(name, record_old_style(same_as, fields, cases[same_as]))


if __name__ == "__main__":
    main(sys.argv[1:])
