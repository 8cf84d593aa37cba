"""The trainers behind the programs: set-up, roles, steps, evaluation, metrics, checkpoints and resume of a run."""
