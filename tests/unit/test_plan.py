"""The plan program: layouts and groups at any world size, the table, wrong input."""

import contextlib
import io
import json
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from megarl import arguments, plan
from megarl.comm import role_mesh
from megarl.errors import UsageError
from megarl.mcore.model.weight_table import padded_vocab_size
from megarl.mcore.parallel.process_groups import fake_world
from megarl.planning import summary
from megarl.planning.verdict import FULL_RECOMPUTE
from tests.helpers.envs import judges
from tests.helpers.models.tiny_models import LENGTHS, SHAPES

SMALL = f"--vocab-size 20 {SHAPES['llama']} {LENGTHS} --max-tokens-per-microbatch 48".split()
LARGE = (
    "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --group-query-attention --num-query-groups 8"
    " --kv-channels 128 --ffn-hidden-size 18432 --swiglu --normalization RMSNorm --disable-bias-linear --qk-layernorm"
    " --untie-embeddings-and-output-weights --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8"
    " --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) --bf16 --use-distributed-optimizer"
    " --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8"
    " --decoder-last-pipeline-num-layers 5 --expert-model-parallel-size 32 --recompute-granularity full"
    " --recompute-method uniform --recompute-num-layers 1 --prompts-per-step 512 --samples-per-prompt 16"
    " --max-prompt-length 2048 --max-response-length 14336 --minibatch-size 2048 --max-tokens-per-microbatch 32768"
    " --rollout-buffer-gb 20 --role-map actor=0-2047;critic=2048-3071;reference=3072-3583;reward=3584-4095"
).split()


def run(argv: list[str]) -> str:
    """What the program prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        plan.main(argv)
    assert not dist.is_initialized()
    return printed.getvalue()


def row(text: str, title: str, role: str) -> list[str]:
    """A role's cells in the table under a title."""
    return next(line for line in text.split(title)[1].splitlines() if line.startswith(role)).split()


def expected_parameters() -> tuple[int, int]:
    """(total, active) of LARGE in closed form."""
    hidden, channels, heads, groups, vocab = 7168, 128, 128, 8, 129280
    attention = (heads + 2 * groups) * channels * hidden + heads * channels * hidden + 2 * channels
    expert = 3 * hidden * 2048
    rest = 2 * vocab * hidden + hidden + 61 * (attention + 2 * hidden) + 3 * 3 * hidden * 18432
    rest += 58 * (256 * hidden + expert)
    return rest + 58 * 256 * expert, rest + 58 * 8 * expert


