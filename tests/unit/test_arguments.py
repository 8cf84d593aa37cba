"""Flags: role prefixes, config files, value checks; every key is used or rejected, in one line."""

import dataclasses

import pytest
import torch

from megarl.arguments import Settings, build_parser, parse
from megarl.errors import UsageError
from megarl.flags.parser import MODULES, own_flags
from megarl.flags.role_flags import ROLES
from tests.helpers.models.tiny_models import SHAPES
from tests.helpers.pages.flag_cases import FIELDS, OUTSIDE, flag_of, required_flags, value_of

MODEL = SHAPES["llama"].split()


def refusal(argv, world_size: int = 4, program: str = "rl") -> str:
    """The message of the UsageError that these flags end in: one line."""
    with pytest.raises(UsageError) as caught:
        parse(MODEL + argv, world_size, program)
    message = str(caught.value)
    assert message and "\n" not in message and "Traceback" not in message
    return message


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
    assert "--critic-lr" in refusal(["--critic-lr", "1e-3"], program="sft")
    assert "--clip-range" in refusal(["--clip-range", "0.1"], program="sft")
    assert "--global-batch-size" in refusal(["--global-batch-size", "8"], program="rl")


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_setting_is_a_flag(field):
    for program in field.metadata["programs"]:
        value = value_of(field)
        if (program, field.name) == ("evaluate", "role_map"):
            value = "actor=0;reward=2"
        parsed = parse([*MODEL, *required_flags(field, program), flag_of(field), str(value)], 4, program)
        settings = parsed.settings
        assert parsed.warnings == () and parsed.megarl_settings()[field.name] == value
        assert getattr(settings, field.name) == value != field.default
        assert type(getattr(settings, field.name)) is type(value)


@pytest.mark.parametrize("program, flag, hint", [
    ("sft", "--gamma", "; train_rl has --gamma"), ("sft", "--actor-gamma", "; train_rl has --gamma"),
    ("rl", "--preference-margin", "; train_reward, train_preference have --preference-margin"),
    ("serve", "--eval-temperature", "; train_rl, evaluate have --eval-temperature"),
    ("rl", "--num-layer", "; did you mean --num-layers?"), ("rl", "--learning-rate", "; did you mean --lr?"),
    ("rl", "--max-new-tokens", "; did you mean --max-response-length?"),
    ("rl", "--num_generations", "; did you mean --samples-per-prompt?"),
    ("rl", "--save_interval", "; did you mean --save-interval?"),
    ("rl", "--per_device_train_batch_size", "; docs/migrating.md has the names of verl, OpenRLHF and TRL"),
    ("rl", "--actor_rollout_ref.rollout.n", "; docs/migrating.md has the names of verl, OpenRLHF and TRL"),
    ("rl", "--lr-rate", ""), ("rl", "--fim-ratee", ""), ("sft", "--actor-prot", ""), ("rl", "--actor", ""),
    ("rl", "--clip-rang", "; did you mean --clip-range?"), ("rl", "--critic-gamma", "; did you mean --gamma?"),
])  # fmt: skip
def test_an_unknown_flag_leads_to_one_that_is_accepted(program, flag, hint):
    assert refusal([flag, "1"], program=program) == f"{flag}: unknown flag{hint}"


@pytest.mark.parametrize("word", ["true", "false", "2"])
def test_a_word_after_a_switch_names_the_switch(word):
    line = f"actor: --sequence-parallel {word}: is a switch, which has no value: give it alone, or leave it out"
    assert refusal(["--sequence-parallel", word], program="rl") == line


@pytest.mark.parametrize("program", ["rl", "sft", "reward", "evaluate", "serve"])
def test_every_suggestion_is_accepted(program):
    from megarl.flags.parser import ELSEWHERE
    from megarl.mcore.config import megatron_flags

    known = {field.name.replace("_", "-") for field in FIELDS} | {"hf-model"}
    known |= {option.removeprefix("--") for option in megatron_flags.accepted_options()}
    assert set(ELSEWHERE.values()) <= known
    misspelled = [option[:-1] + "q" for option in megatron_flags.destinations() if len(option) > 8]
    for option in misspelled[::23]:
        hint = refusal([option, "1"], program=program).partition("did you mean ")[2].removesuffix("?")
        if hint:
            assert "does not use" not in outcome(hint, program), (option, hint)


def outcome(flag: str, program: str) -> str:
    """The error of a flag with the value 1; "" without one."""
    try:
        parse([*MODEL, flag, "1"], 1, program)
    except UsageError as error:
        return str(error)
    return ""


def test_a_flag_sets_its_own_field_alone():
    chosen = dataclasses.replace(Settings(), gamma=0.5, top_k=3, advantage="reinforce++")
    assert parse([*MODEL, *"--gamma 0.5 --top-k 3 --advantage reinforce++".split()], 4).settings == chosen


