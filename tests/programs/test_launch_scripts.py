"""The scripts of launch/: wrong use ends with status 2 and one line; what a warm start and the quickstarts run."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
import yaml

from megarl import arguments
from megarl.environments import ENVIRONMENTS
from megarl.planning.verdict import FULL_RECOMPUTE, SELECTIVE_RECOMPUTE
from tests.helpers.launch_scripts import launch
from tests.helpers.programs import RL_RECIPES, ROOT, metrics
from tests.helpers.tiers import long

# Ranks of actor, critic, reward and reference; the actor's expert-parallel size; chunks of a step.
SPLIT = {
    "quickstart": ([[0, 1], [2, 3], [2, 3], [2, 3]], 1),
    "moe_quickstart": ([[0, 1], [2], [3], [3]], 2),
}


@pytest.mark.parametrize("arguments, variables, says", [
    ([], {}, "no program given"), (["train"], {}, "unknown program train"), (["train_sft"], {"NPROC": "0"}, "NPROC=0"),
    (["train_sft"], {"NPROC": "two"}, "NPROC=two"), long((["train_sft", "--lr-rate", "1"], {}, "--lr-rate")),
    (["train_sft"], {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1"), (["train_sft"], {"LAUNCHER": "ray"}, "LAUNCHER=ray"),
    (["train_sft"], {"NNODES": "2"}, "NODE_RANK is not set: NNODES=2 needs it, or RDZV_ENDPOINT"),
    (["train_sft"], {"LAUNCHER": "srun"}, "there is no Slurm allocation"),
    (["train_rl"], {"GENERATORS": "2"}, "GENERATORS=2: needs --replica-port"),
    (["evaluate"], {"GENERATORS": "2"}, "GENERATORS=2: allowed with train_rl on one node"),
])  # fmt: skip
def test_wrong_use_is_reported_in_one_line(arguments, variables, says):
    done = launch(arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_a_warm_start_makes_data_and_a_policy_on_two_ranks(tmp_path):
    flags = ["--train-iters", "2", "--eval-interval", "2", "--lr-warmup-iters", "1"]
    done = launch(flags, "warm_start", CONFIG="moe_quickstart", SEED="3", SAVE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "data" / "train.jsonl").read_text().splitlines()) == 6000
    assert json.loads((tmp_path / "data" / "prompts.json").read_text())["seed"] == 3
    rows = metrics(tmp_path / "sft")
    assert sorted(rows) == [1, 2] and rows[2]["eval/loss"] > 1
    settings = yaml.safe_load((tmp_path / "sft" / "settings.yaml").read_text())
    actor = settings["roles"]["actor"]["megatron"]
    assert (settings["megarl"]["seed"], actor["num_experts"], actor["world_size"]) == (3, 8, 2)
    assert (tmp_path / "sft" / "checkpoints" / "latest").exists()


@pytest.mark.parametrize("name, variables, says", [
    ("warm_start", {}, "SAVE is not set"), ("warm_start", {"SAVE": "S", "SEED": "-1"}, "SEED=-1: allowed is"),
    ("warm_start", {"SAVE": "S", "CONFIG": "moe"}, "CONFIG=moe: configs/moe_sft.yaml does not exist"),
    ("quickstart", {"SAVE": "S", "CONFIG": "moe"}, "CONFIG=moe: allowed: quickstart, moe_quickstart"),
    ("moe_quickstart", {"SAVE": "S", "SEED": "one"}, "SEED=one: allowed is"),
    ("rl", {"SAVE": "S"}, "MODEL or HF_MODEL is not set"),
    ("rl", {"SAVE": "S", "MODEL": "gpt2"}, "MODEL=gpt2: allowed: deepseek_v3.2 deepseek_v3 glm_5 kimi_linear_48b"),
    ("rl", {"SAVE": "S", "MODEL": "qwen3_8b", "ALGORITHM": "dpo"}, "ALGORITHM=dpo: allowed: cispo dapo dppo dr_grpo"),
    ("rl", {"SAVE": "S", "MODEL": "qwen3_8b", "TP": "two"}, "TP=two: allowed is a whole number above 0"),
    ("rl", {"SAVE": "S", "MODEL": "qwen3_8b", "RECOMPUTE": "some"}, "RECOMPUTE=some: allowed: auto, none, selective"),
    ("rl", {"SAVE": "S", "MODEL": "qwen3_8b", "GPU_MEMORY": "big"}, "GPU_MEMORY=big: allowed is a whole number"),
    ("slurm", {"SAVE": "S"}, "no program or script given"),
    ("agent_quickstart", {"SAVE": "S", "SEED": "x"}, "SEED=x: allowed is"),
    ("vision_quickstart", {"SAVE": "S", "SEED": "x"}, "SEED=x: allowed is"),
    ("vision_quickstart", {"SAVE": "S", "SHUFFLE": "2"}, "SHUFFLE=2: allowed is 0 or 1"),
    ("agent_quickstart", {"SAVE": "S", "TASK": "chess"}, "TASK=chess: allowed: guess-number, products, frozen-lake"),
])  # fmt: skip
def test_wrong_variables_are_reported_in_one_line_before_anything_is_made(name, variables, says, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    done = launch([], name, **{key: str(run) if value == "S" else value for key, value in variables.items()})
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.rglob("*")) == [run]


@pytest.mark.parametrize("name", ["agent_quickstart", "agent_products", "agent_frozen_lake"])
def test_the_agents_files_describe_the_same_policy(name):
    """Warm start and training: the same shape, and flags that go together."""
    files = [ROOT / "configs" / f"{name}{ending}.yaml" for ending in ("", "_sft")]
    rl, sft = (yaml.safe_load(file.read_text()) for file in files)
    shape = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "chat-template",
             "max-prompt-length", "max-response-length", "tokenizer-model")  # fmt: skip
    assert [rl[key] for key in shape] == [sft[key] for key in shape]
    assert arguments.parse(["--config", str(files[0])], 2).warnings == ()
    assert arguments.parse(["--config", str(files[1])], 2, "sft").warnings == ()
    assert rl["environment"] in ENVIRONMENTS and rl["pretrained-checkpoint"] == sft["save"]


def checkout(folder: Path) -> Path:
    """A checkout of the quickstarts whose other scripts only say how they were called."""
    for name in ("launch", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "launch" / "setup_env.sh").write_text("echo python\n")
    for name in ("warm_start", "run"):
        said = f"{name}: ${{NPROC:-}} $CONFIG $SEED $SAVE"
        (folder / "launch" / f"{name}.sh").write_text(f'printf "%s\\n" "{said}" "$@"\n')
    return folder


def rl_flags(folder: Path, plan: str, *further: str, **variables: str):
    """(result, flags) of rl.sh in a checkout, where the planner is this script; it writes each call to a file."""
    (checkout(folder) / "bin").mkdir()
    stub(folder / "bin", "python", f'echo "$@" >>{folder}/plans\n{plan}')
    given = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NPROC": "8", "SAVE": str(folder / "run")} | variables
    done = launch(list(further), "rl", root=folder, **given)
    return done, done.stdout.split("train_rl\n")[-1].split()


@pytest.mark.parametrize("needs, variables, further, plans, ends", [
    ("none", {}, [], 1, "--clip-grad 1.0"), ("selective", {}, [], 1, "--recompute-granularity selective"),
    ("more", {}, [], 1, "--recompute-method uniform --recompute-num-layers 1"),
    ("more", {"RECOMPUTE": "none"}, [], 0, "--clip-grad 1.0"),
    ("none", {"RECOMPUTE": "selective"}, [], 0, "--recompute-granularity selective"),
    ("more", {}, ["--recompute-granularity", "selective"], 0, "--clip-grad 1.0"),
])  # fmt: skip
def test_activations_are_recomputed_only_if_the_plan_needs_it(needs, variables, further, plans, ends, tmp_path):
    said = {"none": "", "selective": " ".join(SELECTIVE_RECOMPUTE), "more": " ".join(FULL_RECOMPUTE)}[needs]
    plan = f"echo recompute: {said}\nexit {int(needs == 'more')}"
    done, flags = rl_flags(tmp_path, plan, *further, MODEL="qwen2.5_7b", TP="2", **variables)
    assert done.returncode == 0, done.stderr
    optimizer = " ".join(flags).split("--train-iters")[0].strip()
    assert optimizer.endswith(ends) and optimizer.count("--recompute-granularity") == (ends != "--clip-grad 1.0")
    asked = (tmp_path / "plans").read_text().splitlines() if plans else []
    assert len(asked) == plans
    for line in asked:
        assert "-m megarl.plan --world-size 8 --ranks-per-node 8 --vocab-size 152064 --gpu-memory 80 " in line
        assert "--least-recompute" in line and "--tensor-model-parallel-size 2" in line
    assert ("does not fit into GPU_MEMORY=80 GiB" in done.stderr) == bool(plans and needs == "more")


@pytest.mark.parametrize("says, status", [("megarl: error: no", 2), ("Traceback: a fault of the planner", 1)])
def test_an_error_of_the_planner_ends_the_script_with_its_text(says, status, tmp_path):
    done, _ = rl_flags(tmp_path, f"echo {says} >&2\nexit {status}", MODEL="qwen2.5_7b")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{says}\n")


@pytest.mark.parametrize("variables, further, has, lacks", [
    ({"MODEL": "qwen3_30b_a3b"}, [], "--bf16 --moe-grouped-gemm", "--rollout-tensor"),
    ({"MODEL": "qwen3_30b_a3b", "DTYPE": "fp32"}, [], "--num-experts", "--moe-grouped-gemm"),
    ({"MODEL": "qwen3_30b_a3b"}, ["--exact-rollout"], "--num-experts", "--moe-grouped-gemm"),
    ({"MODEL": "qwen3_8b"}, [], "--bf16", "--moe-grouped-gemm"),
    ({"HF_MODEL": "EXPERTS"}, [], "--bf16 --moe-grouped-gemm", "--num-experts"),
    ({"MODEL": "qwen3_8b", "ROLLOUT_TP": "2", "ROLLOUT_PP": "1", "ROLLOUT_EP": "4"}, [],
     "--rollout-tensor-model-parallel-size 2 --rollout-pipeline-model-parallel-size 1 "
     "--rollout-expert-model-parallel-size 4", "--moe"),
])  # fmt: skip
def test_grouped_experts_and_the_rollouts_own_layout(variables, further, has, lacks, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"hidden_size": 64, "num_experts": 128}')
    given = {name: str(tmp_path / "hf") if value == "EXPERTS" else value for name, value in variables.items()}
    done, flags = rl_flags(tmp_path, "echo recompute:", *further, **given)
    assert done.returncode == 0, done.stderr
    assert has in " ".join(flags) and lacks not in " ".join(flags)


@pytest.mark.long
def test_a_dry_run_prints_the_command_and_the_plan_of_64_nodes(tmp_path):
    """The batch script, outside Slurm: what it would start on 512 ranks, and where the roles would be."""
    role_map = "actor=nodes 0-31;critic=nodes 32-47;reference=nodes 48-63;reward=nodes 48-63"
    given = {"NNODES": "64", "NPROC": "8", "TP": "8", "PP": "4", "MODEL": "qwen2.5_72b", "ALGORITHM": "ppo"}
    save = tmp_path / "run"
    done = launch(["launch/rl.sh"], "slurm", DRY_RUN="1", ROLE_MAP=role_map, SAVE=str(save), **given)
    assert done.returncode == 0, done.stderr
    arrays = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if "_ARGS " in line)
    assert list(arrays) == [f"{name}_ARGS" for name in ("MODEL", "ROLE", "ROLLOUT", "ALGORITHM", "OPTIMIZER", "SAVE")]
    (command,) = (line for line in done.stdout.splitlines() if line.startswith("command: "))
    words = shlex.split(command)[1:]
    assert words[:4] == ["srun", "--nodes=64", "--ntasks=512", "--ntasks-per-node=8"]
    assert words[-sum(len(shlex.split(text)) for text in arrays.values()) :] == shlex.split(" ".join(arrays.values()))
    rows = {line.split()[0]: line.split()[1:6] for line in done.stdout.splitlines() if line[:1].islower()}
    assert rows["actor"][:1] != [] and "512 ranks; vocabulary 152064" in done.stdout
    for role, ranks in (("actor", "0-255"), ("critic", "256-383"), ("reference", "384-511"), ("rollout", "0-255")):
        assert re.search(rf"^{role} +{ranks} +8 +4 ", done.stdout, re.MULTILINE), role
    assert not save.exists()


@pytest.mark.long
def test_a_dry_run_checks_flags():
    done = launch(["train_sft", "--lr-rate", "1"], DRY_RUN="1")
    assert done.returncode == 2 and "--lr-rate: unknown flag" in done.stderr
    assert done.stdout.startswith("command: ") and "megarl.launcher" in done.stdout


def stub(folder: Path, name: str, script: str):
    """A command of this name on the PATH of `stubbed`."""
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / name).chmod(0o755)


def stubbed(folder: Path, **variables: str) -> dict[str, str]:
    """Variables of an allocation of two nodes with three tasks each, and the stubs' PATH."""
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "3(x2)"} | variables  # fmt: skip


