"""Flags of single roles: role maps, token caps, and settings that the rollout inherits from the actor."""

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.flags.role_flags import named_roles, parse_role_map, with_prefix
from megarl.mcore.config import optimizer_flags
from megarl.planning.parameters import frozen_total, layout_free_names
from tests.helpers.flag_rules import parsed, refused
from tests.helpers.folders import any_types
from tests.helpers.worlds import run_world

TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))


def roles_of(flags: str, size: int = 4, program: str = "rl"):
    return parsed(flags, program, size).roles


# -- role maps ---------------------------------------------------------------------------------------------------


def test_role_maps_may_be_disjoint_equal_or_overlapping():
    two = ("actor", "critic")
    assert parse_role_map(None, 3, two) == {"actor": range(3), "critic": range(3)}
    assert parse_role_map("actor=0-1;critic=2", 3, two) == {"actor": range(2), "critic": range(2, 3)}
    assert parse_role_map(" critic=0-2 ; actor=1-2; ", 3, two) == {"critic": range(3), "actor": range(1, 3)}


@pytest.mark.parametrize("text, says", [
    ("actor=0-9;critic=0", "rank 9 of actor is outside the world; allowed 0-3"),
    ("actor=4;critic=0", "outside the world"),
    ("actor=0", "no ranks for critic"),
    ("", "no ranks for actor, critic"),
    ("actor=0;critic=1;judge=2", "'judge' is no role"),
    ("actor=0;actor=1;critic=1", "'actor' appears twice"),
    ("actor=1-0;critic=1", "'actor=1-0' is not of the form"),
    ("actor=;critic=1", "'actor=' is not of the form"),
    ("actor;critic=1", "'actor' is not of the form"),
    ("actor=a-b;critic=1", "is not of the form"),
    ("actor=0-1-2;critic=1", "is not of the form"),
    ("actor=-1;critic=1", "is not of the form"),
    ("actor=0,1;critic=1", "is not of the form"),
    ("=0;critic=1", "is no role"),
])  # fmt: skip
def test_wrong_role_maps_are_rejected(text, says):
    with pytest.raises(UsageError) as caught:
        parse_role_map(text, 4, ("actor", "critic"))
    assert says in str(caught.value) and "--role-map" in str(caught.value) and "\n" not in str(caught.value)


def test_a_role_map_may_name_nodes():
    two = ("actor", "critic")
    found = parse_role_map("actor=nodes 0-1;critic=node 2", 24, two, ranks_per_node=8)
    assert found == {"actor": range(16), "critic": range(16, 24)}
    assert parse_role_map("actor=nodes  1;critic=3", 4, two, ranks_per_node=2) == {
        "actor": range(2, 4),
        "critic": range(3, 4),
    }
    assert parse_role_map("actor=node 0;critic=2", 3, two) == {"actor": range(3), "critic": range(2, 3)}


@pytest.mark.parametrize("text, per_node, says", [
    ("actor=nodes 0-2;critic=0", 2, "'actor=nodes 0-2' is outside the world; allowed are nodes 0-1 (2 ranks each)"),
    ("actor=node 1;critic=0", None, "'actor=node 1' is outside the world; allowed are nodes 0-0 (4 ranks each)"),
    ("actor=node 0;critic=0", 3, "4 ranks are no whole number of nodes with 3 ranks each"),
    ("actor=nodes 1-0;critic=0", 2, "'actor=nodes 1-0' is not of the form"),
    ("actor=node;critic=0", 2, "'actor=node' is not of the form"), ("actor=node0;critic=0", 2, "not of the form"),
    ("actor=0-1;critic=racks 0", 2, "'critic=racks 0' is not of the form role=first-last, role=rank, role=nodes"),
])  # fmt: skip
def test_wrong_nodes_of_a_role_map_are_rejected(text, per_node, says):
    with pytest.raises(UsageError) as caught:
        parse_role_map(text, 4, ("actor", "critic"), ranks_per_node=per_node)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_absent_role_gets_no_ranks():
    with pytest.raises(UsageError, match="^--role-map 'actor=0;critic=1': 'critic' has nothing to do: why; leave it"):
        parse_role_map("actor=0;critic=1", 2, ("actor",), {"critic": "why"})
    assert parse_role_map("actor=0", 2, ("actor",), {"critic": "why"}) == {"actor": range(1)}


