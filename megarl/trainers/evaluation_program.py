"""The program `evaluate`: inputs, generation and scores of held-out prompts, table and files of the results."""

import itertools
import json
import re
import sys
from pathlib import Path

from megarl.arguments import RunConfig
from megarl.comm.role_mesh import RoleMesh
from megarl.observe import samples, terminal
from megarl.observe.files import json_line, write_atomically
from megarl.observe.timers import Timers
from megarl.rollout.episodes.runner import EpisodeRunner
from megarl.rollout.remote_generator import RemoteGenerator, RemoteRollout
from megarl.rollout.requests import ResponseEnds, check_ends, thinking_budget_of
from megarl.rollout.rollout import Rollout
from megarl.trainers.environment_inputs import check_environment_flags, check_environments
from megarl.trainers.evaluator import Evaluations, check_names
from megarl.trainers.image_inputs import RunImages
from megarl.trainers.policy import PolicyInputs
from megarl.trainers.prompt_inputs import read_encoded_prompts
from megarl.trainers.reward_factory import RewardFactory
from megarl.trainers.setup import check_required, check_save, read_inputs

SETTINGS = (
    "eval_prompts evals eval_samples eval_responses eval_temperature top_k top_p min_p reward max_prompt_length "
    "max_response_length stop stop_token_ids thinking_budget thinking_budget_text environment max_turns "
    "max_turn_length seed"
).split()

METRIC = re.compile("eval/(?:(.+?)/)??(reward/[^/]+|[^/]+)")  # task, metric; a term of --reward is a metric


class EvaluationInputs(PolicyInputs):
    """Checkpoint, prompts, tokenizer and reward, read and checked before the process group exists."""

    def __init__(self, config: RunConfig):
        s = config.settings
        check_required({"--eval-prompts": s.eval_prompts or s.evals})
        check_save(s)
        check_environment_flags(s)
        self.reward_factory = RewardFactory(config)
        self._server = RemoteGenerator.of_settings(s) if s.rollout_server else None
        super().__init__(config)
        check_ends(s, self.tokenizer)
        self.thinking = thinking_budget_of(s, self.encoder)
        self.prompt_sets, tokens_of = read_encoded_prompts(s, self.encoder)
        self.tokens, self.images = tokens_of, RunImages.of(config, self.encoder)
        check_names(self.prompt_sets, s.eval_samples)
        check_environments(s, self.encoder, self.prompt_sets)
        self.reward_factory.check(*self.prompt_sets.values())
        if self.images is not None:
            self.images.add_scorer(config.roles["reward"], self.reward_factory.encoder)

    def rollout(self, mesh: RoleMesh, timers: Timers) -> Rollout | RemoteRollout:
        """What generates the responses: this program with its policy, or a server. Collective of the world."""
        s = self.config.settings
        episodes = EpisodeRunner(s, mesh["rollout"], self.encoder) if s.environment else None
        if self._server is not None:
            ends = ResponseEnds(s, self.tokenizer)
            return RemoteRollout(s, mesh, self._server, ends, timers, episodes, self.thinking)
        model = self.load(mesh["actor"])
        if self.images is not None:
            self.images.attach(self.config.roles["actor"], model)
        role = self.rollout_role()
        return Rollout(s, role, mesh, model, self.tokenizer, timers, episodes=episodes, thinking=self.thinking)


def evaluate(config: RunConfig, timers: Timers):
    """Generates and scores responses with the policy, prints a table and writes the results to `--save`."""
    s = config.settings
    inputs, mesh, _ = read_inputs(config, timers, lambda: EvaluationInputs(config), sys.stderr)
    rollout = inputs.rollout(mesh, timers)
    reward = inputs.reward_factory.role(mesh["reward"], inputs.encoder, timers)
    for scorer in reward.frozen_models if inputs.images is not None else ():
        inputs.images.attach(scorer.role, scorer.model)
    rollout.load_weights()
    evaluations = Evaluations(s, mesh, rollout, reward, inputs.prompt_sets, inputs.tokens, timers)
    if s.save:
        samples.keep_for_failure(Path(s.save), evaluations.samples_so_far)
    metrics, rows = evaluations.evaluate(with_samples=bool(s.save))
    reward.verifiers.close()
    if rollout.episodes is not None:
        rollout.episodes.close()
    if metrics is not None:
        print(table(metrics), flush=True)
    if metrics is not None and s.save:
        write_results(Path(s.save), inputs, evaluations.prompts, metrics, rows)


def table(metrics: dict[str, float]) -> str:
    """Metrics as text: a line per name of --evals or task after one for all prompts, a column per metric."""
    rows: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        task, metric = METRIC.fullmatch(name).groups()
        rows.setdefault(task or "all", {})[metric] = value
    names = list(dict.fromkeys(itertools.chain(*rows.values())))  # a task without answers has no maj@k
    lines = [["task", *names]]
    lines += [[task, *(f"{row[n]:.4f}" if n in row else "-" for n in names)] for task, row in rows.items()]
    return "\n".join(terminal.table(lines, right=len(names)))


def write_results(folder: Path, inputs: EvaluationInputs, prompts: int, metrics: dict, rows: list[dict]):
    """Writes `DIR/evaluation.json` (checkpoint, settings, metrics) and `DIR/samples.jsonl` (all responses)."""
    found = inputs.source() | {
        "prompts": prompts,
        "settings": {name: getattr(inputs.config.settings, name) for name in SETTINGS},
        "metrics": metrics,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "samples.jsonl", "".join(json_line(row) + "\n" for row in rows))
    write_atomically(folder / "evaluation.json", json.dumps(found, indent=1) + "\n")