def test_in_an_allocation_ranks_are_tasks_of_srun(tmp_path):
    stub(tmp_path, "srun", f'printf "%s\\n" "$@" >{tmp_path}/words')
    given = stubbed(tmp_path, SLURM_CPUS_PER_TASK="12", SRUN_FLAGS="--mpi=none --label")
    done = launch(["train_rl", "--role-map", "actor=nodes 0-1"], **given)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:4] == ["--nodes=2", "--ntasks=6", "--ntasks-per-node=3", "--cpus-per-task=12"]
    assert words[-7:] == ["--mpi=none", "--label", sys.executable, "-m", "megarl.train_rl", "--role-map",
                          "actor=nodes 0-1"]  # fmt: skip


@pytest.mark.parametrize("ends, starts, status", [
    (["exit 137", "exit 0"], 2, 0), (["exit 137"] * 4, 3, 137),
    (['printf limit >"$MEGARL_END_FILE"; exit 137'], 1, 137),
    (['printf "wrong input" >"$MEGARL_END_FILE"; exit 2'], 1, 2),
])  # fmt: skip
def test_failed_tasks_are_started_again_unless_it_would_not_help(ends, starts, status, tmp_path):
    cases = "\n".join(f"    {number}) {end} ;;" for number, end in enumerate(ends))
    stub(tmp_path, "srun", f'echo "$TORCHELASTIC_RESTART_COUNT" >>{tmp_path}/starts\n'
                           f'case $((TORCHELASTIC_RESTART_COUNT - 5)) in\n{cases}\nesac')  # fmt: skip
    done = launch(["train_rl"], **stubbed(tmp_path, MAX_RESTARTS="2", SLURM_RESTART_COUNT="5"))
    assert done.returncode == status
    assert (tmp_path / "starts").read_text().split() == [str(5 + number) for number in range(starts)]