def test_host_memory_of_a_node_has_a_line(tmp_path):
    """A node of two has one of two replicas, so half of the states, and what the other has."""
    found = []
    for size, more in ((2, ()), (4, ("--ranks-per-node", "2"))):
        file = tmp_path / f"{size}.json"
        flags = ["--world-size", str(size), *more, "--json", str(file), *SMALL, "--save", "run", "--save-memory"]
        text = run([*flags, "--use-distributed-optimizer", "--advantage", "grpo"])
        found.append(json.loads(file.read_text())["save_memory_bytes"])
        assert f"--save-memory, at most: {found[-1] / 2**30:.2f} GiB of its tmpfs" in text
    alone, of_two = (size - 4 * (1 + number) * 2**20 for number, size in enumerate(found))
    assert of_two == 2 * (alone * 4 // 16 + alone * 12 // 16 // 2)


def test_a_671b_model_on_4096_ranks(tmp_path):
    text = run(["--world-size", "4096", "--vocab-size", "129280", "--json", str(tmp_path / "plan.json"), *LARGE])
    found = json.loads((tmp_path / "plan.json").read_text())
    total, active = expected_parameters()
    assert 6.7e11 < total < 6.8e11
    roles = found["roles"]
    for name in ("actor", "reference", "rollout"):
        assert roles[name]["parameters"]["total"] == total and roles[name]["parameters"]["active"] == active
    assert roles["critic"]["parameters"]["total"] == total - 129280 * 7168 + 7168 + 1
    assert roles["reward"]["parameters"] is None
    assert row(text, "Layout", "actor")[1:10] == ["0-2047", "8", "8", "1", "1", "32", "32", "1", "yes"]
    assert row(text, "Layout", "critic")[1:7] == ["2048-3071", "8", "8", "1", "1", "16"]
    assert [(tuple(s["roles"]), s["ranks"]) for s in found["rank_sets"]] == [
        (("actor", "rollout"), 2048), (("critic",), 1024), (("reference",), 512), (("reward",), 512),
    ]  # fmt: skip
    for entry in found["rank_sets"]:
        stages = [roles[name]["stages"] for name in entry["roles"]]
        fixed = [[m["total"] - m["activations"] - m["logits"] for m in of_role] for of_role in stages]
        moving = [[m["activations"] + m["logits"] for m in of_role] for of_role in stages]
        both = [sum(f) + max(m) for f, m in zip(zip(*fixed, strict=True), zip(*moving, strict=True), strict=True)]
        assert entry["bytes"] == max(both)
    cache = roles["rollout"]["cache"]
    assert (
        roles["actor"]["cache"] is None and cache["token_bytes"] == 8 * 2 * 128 * 2
    )  # 8 layers, a group of 128 on a rank
    tokens = (20 * 2**30 // (64 * cache["token_bytes"]) - 1) * 64
    assert cache["tokens"] == tokens and cache["full_length"] == tokens // 16384 == 319 and cache["responses"] == 256
    assert "or 319 sequences of 16,384 tokens; 256 responses of a step, 256 at a time: 1 round(s)" in text
    # A rank of a middle stage: 8 MoE layers with 8 of the experts each, in bf16, and fp32 gradients.
    dense = (128 + 16) * 128 * 7168 // 8 + 128 * 128 * 7168 // 8 + 2 * 128 + 2 * 7168
    layer = dense + 256 * 7168 + 3 * 7168 * 2048 // 8 + 8 * 3 * 7168 * 2048
    held = roles["actor"]["stages"][3]
    assert 0 <= held["weights"] - 2 * 8 * layer < 2 * 8 * 16 * 64 and held["gradients"] == 2 * held["weights"]


@pytest.mark.parametrize("rank", [0, 1, 777, 2047, 2048, 3071, 3072, 4095])
def test_groups_are_those_of_the_rank_order(rank):
    """Membership by a reshape of the ranks: tensor fastest, then context, data, pipeline; expert, expert data."""
    more = ["--actor-context-parallel-size", "2", "--critic-expert-model-parallel-size", "64"]
    with fake_world(4096, rank):
        roles = arguments.parse([*LARGE, *more], 4096).roles
        places = role_mesh.create_mesh(roles, timedelta(minutes=1)).roles
        for name, context, expert in (("actor", 2, 32), ("critic", 1, 64), ("reference", 1, 32)):
            ranks, role_groups = roles[name].ranks, places[name]
            if rank not in ranks:
                assert role_groups.pg_collection is None and role_groups.dp_rank is None
                continue
            dense = np.array(ranks).reshape(8, -1, context, 8)  # pipeline, data, context, tensor
            stage, dp_rank, part, column = np.argwhere(dense == rank)[0]
            experts = np.array(ranks).reshape(8, -1, expert)
            (expert_stage, replica, place_in_expert), groups = (
                np.argwhere(experts == rank)[0],
                role_groups.pg_collection,
            )
            expected = {
                "tp": dense[stage, dp_rank, part], "cp": dense[stage, dp_rank, :, column],
                "dp": dense[stage, :, part, column], "pp": dense[:, dp_rank, part, column],
                "dp_cp": dense[stage, :, :, column], "tp_cp": dense[stage, dp_rank], "mp": dense[:, dp_rank, part],
                "ep": experts[expert_stage, replica], "expt_dp": experts[expert_stage, :, place_in_expert],
                "intra_dist_opt": np.array(ranks),
            }  # fmt: skip
            assert (groups.embd is None) == (0 < stage < 7)  # first and last stage alone
            if groups.embd is not None:
                expected["embd"] = dense[[0, -1], dp_rank, part, column]
            for group, members in expected.items():
                assert sorted(dist.get_process_group_ranks(getattr(groups, group))) == sorted(members.flatten()), group
            assert (
                role_groups.dp_rank == dp_rank
                and list(role_groups.replicas[dp_rank]) == dense[:, dp_rank].flatten().tolist()
            )


def test_colocated_roles_add_up_and_disjoint_ones_do_not(tmp_path):
    def largest(*flags):
        run(["--world-size", "4", "--json", str(tmp_path / "plan.json"), *SMALL, *flags])
        found = json.loads((tmp_path / "plan.json").read_text())
        return max(s["bytes"] for s in found["rank_sets"]), found

    together, found = largest()
    resident = sum(m["total"] - m["activations"] - m["logits"] for r in found["roles"].values() for m in r["stages"])
    assert found["roles"]["rollout"]["stages"][0]["weights"] == 0  # the actor's own module generates
    assert found["roles"]["rollout"]["stages"][0]["kv_cache"] == 2**28
    assert resident < together < resident + 2**25
    apart, found = largest("--role-map", "actor=0;critic=1;reference=2;reward=3")
    assert len(found["rank_sets"]) == 4 and apart < together
    moved = {(m["source"], m["destination"]): m["payload"] for m in found["exchanges"]}
    assert moved[("rollout", "actor")] == 0 and moved[("rollout", "critic")] > 0  # one replica of the actor: in place
    _, found = largest("--role-map", "actor=0-1;critic=2;reference=2;reward=3;rollout=3")
    assert found["weights_to_rollout"] == found["roles"]["rollout"]["stages"][0]["weights"] > 0
    moved = {(m["source"], m["destination"]): m["payload"] for m in found["exchanges"]}
    assert moved[("rollout", "reward")] == 0 and moved[("rollout", "critic")] == 0 < moved[("rollout", "reference")]


def test_a_judge_has_the_weights_of_a_policy_and_a_cache_of_its_own(tmp_path):
    config = str(judges.write(tmp_path / "judge.yaml"))
    judge = ["--reward", "judge", "--judge-config", config, "--judge-load", "y", "--judge-buffer-gb", "0.5"]
    judge += ["--role-map", "actor=0;critic=1;reference=2;reward=3", "--json", str(tmp_path / "plan.json")]
    found = {}
    for offload in ((), ("--reward-offload",)):
        run(["--world-size", "4", *SMALL, *judge, *offload])
        roles = json.loads((tmp_path / "plan.json").read_text())["roles"]
        found[offload], reference = roles["reward"]["stages"][0], roles["reference"]["stages"][0]
    kept, moved = found.values()
    assert kept["weights"] == moved["weights"] == reference["weights"] > 0 == reference["kv_cache"]
    assert kept["kv_cache"] == moved["kv_cache"] == 2**29
    assert kept["host"] == 0 and moved["host"] == moved["weights"]


@pytest.mark.parametrize("flags, roles, moves", [
    ("--advantage grpo", ["actor", "reward", "reference", "rollout"], 5),
    ("--advantage rloo --kl-coefficient 0", ["actor", "reward", "rollout"], 3),
    ("--kl-coefficient 0", ["actor", "critic", "reward", "rollout"], 6),
    ("--advantage remax --greedy-baseline", ["actor", "reward", "reference", "rollout"], 6),
])  # fmt: skip
def test_runs_without_critic_or_reference(flags, roles, moves, tmp_path):
    text = run(["--world-size", "4", "--json", str(tmp_path / "plan.json"), *SMALL, *flags.split()])
    found = json.loads((tmp_path / "plan.json").read_text())
    assert list(found["roles"]) == roles and found["rank_sets"][0]["roles"] == roles
    assert len(found["exchanges"]) == moves
    assert ("16 greedy responses" in text) == ("--greedy-baseline" in flags)
    absent = {"critic", "reference"} - set(roles)
    assert not any(line.split()[:1] == [role] for role in absent for line in text.splitlines())


def test_a_greedy_baseline_costs_generation_and_an_absent_critic_nothing(tmp_path):
    def rollout_and_peak(*flags):
        run(["--world-size", "4", "--json", str(tmp_path / "plan.json"), *SMALL, *flags])
        found = json.loads((tmp_path / "plan.json").read_text())
        return found["roles"]["rollout"]["traffic"]["tensor"], found["rank_sets"][0]["bytes"]

    split = ["--tensor-model-parallel-size", "2", "--samples-per-prompt", "2"]
    ppo, reinforce = rollout_and_peak(*split), rollout_and_peak(*split, "--advantage", "reinforce++")
    remax = rollout_and_peak(*split, "--advantage", "remax", "--greedy-baseline")
    assert ppo[0] == reinforce[0] and remax[0] == pytest.approx(1.5 * ppo[0], rel=1e-6)  # three responses a prompt
    assert reinforce[1] == remax[1] < ppo[1]


def test_a_reward_model_is_planned_as_a_critic_without_updates():
    flags = ["--reward", "model", "--reward-model", "one,two", "--reward-max-length", "40"]
    with fake_world(4):
        program = arguments.parse([*SMALL[2:], *flags], 4)
    found = summary.make_plan(program, 4, 20).roles
    larger = summary.make_plan(program, 4, 20, 2000).roles["reward"]
    reward, critic = found["reward"], found["critic"]
    assert reward.parameters == critic.parameters and reward.largest.weights == 2 * critic.largest.weights
    assert reward.largest.gradients == reward.largest.optimizer == reward.largest.logits == 0
    rows = [padded_vocab_size(program.roles["reward"].megatron, size) for size in (20, 2000)]
    assert larger.parameters.total - reward.parameters.total == 64 * (rows[1] - rows[0]) > 0


WRONG = {
    "no world": ([], "--world-size"),
    "empty world": (["--world-size", "0"], "--world-size 0: allowed is a number above 0"),
    "no vocabulary": (["--world-size", "4", *SMALL[2:]], "--vocab-size is missing"),
    "layout": (["--world-size", "4", *SMALL, "--critic-pipeline-model-parallel-size", "4"],
               "critic: --num-layers 2: allowed is a multiple of --pipeline-model-parallel-size 4"),
    "rank outside": (["--world-size", "4", *SMALL, "--role-map", "actor=0-4;critic=0;reward=0;reference=0"], "rank 4"),
    "node outside": (["--world-size", "4", "--ranks-per-node", "2", *SMALL, "--role-map",
                      "actor=node 2;critic=0;reward=0;reference=0"], "allowed are nodes 0-1 (2 ranks each)"),
    "empty node": (["--world-size", "4", "--ranks-per-node", "0", *SMALL], "--ranks-per-node 0: allowed is"),
    "unknown flag": (["--world-size", "4", *SMALL, "--worldsize", "5"], "--worldsize: unknown flag"),
    "cap": (["--world-size", "4", *SMALL, "--critic-max-tokens-per-microbatch", "47"], "--critic-max-tokens-per"),
    "group of one": (["--world-size", "4", *SMALL, "--advantage", "opo", "--samples-per-prompt", "1"], "prompt 1: --"),
    "critic in a map": (["--world-size", "4", *SMALL, "--advantage", "opo", "--role-map", "actor=0;critic=1;reward=2"],
                        "'critic' has nothing to do"),
    "small cache": (["--world-size", "4", *SMALL, "--rollout-buffer-gb", "1e-9", "--max-prompt-length", "65",
                     "--max-tokens-per-microbatch", "99"], "--rollout-buffer-gb 1e-09: the KV cache holds one"),
    "no memory": (["--world-size", "4", *SMALL, "--gpu-memory", "0"], "--gpu-memory 0.0: allowed is a number above 0"),
    "unknown GPU": (["--world-size", "4", *SMALL, "--gpu", "h300"], "--gpu h300: allowed are a100, h100, h200, b200"),
    "speed of no GPU": (["--world-size", "4", *SMALL, "--mfu", "0.3"], "--mfu 0.3: needs --gpu"),
    "share above 1": (["--world-size", "4", *SMALL, "--gpu", "h100", "--mfu", "40"], "--mfu 40.0: allowed is a share"),
    "layouts for no GPU": (["--world-size", "4", *SMALL, "--best-layouts"], "--best-layouts: needs --gpu"),
    "recomputation for no GPU": (["--world-size", "4", *SMALL, "--least-recompute"], "needs --gpu or --gpu-memory"),
    "layouts of 32 bits": (["--world-size", "4", *SMALL, "--gpu", "h100", "--best-layouts"], "needs --bf16 or --fp16"),
    "images without a tower": (["--world-size", "4", *SMALL, "--image-tokens", "9"], "9: needs --hf-model, the folder"),
    "images in a search": (["--world-size", "4", *SMALL, "--image-tokens", "9", "--gpu", "h100", "--best-layouts"],
                           "--image-tokens: a search does not read it"),
    "empty vocabulary": (["--world-size", "4", *SMALL, "--vocab-size", "0"], "--vocab-size 0: allowed is"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line(case):
    argv, needle = WRONG[case]
    with pytest.raises(UsageError) as caught:
        run(argv)
    assert needle in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_use_ends_with_status_2(capsys):
    with pytest.raises(SystemExit) as left:
        plan.launch(["--world-size", "3", *SMALL, "--tensor-model-parallel-size", "2"])
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == ""
    assert printed.err.startswith("megarl: error: actor: --tensor-model-parallel-size 2")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("flags, status, says", [
    (["--gpu-memory", "0.2"], 1, "does not fit"), (["--gpu-memory", "2"], 0, "fits, "),
    (["--gpu", "h100"], 0, "s: generation "), (["--gpu", "a100", "--best-layouts"], 0, "--use-distributed-optimizer"),
    (["--gpu", "a100", "--best-layouts", "--gpu-memory", "0.2"], 1, "None of "),
    (["--gpu-memory", "2", "--least-recompute"], 0, "recompute:\n"),
    (["--gpu-memory", "0.2", "--least-recompute"], 1, f"recompute: {' '.join(FULL_RECOMPUTE)}\n"),
    (["--gpu-memory", "0.2", "--least-recompute", "--recompute-granularity", "selective"], 1, "recompute:\n"),
])  # fmt: skip
def test_the_exit_status_says_whether_the_run_fits(flags, status, says, capsys, tmp_path):
    """The cache of 0.25 GiB alone is more than 0.2."""
    small = ["--world-size", "4", *SMALL, "--bf16", "--advantage", "grpo", "--prompts-per-step", "2"]
    try:
        plan.launch([*small, *flags, "--json", str(tmp_path / "plan.json")])
        left = 0
    except SystemExit as end:
        left = end.code
    printed = capsys.readouterr().out
    assert left == status and says in printed
    found = json.loads((tmp_path / "plan.json").read_text())
    if "--best-layouts" in flags:
        assert len(found["best"]) == (0 if status else 3) and found["closest"]["bytes"] > 2**28 * 0.9
    elif "--least-recompute" in flags:
        assert says == printed and (found["bytes"] <= 0.9 * float(flags[1]) * 2**30) == (status == 0)
    else:
        assert found["verdict"]["fits"] == (status == 0) and ("estimate" in found) == ("--gpu" in flags)


def test_an_error_names_the_config_file_of_a_flag(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("tensor-model-parallel-size: 2")
    with pytest.raises(SystemExit):
        plan.launch(["--world-size", "3", *SMALL, "--config", str(tmp_path / "c.yaml")])
    assert f"(--tensor-model-parallel-size 2 is set in {tmp_path}/c.yaml; null" in capsys.readouterr().err
