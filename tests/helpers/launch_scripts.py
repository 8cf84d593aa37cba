"""Scripts of launch/, run in the environment of the tests."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.programs import ROOT, environment

# Variables that the scripts read, without those of the environment.
VARIABLES = (
    "CONFIG", "SEED", "SAVE", "NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RDZV_ENDPOINT", "RDZV_ID",
    "MAX_RESTARTS", "DRY_RUN", "LAUNCHER", "SRUN_FLAGS", "VOCAB_SIZE", "PYTHON", "MODEL", "HF_MODEL", "ALGORITHM",
    "TASK", "ENVIRONMENT", "ROLE_MAP", "TP", "PP", "EP", "ROLLOUT_TP", "ROLLOUT_PP", "ROLLOUT_EP", "RECOMPUTE",
    "GPU_MEMORY", "DTYPE", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT",
)  # fmt: skip


def launch(arguments: list[str], name: str = "run", root: Path = ROOT, seconds: float = 600, **variables: str):
    """Runs a script in the environment that the tests run in, with no other variables of the scripts than these."""
    own = dict.fromkeys(VARIABLES, "")
    env = environment(MEGARL_VENV=sys.prefix, **own | variables)
    command = ["bash", str(root / "launch" / f"{name}.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)


def model_flags(name: str) -> tuple[list[str], int]:
    """(Megarl's flags, size of the vocabulary) of a shape of launch/models."""
    script = f'source launch/models/{name}.sh; printf "%s\\n" "$VOCAB_SIZE" "${{MODEL_ARGS[@]}}"'
    vocab_size, *flags = subprocess.check_output(["bash", "-c", script], cwd=ROOT, text=True).splitlines()
    return flags, int(vocab_size)