@pytest.mark.parametrize("text, expected", [
    (None, {""}), ("actor=0; critic =1;reference", {"actor", "critic", "reference"}),
])  # fmt: skip
def test_the_roles_named_by_a_map(text, expected):
    assert named_roles(text) == expected


def test_options_with_the_prefix_of_a_role():
    tokens = ["--critic-lr", "--critic-lr-is-a-value", "--critic-wd=3", "--lr", "--actor-lr", "-3", "--critic-known"]
    found = with_prefix(tokens, ["critic", "reference"], {"--critic-known": "x"})
    assert found == {"--critic-lr": "critic", "--critic-lr-is-a-value": "critic", "--critic-wd": "critic"}


def test_the_rollout_has_its_own_ranks_or_the_actors():
    names = ("actor", "critic", "rollout")
    assert parse_role_map(None, 2, names) == {name: range(2) for name in names}
    assert parse_role_map("actor=0-1;critic=2", 3, names)["rollout"] == range(2)
    assert parse_role_map("rollout=2;actor=0-1;critic=2", 3, names)["rollout"] == range(2, 3)
    with pytest.raises(UsageError, match="'rollout' is no role"):
        parse_role_map("actor=0;rollout=1", 2, ("actor",))


# -- caps of micro-batches ---------------------------------------------------------------------------------------


def caps(roles) -> dict:
    return {name: role.max_tokens_per_microbatch for name, role in roles.items()}


def test_a_role_may_have_its_own_token_cap(tmp_path):
    common = caps(roles_of(""))
    assert set(common.values()) == {16384}
    flags = "--critic-max-tokens-per-microbatch 4096 --max-tokens-per-microbatch=8192"
    expected = {name: 4096 if name == "critic" else 8192 for name in common}
    assert caps(roles_of(flags)) == expected
    (tmp_path / "c.yaml").write_text("critic-max-tokens-per-microbatch: 9\nmax-tokens-per-microbatch: 8192\n")
    config = f"--config {tmp_path}/c.yaml"
    assert caps(roles_of(config)) == expected | {"critic": 9}
    assert caps(roles_of(f"{config} --critic-max-tokens-per-microbatch 4096")) == expected
    assert caps(roles_of("--actor-max-tokens-per-microbatch 7", program="sft")) == {"actor": 7}


@pytest.mark.parametrize("flags, program, says", [
    ("--critic-max-tokens-per-microbatch 0", "rl", "--critic-max-tokens-per-microbatch 0: allowed is a number above 0"),
    ("--critic-max-tokens-per-microbatch many", "rl", "--critic-max-tokens-per-microbatch"),
    ("--rollout-max-tokens-per-microbatch 9", "rl", "unknown flag"),
    ("--critic-max-tokens-per-microbatch 9", "sft", "unknown flag"),
    ("--critic-max-tokens-per-microbtch 9", "rl", "did you mean --critic-max-tokens-per-microbatch?"),
])  # fmt: skip
def test_wrong_caps_are_rejected(flags, program, says):
    assert says in refused(flags, program=program)


@pytest.mark.parametrize("flags, expected", [
    ("", 1), (f"{PP} 2", 1), (f"{PP} 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4", 2),
])  # fmt: skip
def test_virtual_stages_need_a_multiple_of_the_pipeline(flags, expected):
    assert roles_of(flags)["critic"].microbatch_multiple == expected