def test_the_line_of_the_rank_that_failed_first_is_the_last_one(tmp_path):
    first = "2: megarl: rank 2 failed in reward/score of step 1: KeyError: 'x'"
    lost = "0: megarl: rank 0 failed in actor/update of step 1: RuntimeError: Connection reset by peer"
    lines = [lost, first, "2: Traceback of your code:", "1: megarl: rank 1 failed in later", "srun: error: node1"]
    stub(tmp_path, "srun", "echo result\ncat >&2 <<'END'\n" + "\n".join(lines) + "\nEND\nexit 9")
    done = launch(["train_rl"], **stubbed(tmp_path))
    assert (done.returncode, done.stdout) == (9, "result\n")
    assert done.stderr.splitlines() == [*lines, first]


@pytest.mark.parametrize("said, last", [
    ("Exited with exit code 137", []),  # by default what srun says of a killed task is in tests/unit/test_launcher.py
    long(("Killed", ["megarl: rank 1 was ended by SIGKILL; no checkpoint is saved: start the run again"])),
])  # fmt: skip
def test_the_last_line_after_a_killed_task_says_how_to_resume(said, last, tmp_path):
    lost = "megarl: rank 0 failed in actor/update of step 1: RuntimeError: Connection reset by peer"
    said = f"srun: error: node1: task 1: {said}"
    stub(tmp_path, "srun", f'printf {tmp_path} >"$MEGARL_FOLDER_FILE"\nprintf "{lost}\n{said}\n" >&2\nexit 137')
    done = launch(["train_rl"], **stubbed(tmp_path))
    assert done.returncode == 137 and done.stderr.splitlines() == [lost, said, *last]


