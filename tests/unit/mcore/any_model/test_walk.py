"""What modules of transformers do on a GPU besides megarl's own, and what a pass over text does not reach, against the
gradients of transformers' own backward: it is frozen."""

import pytest
import torch
from safetensors.torch import load_file

from megarl.mcore.any_model import source, walk
from megarl.mcore.config.optimizer_flags import matches
from tests.helpers.folders import any_types
from tests.helpers.programs import train, write_lines
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

# Type -> whether the host waits within a pass; what keeps it from an exact rollout.
KINDS = {
    "granite": (False, None),
    "ernie4_5_moe": (False, None),
    "longcat_flash": (True, "LongcatFlashForCausalLM asks for numbers"),
    "llama4_text": (False, "Llama4TextExperts computes bmm of 96 terms itself"),
    "bamba": (False, "BambaForCausalLM computes recurrences by chunks of tokens"),  # with norms that read a gate
    "cohere2": (False, "Cohere2LayerNorm computes mean of 64 terms itself"),
    "gpt2": (False, None),
    "modernbert-decoder": (False, "LayerNorm computes native_layer_norm of 64 terms itself"),
}


@pytest.mark.parametrize(
    "kind", by_default(KINDS, ("ernie4_5_moe", "longcat_flash", "llama4_text", "bamba", "cohere2"))
)
def test_waits_and_sums_of_a_type_are_found(kind):
    waits, inexact = KINDS[kind]
    model = source.of_config(any_types.small_config(kind))
    alone = walk.walk(model.module(torch.bfloat16))
    assert (alone.waits is not None) == waits and (waits or alone.sums)  # of norms, until they have kernels
    problem = walk.inexact_part(model)
    assert problem is None if inexact is None else problem.startswith(inexact)


class Copies(torch.nn.Module):
    """Makes a tensor of a number within a pass."""

    def forward(self, hidden):
        return hidden * torch.tensor([2])


def test_a_number_of_the_host_that_a_pass_copies_is_found():
    module = source.of_config(any_types.small_config("granite")).module(torch.float32)
    module.model.norm = Copies()
    assert walk.walk(module).waits == "Copies copies numbers of the host to it"


# -- what a text reaches -----------------------------------------------------------------------------------------------

# A tower beside the language model; attention to an encoder; a parameter of its own; a bias that is excluded.
PARTLY_READ = "gemma3", "whisper", "hrm_text", "afmoe"
# All layers but the head are transformers' `Conv1D`, which gets no factors.
WITHOUT_LINEARS = "gpt2", "gpt-sw3"
# A recurrence of megarl's, whose weights no operator of torch reads in the first pass.
DEFAULT = *PARTLY_READ[:2], "mamba2"


def read_and_trained(_, kind: str) -> tuple[walk.Reach, list[str], set[str]]:
    """What a pass reads; names of parameters, and of those without a gradient of transformers' own backward."""
    module, config = any_types.small_module(kind), any_types.small_config(kind)
    tokens = torch.randint(3, any_types.VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    module(input_ids=tokens, use_cache=False).logits.sum().backward()
    parameters = dict(module.named_parameters())
    unread = {name for name, each in parameters.items() if each.grad is None}
    return walk.reach(source.of_config(config).module(torch.float32))._replace(module=None), [*parameters], unread


@pytest.mark.parametrize("kind", by_default([*any_types.running()], DEFAULT))
def test_what_a_pass_does_not_read_has_no_gradient(kind):
    ((found, names, unread),) = run_world(read_and_trained, 1, kind)
    assert len(names) > 10 and {name for name in names if matches(name, found.untrained)} == unread
    assert unread or kind not in PARTLY_READ
    assert (not found.linears) == (kind in WITHOUT_LINEARS)
    assert not {f"{name}.weight" for name in found.linears} & unread  # factors would learn nothing
    if kind == "gemma3":  # whole parts
        assert set(found.untrained) == {"model.vision_tower.*", "model.multi_modal_projector.*"}


# Experts of transformers' interface; single matrices of a part's own; all of them at once for each token.
EXPERTS = {"olmoe": {(4, 2)}, "jetmoe": {(4, 2)}, "longcat_flash": {(4, 2)}, "llama4_text": set()}


@pytest.mark.parametrize("kind", EXPERTS)
def test_how_many_experts_a_token_uses(kind):
    module = source.of_config(any_types.small_config(kind)).module(torch.float32)
    found = walk.reach(module).experts
    owners = {name.rpartition(".")[0] for name, each in module.named_parameters() if each.dim() == 3}
    assert set(found.values()) == EXPERTS[kind] and (not found or found.keys() == owners)


@pytest.mark.parametrize("kind", by_default(["whisper", "phi4_multimodal", "gemma3"], ["whisper"]))
def test_no_weight_decay_changes_what_no_text_reaches(kind, tmp_path):
    run_world(lambda _: any_types.save(kind, tmp_path / kind) and None, 1)
    prompts = write_lines(tmp_path / "train.jsonl", [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)])
    flags = "--max-prompt-length 48 --max-response-length 4 --global-batch-size 8 --lr 1e-3 --weight-decay 0.5"
    flags += f" --model-source transformers --train-iters 2 --export-hf --hf-model {tmp_path / kind}"
    train("sft", [*flags.split(), "--prompts", str(prompts), "--save", str(tmp_path / "run")])
    ((_, names, unread),) = run_world(read_and_trained, 1, kind)
    before, after = (load_file(folder / "model.safetensors")
                     for folder in (tmp_path / kind, tmp_path / "run" / "hf" / "step_00000002"))  # fmt: skip
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and len(names) > len(unread) > 0
    assert same & {*names} == unread