def test_a_switch_needs_no_value():
    assert parse([*MODEL, "--deterministic"], 1).settings.deterministic is True
    assert parse([*MODEL, "--whiten-advantages", "false"], 1).settings.whiten_advantages is False


def test_help_has_a_line_for_every_setting():
    texts = {program: build_parser(program).format_help() for program in MODULES}
    for field in FIELDS:
        for program, text in texts.items():
            assert (flag_of(field) + " " in text) == (program in field.metadata["programs"]), (flag_of(field), program)
        program = field.metadata["programs"][0]
        text = own_flags(program)[field.name.replace("_", "-")].text
        assert text and text.split()[0] in texts[program]
    modules = [text.split()[1] for text in texts.values()]
    assert modules == [f"megarl.{name}" for name in MODULES.values()]


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag, value", [
    ("--data-path", "x"), ("--seq-length", "8"), ("--critic-seed", "2"), ("--critic-train-iters", "2"),
    ("--critic-save", "x"), ("--tensorboard-dir", "x"), ("--lr-warmup-samples", "3"), ("--wandb-project", "x"),
])  # fmt: skip
def test_megatron_flags_that_nothing_uses_are_rejected(flag, value):
    message = refusal([flag, value])
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
    assert argv[0].removesuffix("-format") in refusal(argv)


@pytest.mark.parametrize("flags, says", [
    ("--attention-backend flash", "--attention-backend flash: allowed are auto, eager, invariant, sdpa, varlen"),
    ("--moe-router-fusion", "bypasses recording and replay"),
    ("--moe-enable-routing-replay", "--router-replay says which"),
])  # fmt: skip
def test_the_error_of_a_feature_gives_the_reason(flags, says):
    assert says in refusal(flags.split())


def test_balancing_losses_are_one_or_a_list():
    def given(kinds, weights):
        argv = ["--num-experts", "4", "--moe-router-load-balancing-type", *kinds, "--moe-aux-loss-coeff", *weights]
        args = parse([*MODEL, *argv], 1).roles["actor"].megatron
        return args.moe_router_load_balancing_type, args.moe_aux_loss_coeff

    kinds = ["seq_aux_loss", "global_aux_loss"]
    assert given(kinds[:1], ["0.1"]) == ("seq_aux_loss", 0.1)
    assert given(kinds, ["0.1", "2"]) == (kinds, [0.1, 2.0])


@pytest.mark.parametrize("field", [f for f in FIELDS if f.metadata["check"]], ids=lambda f: f.name)
def test_values_outside_the_allowed_range_are_rejected(field):
    usual = ("-1", "-0.5", "nan") if "float" in str(field.type) else ("-1",)
    for value in OUTSIDE.get(field.name, usual):
        message = refusal([flag_of(field), value], program=field.metadata["programs"][0])
        assert flag_of(field) in message and value in message and field.metadata["allowed"] in message


@pytest.mark.parametrize("field", [f for f in FIELDS if "float" in str(f.type)], ids=lambda f: f.name)
def test_no_flag_takes_nan_or_an_infinity(field):
    for value in ("nan", "inf", "-inf"):
        message = refusal([f"{flag_of(field)}={value}"], program=field.metadata["programs"][0])
        assert f"{flag_of(field)} {value}: allowed is" in message


@pytest.mark.parametrize("argv, says", [
    (["--lora-rank", "0"], "--lora-rank 0: allowed is a number above 0; leave it out to train all weights"),
    (["--gamma", "1.5"], "between 0 and 1"), (["--top-p", "0"], "above 0, at most 1"),
    (["--top-p", "1.01"], "above 0, at most 1"), (["--train-iters", "x"], "--train-iters"),
    (["--temperature", "1", "--temperature"], "--temperature"), (["--deterministic", "perhaps"], "true or false"),
    (["--lr", "abc"], "--lr"), (["--lr", "-1"], "--lr -1"), (["--critic-lr", "x"], "critic"),
    (["--lr-decay-style", "odd"], "--lr-decay-style"),
])  # fmt: skip
def test_wrong_values_are_rejected(argv, says):
    message = refusal(argv)
    assert argv[0].replace("--critic-", "--") in message and says in message


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
    message = refusal(argv)
    assert all(part in message for part in says), message


@pytest.mark.parametrize("missing", ["--num-layers", "--hidden-size", "--num-attention-heads"])
def test_the_model_shape_has_no_default(missing):
    place = MODEL.index(missing)
    with pytest.raises(UsageError, match=f"{missing} is missing"):
        parse(MODEL[:place] + MODEL[place + 2 :], 1)


def test_an_error_names_only_the_role_that_is_wrong():
    assert refusal(["--critic-num-attention-heads", "3"]).startswith("critic:")