@pytest.mark.parametrize("arguments, name, begins, has", [
    (["--help"], "run", "Starts a megarl program", "Exit status"),
    (["--advantage", "grpo", "-h"], "rl", "Reinforcement learning of a model", "--prompts-per-step"),
])  # fmt: skip
def test_help_is_the_scripts_text_and_the_programs_flags(arguments, name, begins, has):
    done = launch(arguments, name)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(begins) and has in done.stdout


@pytest.mark.parametrize("end, preempted, requeued", [
    ('printf signal >"$MEGARL_END_FILE"', False, True), ("exit 143", True, True), ("exit 1", False, False),
    ("exit 0", True, False), ('printf limit >"$MEGARL_END_FILE"; exit 3', False, False),
])  # fmt: skip
def test_a_batch_job_goes_back_into_the_queue_if_the_run_can_go_on(end, preempted, requeued, tmp_path):
    stub(tmp_path, "srun", end)
    when = "2026-01-01T00:00:00" if preempted else "None"
    # Slurm ends the batch script: here its stand-in does.
    stub(tmp_path, "scontrol", f'echo "$@" >>{tmp_path}/asked\n[[ $1 == show ]] && echo "PreemptTime={when}" && exit\n'
                               "kill -KILL $PPID")  # fmt: skip
    done = launch(["train_rl"], "slurm", **stubbed(tmp_path))
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert ("requeue 7" in asked) == requeued == ("goes back into the queue" in done.stderr)
    assert (done.returncode == -signal.SIGKILL) == requeued