def test_roles_have_their_own_tokenizers_templates_and_offload():
    reward_model = (
        "--reward model --reward-model x --reward-tokenizer-type HuggingFaceTokenizer --reward-chat-template none"
    )
    roles = roles_of(f"{reward_model} --tokenizer-model y --chat-template z --offload --critic-offload false")
    found = {name: (role.tokenizer_type[:4], role.tokenizer_model, role.chat_template, role.offload, role.has_model)
             for name, role in roles.items() if name in ("actor", "critic", "reward")}  # fmt: skip
    assert found == {"actor": ("Sent", "y", "z", True, True), "critic": ("Sent", "y", "z", False, True),
                     "reward": ("Hugg", "y", "none", True, True)}  # fmt: skip
    assert not roles_of("")["reward"].has_model
    assert refused("--critic-use-torch-fsdp2 --critic-offload").startswith("--critic-offload: not allowed with --use-t")


NEITHER = "neither model nor judge"


@pytest.mark.parametrize("flag, missing", [
    ("--reward-num-layers 3", NEITHER), ("--reward-offload", NEITHER), ("--reward-tokenizer-model x", NEITHER),
    ("--reward-max-tokens-per-microbatch 9", "no model"),
])  # fmt: skip
def test_a_reward_role_of_verifiers_has_no_model_to_describe(flag, missing):
    program = parsed(flag)
    assert program.warnings == (f"without effect: {flag.split()[0]} (--reward exact-match has {missing})",)
    plain = roles_of("")["reward"]
    assert vars(program.roles["reward"]) | {"megatron": None} == vars(plain) | {"megatron": None}
    assert vars(program.roles["reward"].megatron) == vars(plain.megatron)
    assert roles_of("--reward-tensor-model-parallel-size 2")["reward"].megatron.data_parallel_size == 2


# -- rollout -----------------------------------------------------------------------------------------------------


def layout(role) -> tuple:
    args = role.megatron
    return (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size,
            args.data_parallel_size)  # fmt: skip


VIRTUAL = f"--actor{PP[1:]} 2 --actor-num-layers-per-virtual-pipeline-stage 1 --actor-num-layers 4"
SHARDED = "--actor-use-torch-fsdp2 --actor-untie-embeddings-and-output-weights"


@pytest.mark.parametrize("flags, model_role, expected", [
    ("", "actor", (1, 1, 1, 4)),
    (f"{TP} 2", "actor", (2, 1, 1, 2)),
    (f"--actor{TP[1:]} 2", "actor", (2, 1, 1, 2)),
    (f"--actor{PP[1:]} 2", "actor", (1, 2, 1, 2)),
    (f"{CP} 2", "actor", (1, 1, 1, 4)),  # context ranks are more replicas
    (f"{TP} 2 --actor{CP[1:]} 2", "actor", (2, 1, 1, 2)),
    (f"{TP} 2 --actor-sequence-parallel", "actor", (2, 1, 1, 2)),
    ("--use-distributed-optimizer --overlap-grad-reduce", "actor", (1, 1, 1, 4)),
    (f"--actor{TP[1:]} 2 --rollout{TP[1:]} 2", "actor", (2, 1, 1, 2)),
    (f"--actor{TP[1:]} 2 --rollout{TP[1:]} 1", "rollout", (1, 1, 1, 4)),
    (f"--rollout{PP[1:]}=2", "rollout", (1, 2, 1, 2)),
    (VIRTUAL, "rollout", (1, 2, 1, 2)),
    (f"{VIRTUAL} --rollout{PP[1:]} 1", "rollout", (1, 1, 1, 4)),
    (SHARDED, "rollout", (1, 1, 1, 4)),
    ("--role-map actor=0-1;critic=0;reward=0;reference=0;rollout=2-3", "rollout", (1, 1, 1, 2)),
    ("--role-map actor=0-1;critic=0;reward=0;reference=0;rollout=0-1", "actor", (1, 1, 1, 2)),
    ("--role-map actor=0-1;critic=0;reward=0;reference=0", "actor", (1, 1, 1, 2)),
])  # fmt: skip
def test_the_rollout_shares_the_actors_module_unless_its_layout_differs(flags, model_role, expected):
    roles = roles_of(flags)
    rollout = roles["rollout"]
    assert (rollout.model_role, layout(rollout)) == (model_role, expected)
    assert all(role.model_role == name for name, role in roles.items() if name != "rollout")
    args = rollout.megatron
    assert not (args.use_torch_fsdp2 or args.use_distributed_optimizer or args.sequence_parallel)
    assert args.virtual_pipeline_model_parallel_size is None
    assert args.num_layers == roles["actor"].megatron.num_layers


