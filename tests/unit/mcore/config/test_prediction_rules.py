"""Rules on multi-token prediction: each is broken by a case, which one line refuses before any work."""

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from tests.helpers import hf_folders
from tests.helpers.hf_damage import config, in_order, tensors
from tests.helpers.hf_prediction import add_layer, with_prediction
from tests.helpers.tiny_models import LENGTHS, SHAPES

SHAPE = f"{SHAPES['llama']} {LENGTHS} --lr 1e-3 --advantage grpo --kl-coefficient 0 --reward length"
EP2 = "--num-experts 4 --expert-model-parallel-size 2"
# A case: its flags, and words of the line.
WRONG = {
    "stages": ("--mtp-train --pipeline-model-parallel-size 2",
               "with --mtp-train allowed is 1: the layer reads the embedding and the last hidden states"),
    "sharded": ("--mtp-train --use-torch-fsdp2", "--use-torch-fsdp2 True: with --mtp-train allowed is none"),
    "post-norm": ("--mtp-train --layernorm-position post", "--layernorm-position post: with --mtp-train allowed is"),
    "window": ("--mtp-train --window-size 3,0", "with --mtp-train allowed is none"),
    "factors": ("--mtp-train --lora-rank 2", "--mtp-train: not yet with --lora-rank 2"),
    "nothing trained": ("--mtp-drafts", "--mtp-drafts: nothing has trained the layer; give --mtp-train, or"),
    "nothing trains": ("--mtp-drafts --debug-rollout-only", "--mtp-drafts: not with --debug-rollout-only"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_the_layer_does_not_allow_is_refused(case):
    flags, needle = WRONG[case]
    with pytest.raises(UsageError) as caught:
        parse(f"{SHAPE} {flags}".split(), 2, "rl")
    assert needle in str(caught.value) and "\n" not in str(caught.value)


def test_experts_may_be_on_several_ranks():
    assert parse(f"{SHAPE} --mtp-train --mtp-drafts {EP2}".split(), 2, "rl").roles["actor"].megatron.predicts


def test_folders_need_just_one_layer(tmp_path):
    folder = hf_folders.write_folder("glm4_moe", tmp_path / "hf")
    flags = f"{LENGTHS} --lr 1e-3 --advantage grpo --kl-coefficient 0 --reward length --mtp-drafts --hf-model {folder}"
    with pytest.raises(UsageError, match="has no tensors of multi-token prediction, which --mtp-drafts needs"):
        parse(flags.split(), 1, "rl")
    with_prediction(folder)
    assert parse(flags.split(), 1, "rl").roles["rollout"].megatron.predicts
    in_order(tensors(add_layer), config(num_nextn_predict_layers=2))(folder)
    with pytest.raises(UsageError, match="has 2 layers of multi-token prediction; --mtp-drafts allows 1"):
        parse(flags.split(), 1, "rl")


def test_a_layer_that_is_only_carried_is_not_computed(tmp_path):
    folder = hf_folders.write_folder("hy_v3", tmp_path / "hf")
    with_prediction(folder)
    flags = f"{LENGTHS} --lr 1e-3 --advantage grpo --kl-coefficient 0 --reward length --mtp-train --hf-model {folder}"
    with pytest.raises(UsageError, match="has a layer of multi-token prediction that exports keep and --mtp-train"):
        parse(flags.split(), 1, "rl")