@pytest.mark.parametrize("algorithm", [path.stem for path in RL_RECIPES])
def test_the_recipe_of_each_algorithm_is_understood(algorithm, tmp_path):
    given = {"MODEL": "qwen3_30b_a3b", "EP": "2", "TP": "2", "ALGORITHM": algorithm, "RECOMPUTE": "full"}
    given["SAVE"] = str(tmp_path / "run")
    reward = ["--reward", "exact-match+0.1*length"] if algorithm == "gdpo" else []  # it is told of a single part
    done = launch(["--lr", "2e-6", *reward], "rl", checkout(tmp_path / "checkout"), **given)
    assert done.returncode == 0, done.stderr
    program, *flags = done.stdout.partition("run: ")[2].splitlines()[1:]
    config = arguments.parse(flags, 4)
    args, settings = config.roles["actor"].megatron, config.settings
    assert (program, args.lr, args.num_experts, args.sequence_parallel) == ("train_rl", 2e-6, 128, True)
    assert args.recompute_granularity == "full" and args.moe_grouped_gemm
    assert settings.router_replay == "rollout" and settings.save == str(tmp_path / "run") and not config.warnings


@pytest.mark.parametrize("config", SPLIT)
def test_a_quickstart_hands_over_its_files_layout_and_flags(config, tmp_path):
    save = tmp_path / "earlier"
    (save / "data").mkdir(parents=True)
    done = launch(["--gamma", "0.9"], config, checkout(tmp_path / "checkout"), SEED="7", SAVE=str(save))
    assert done.returncode == 0, done.stderr
    assert f"warm_start:  {config} 7 {save}\n\nquickstart: PPO" in done.stdout
    after = done.stdout.partition(f"run: 4 {config} 7 {save}\n")[2]
    handed = after.partition("\n\nquickstart: done")[0].splitlines()
    assert handed[:3] == ["train_rl", "--config", f"configs/{config}.yaml"] and not save.exists()
    assert (tmp_path / "earlier.old-1" / "data").is_dir()
    program = arguments.parse(["--config", str(ROOT / handed[2]), *handed[3:]], 4)
    settings, roles = program.settings, program.roles
    assert (settings.save, settings.prompts, settings.seed) == (f"{save}/ppo", f"{save}/data/train.jsonl", 7)
    assert (settings.eval_prompts, settings.gamma) == (f"{save}/data/heldout.jsonl", 0.9)
    assert settings.tokenizer_model == f"{save}/data/tokenizer.model"
    models = [roles[name].megatron for name in ("actor", "critic", "reference")]
    assert [args.pretrained_checkpoint for args in models] == [f"{save}/sft"] * 3
    ranks, experts = SPLIT[config]
    assert [list(roles[name].ranks) for name in ("actor", "critic", "reward", "reference")] == ranks
    sizes = [(args.tensor_model_parallel_size, args.expert_model_parallel_size) for args in models]
    assert sizes == [(1, experts), (1, 1), (1, 1)]


@pytest.mark.parametrize("config", SPLIT)
def test_a_warm_start_has_the_shape_of_what_starts_from_it(config):
    texts = [(ROOT / "configs" / f"{config}{end}.yaml").read_text() for end in ("", "_sft")]
    shapes = [re.search(r"^num-layers: .*^max-response-length: \d+$", text, re.MULTILINE | re.DOTALL) for text in texts]
    assert shapes[0][0] == shapes[1][0]
    shape, files = yaml.safe_load(shapes[0][0]), [yaml.safe_load(text) for text in texts]
    experts = (shape.get("num-experts"), shape.get("moe-router-topk"))
    assert experts == ((8, 2) if config == "moe_quickstart" else (None, None))
    assert [file["prompts"] for file in files] == [f"runs/{config}/data/train.jsonl"] * 2
    assert files[0]["pretrained-checkpoint"] == files[1]["save"] == f"runs/{config}/sft"