def test_the_rollout_has_the_actors_shape_not_the_critics():
    roles = roles_of("--actor-num-layers 3 --critic-num-layers 5 --actor-qk-layernorm")
    assert roles["rollout"].megatron.num_layers == 3 and roles["rollout"].megatron.qk_layernorm


def test_the_rollout_uses_the_actors_uneven_stages_unless_it_has_others():
    uneven = f"--num-layers 3 --actor{PP[1:]} 2 --actor-decoder-first-pipeline-num-layers 1"
    assert roles_of(uneven)["rollout"].megatron.decoder_first_pipeline_num_layers == 1
    other = roles_of(f"{uneven} --rollout{PP[1:]} 1")["rollout"]
    assert other.megatron.decoder_first_pipeline_num_layers is None and other.model_role == "rollout"


@pytest.mark.parametrize("flags, says", [
    ("--rollout-lr 1", ["--rollout-lr", "the actor's model", "--rollout-tensor-model-parallel-size"]),
    ("--rollout-num-layers 4", ["--rollout-num-layers", "the actor's model"]),
    (f"--rollout{CP[1:]} 2", [f"--rollout{CP[1:]}", "allowed with this prefix"]),
    ("--rollout-use-torch-fsdp2", ["--rollout-use-torch-fsdp2"]),
    ("--rollout-no-such-flag 1", ["--rollout-no-such-flag", "unknown flag"]),
    (f"--rollout{TP[1:]} 3", ["rollout", f"{TP} 3", "4 rank(s)"]),
    ("--rollout-buffer-gb 0", ["--rollout-buffer-gb 0.0"]),
])  # fmt: skip
def test_wrong_rollout_flags_are_rejected(flags, says):
    message = refused(flags)
    assert all(part in message for part in says), message


def test_fine_tuning_has_no_rollout():
    assert "unknown flag" in refused(f"--rollout{TP[1:]} 2", program="sft")


# -- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, program, says", [
    ("--reference-lr 1", "rl", "--reference-lr: the reference is not trained"),
    ("--reward-clip-grad 1", "rl", "--reward-clip-grad: the reward is not trained"),
    ("--lr 1", "evaluate", "--lr: this program does not train"),
    ("--use-distributed-optimizer", "evaluate", "--use-distributed-optimizer: this program does not train"),
    ("--actor-lr-warmup-iters=2", "evaluate", "--actor-lr-warmup-iters: the actor is not trained"),
])  # fmt: skip
def test_training_flags_apply_to_trained_roles_only(flags, program, says):
    assert says in refused(flags, program=program)


def test_flags_that_every_model_reads_are_not_training_flags():
    flags = "--reference-use-torch-fsdp2 --reference-bf16 --reference-tensor-model-parallel-size 1 --critic-lr 1 --lr 2"
    assert roles_of(flags)["reference"].megatron.use_torch_fsdp2


def test_what_no_text_reaches_in_a_module_of_transformers_is_not_trained(tmp_path):
    run_world(lambda _: any_types.save("gemma3", tmp_path / "gemma3") and None, 1)
    argv = f"--hf-model {tmp_path / 'gemma3'} --model-source transformers --max-prompt-length 8 --max-response-length 8"

    def frozen(flags: str = "") -> tuple[set[str], int]:
        args = parse(f"{argv} --advantage grpo {flags}".split(), 1, "rl").roles["actor"].megatron
        names = {name for name in layout_free_names(args, False) if optimizer_flags.is_frozen(args, name)}
        return names, frozen_total(args, any_types.VOCAB, False)

    unread, count = frozen()
    assert unread and all(name.split(".")[1] in ("vision_tower", "multi_modal_projector") for name in unread)
    own = "model.language_model.norm.weight"
    assert frozen(f"--freeze {own}") == (unread | {own}, count + 64)
