"""A command line becomes settings of roles; what Megatron has and nothing uses is refused."""

import pytest
import torch

from megarl.arguments import Settings, parse
from megarl.errors import UsageError
from megarl.flags.role_flags import ROLES
from tests.helpers.flag_rules import MODEL, refused

# -- flags and roles ---------------------------------------------------------------------------------------------


def test_defaults():
    program = parse(MODEL, 4)
    assert program.settings == Settings() and program.check is False
    assert tuple(program.roles) == tuple(role for role in ROLES if role != "teacher")
    for name, role in program.roles.items():
        assert role.name == name and role.ranks == range(4)
        assert role.megatron.num_layers == 2 and role.megatron.params_dtype == torch.float32
        assert role.megatron.seq_length == 1024 and role.megatron.train_iters == 100 and role.megatron.seed == 1


def test_a_role_prefix_overrides_the_common_flag_in_any_order():
    flags = ["--critic-lr", "1e-3", "--lr", "2e-3", "--actor-tensor-model-parallel-size=2", "--reward-num-layers", "4",
             "--reward", "model", "--reward-model", "runs/reward"]  # fmt: skip
    roles = parse(MODEL + flags, 4).roles
    assert {name: role.megatron.lr for name, role in roles.items()} == {
        "actor": 2e-3, "critic": 1e-3, "reward": 2e-3, "reference": 2e-3, "rollout": 2e-3,
    }  # fmt: skip
    assert roles["actor"].megatron.tensor_model_parallel_size == 2
    assert roles["critic"].megatron.tensor_model_parallel_size == 1
    assert [roles[r].megatron.num_layers for r in roles] == [2, 2, 4, 2, 2]


def test_roles_have_the_sizes_of_the_role_map():
    roles = parse(MODEL + ["--role-map", "actor=0-1;critic=2;reward=3;reference=3"], 4).roles
    assert {name: role.ranks for name, role in roles.items()} == {
        "actor": range(2), "critic": range(2, 3), "reward": range(3, 4), "reference": range(3, 4), "rollout": range(2),
    }  # fmt: skip
    assert [roles[r].megatron.data_parallel_size for r in roles] == [2, 1, 1, 1, 2]


def test_megarls_own_settings_reach_every_role():
    flags = ["--seed", "7", "--train-iters", "9", "--max-prompt-length", "5", "--max-response-length", "6"]
    for role in parse(MODEL + flags, 4).roles.values():
        assert (role.megatron.seed, role.megatron.train_iters, role.megatron.seq_length) == (7, 9, 11)
        assert role.megatron.max_position_embeddings == 11


def test_fine_tuning_has_only_the_actor():
    program = parse([*MODEL, "--actor-lr", "1e-3", "--global-batch-size", "8"], 2, "sft")
    assert list(program.roles) == ["actor"]
    assert program.roles["actor"].megatron.lr == 1e-3 and program.roles["actor"].megatron.global_batch_size == 8
    assert "--critic-lr" in refused(["--critic-lr", "1e-3"], program="sft")
    assert "--clip-range" in refused(["--clip-range", "0.1"], program="sft")
    assert "--global-batch-size" in refused(["--global-batch-size", "8"], program="rl")


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag, value", [
    ("--data-path", "x"), ("--seq-length", "8"), ("--critic-seed", "2"), ("--critic-train-iters", "2"),
    ("--critic-save", "x"), ("--tensorboard-dir", "x"), ("--lr-warmup-samples", "3"), ("--wandb-project", "x"),
])  # fmt: skip
def test_megatron_flags_that_nothing_uses_are_rejected(flag, value):
    message = refused([flag, value])
    assert "does not use" in message and flag.removeprefix("--critic").lstrip("-") in message


@pytest.mark.parametrize("argv", [
    ["--attention-backend", "sdpa", "--softmax-type", "off-by-one"], ["--attention-dropout", "0.1"],
    ["--hidden-dropout", "0.1"], ["--transformer-impl", "transformer_engine"],
    ["--fp8-format", "hybrid"], ["--multi-latent-attention"], ["--optimizer", "lion"],
    ["--position-embedding-type", "mrope"], ["--moe-router-fusion"], ["--moe-enable-routing-replay"],
    ["--moe-input-jitter-eps", "0.1"], ["--moe-expert-capacity-factor", "1"], ["--moe-router-force-biased", "1"],
    ["--moe-expert-rank-capacity-factor", "1"], ["--moe-router-force-load-balancing"],
])  # fmt: skip
def test_unsupported_features_are_rejected(argv):
    assert argv[0].removesuffix("-format") in refused(argv)


@pytest.mark.parametrize("flags, says", [
    ("--attention-backend flash", "--attention-backend flash: allowed are auto, eager, invariant, sdpa, varlen"),
    ("--moe-router-fusion", "bypasses recording and replay"),
    ("--moe-enable-routing-replay", "--router-replay says which"),
])  # fmt: skip
def test_the_error_of_a_feature_gives_the_reason(flags, says):
    assert says in refused(flags.split())


def test_balancing_losses_are_one_or_a_list():
    def given(kinds, weights):
        argv = ["--num-experts", "4", "--moe-router-load-balancing-type", *kinds, "--moe-aux-loss-coeff", *weights]
        args = parse([*MODEL, *argv], 1).roles["actor"].megatron
        return args.moe_router_load_balancing_type, args.moe_aux_loss_coeff

    kinds = ["seq_aux_loss", "global_aux_loss"]
    assert given(kinds[:1], ["0.1"]) == ("seq_aux_loss", 0.1)
    assert given(kinds, ["0.1", "2"]) == (kinds, [0.1, 2.0])


@pytest.mark.parametrize("argv, says", [
    (["--num-attention-heads", "3", "--tensor-model-parallel-size", "2"], ["--num-attention-heads 3", "size 2"]),
    (["--actor-tensor-model-parallel-size", "4", "--num-attention-heads", "12", "--num-query-groups", "6",
      "--kv-channels", "16"], ["actor", "--num-query-groups 6", "size 4"]),
    (["--tensor-model-parallel-size", "3"], ["--tensor-model-parallel-size 3", "4 rank(s)"]),
    (["--tensor-model-parallel-size", "0"], ["--tensor-model-parallel-size 0"]),
    (["--num-query-groups", "3"], ["--num-query-groups 3"]),
    (["--hidden-size", "65"], ["--hidden-size 65"]),
])  # fmt: skip
def test_shapes_that_do_not_divide_are_rejected(argv, says):
    message = refused(argv)
    assert all(part in message for part in says), message


@pytest.mark.parametrize("missing", ["--num-layers", "--hidden-size", "--num-attention-heads"])
def test_the_model_shape_has_no_default(missing):
    place = MODEL.index(missing)
    with pytest.raises(UsageError, match=f"{missing} is missing"):
        parse(MODEL[:place] + MODEL[place + 2 :], 1)


def test_an_error_names_only_the_role_that_is_wrong():
    assert refused(["--critic-num-attention-heads", "3"]).startswith("critic:")
