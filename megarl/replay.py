"""Replay of one saved response of a training run: generated again, or from one of its turns on with another answer.

A run with `--save-rollouts` keeps tokens, log-probs and what environments have answered. With the checkpoint of the
step before, whose policy has written them, the turns are generated again and compared to the bit; without it they are
shown.

    python -m megarl.replay runs/mine --step 40 --sample 7
    python -m megarl.replay runs/mine --step 40 --sample 7 --from-turn 3 --answer "no such file"

Start it in the folder where the run was started, with as many ranks as one replica of its rollout has
(`megarl --nproc-per-node 2 replay …`). Flags of the run that follow win over its own.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megarl.arguments import RunConfig, Settings
from megarl.checkpoint import folders, pretrained, resume
from megarl.comm.role_mesh import RoleMesh
from megarl.data.images.book import FOLDER
from megarl.data.prompt import Prompt
from megarl.environments.pool import EnvironmentPool
from megarl.environments.protocol import Message, Observation, Task
from megarl.errors import WARNED, ArgumentParser, UsageError, flag_of
from megarl.flags import command_line, parser
from megarl.observe.files import step_of
from megarl.observe.settings_file import COMMAND_LINE, read_settings
from megarl.observe.terminal import ranges_text
from megarl.observe.timers import Timers
from megarl.rollout import saved_response
from megarl.rollout.episodes.client import EnvironmentClient
from megarl.rollout.episodes.runner import EpisodeRunner
from megarl.rollout.player import ForkedPool, Player, fork_problem, go_on_after, other_answer
from megarl.rollout.requests import PromptRequest, RoundRequests, branching_of, check_ends, thinking_budget_of
from megarl.rollout.rollout import Rollout
from megarl.rollout.saved_response import SavedResponse, read_response
from megarl.trainers.environment_inputs import check_environment_flags
from megarl.trainers.image_inputs import RunImages
from megarl.trainers.launch import launch, refuse
from megarl.trainers.policy import load_policy
from megarl.trainers.prompt_inputs import PROMPTS, read_encoded_prompts
from megarl.trainers.setup import build_role_encoder, check_vocabulary, read_inputs

# Flags of the run that decide what its rollout generates: those of an evaluation but these, and some more. Drafts of
# --mtp-drafts change no text.
_OF_EVALUATION = ("eval-", "judge-", "reward", "rollout-server", "load", "save", "role-map", "verify-weights", "mtp-")
_MORE = tuple(
    """
    prompts prompts-per-step samples-per-prompt branch-turns branch-samples temperature hf-mtp lora-rank lora-alpha
    lora-rslora lora-targets lora-adapter actor-lora-rank actor-lora-alpha actor-lora-rslora actor-lora-targets
    actor-lora-adapter
    """.split()
)


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The program's own flags, and flags of the run that follow them. UsageError for wrong ones."""
    own = ArgumentParser(prog="megarl.replay", allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    own.add_argument("run", help="folder of a run with --save-rollouts")
    own.add_argument("--step", type=int, required=True, help="of the run, from 1")
    own.add_argument(
        "--sample", type=int, required=True, help="number among the responses generated for the step, from 0"
    )
    own.add_argument("--load", help="weights to generate with; default: those that have written the response")
    own.add_argument("--from-turn", type=int, help="with --answer: the turn, from 1, that gets another answer")
    own.add_argument("--answer", nargs="+", help="texts of the other answer, one for each of its messages")
    options, rest = own.parse_known_args(argv)
    if (options.from_turn is None) != (options.answer is None):
        raise UsageError("--from-turn and --answer: each needs the other")
    return options, rest


def flags_of_run(run: str) -> tuple[list[str], int]:
    """(the flags with which a program generates as a run does, the run's `--generation-lag`)."""
    words = read_settings(Path(run)).get(COMMAND_LINE)
    if not isinstance(words, list) or not words or words[0] != "megarl.train_rl":
        raise UsageError(f"{run}: holds no run of train_rl, whose settings.yaml has its command line")
    found = command_line.read([str(word) for word in words[1:]], "rl")
    of_evaluation = {name for name in parser.own_flags("evaluate") if not name.startswith(_OF_EVALUATION)}
    kept = {name: value for name, value in found.values.items() if name in of_evaluation or name in _MORE}
    flags = [f"--{name}={value}" for name, value in kept.items()]
    return [*flags, *found.others, "--debug-rollout-only"], int(str(found.values.get("generation-lag", 0)))


_DRAWN = "the run drew its first weights from the seed, and no checkpoint has them"


class ReplayRequest(NamedTuple):
    """What is replayed, and with which weights."""

    options: argparse.Namespace
    saved: SavedResponse
    load: str | None  # the checkpoint; None: the weights that the run began with, or none
    problem: str | None  # why there are no weights, so that the record is shown alone


def asked_of(options: argparse.Namespace, lag: int) -> ReplayRequest:
    """The response and the weights that have written it, or those of `--load`. UsageError for what is not there.

    `lag`: the run's `--generation-lag`.
    """
    saved = read_response(options.run, options.step, options.sample)
    load, problem = options.load, None
    if load is None and not set(saved.versions) <= {saved.manifest["version"]}:
        problem = f"earlier policies have written some of it, of the versions {ranges_text(saved.versions)}"
    elif load is None and (step := max(options.step - 1 - lag, 0)):
        folder = folders.step_folder(Path(options.run), step)
        load = str(folder)
        if not (folder / folders.MANIFEST).is_file():
            there = ", ".join(str(step_of(path)) for path in folders.complete(folder.parent)) or "none"
            load, problem = None, f"the policy after step {step} has written it; there are checkpoints of {there}"
    if options.from_turn is not None:
        if refused := fork_problem(saved, options.from_turn - 1):
            raise UsageError(f"--from-turn {options.from_turn}: {refused}")
        if not saved.is_agent:
            other_answer(saved.observations[options.from_turn - 1], options.answer)
        if problem:
            raise UsageError(f"--from-turn {options.from_turn}: needs weights to go on with: {problem}; give --load")
    return ReplayRequest(options, saved, load, problem)


class ReplayInputs:
    """The saved response, its prompt, and the weights, before the process group exists. UsageError for wrong ones."""

    def __init__(self, asked: ReplayRequest, config: RunConfig):
        s, actor, saved = config.settings, config.roles["actor"], asked.saved
        self.saved = saved
        check_environment_flags(s)
        self.encoder = build_role_encoder(actor, s)
        self.tokenizer = self.encoder.tokenizer
        check_ends(s, self.tokenizer)
        self.thinking = thinking_budget_of(s, self.encoder)
        check_vocabulary(actor, self.tokenizer.vocab_size)
        self.vocab_size = actor.model_vocab_size(self.tokenizer.vocab_size)
        self.prompt_sets, tokens = read_encoded_prompts(s, self.encoder)
        self.images = RunImages.of(config, self.encoder, [Path(asked.options.run) / FOLDER])
        self.prompts, self.prompt_tokens = self.prompt_sets[PROMPTS], tokens[PROMPTS]
        own, stored = resume.data_fingerprints(self.encoder, s, self.prompt_sets), saved.manifest["data"]
        for name in own.keys() & stored.keys():
            if own[name]["sha256"] != stored[name]["sha256"]:
                raise UsageError(f"{flag_of(name)} {own[name]['value']}: is not what the run had; give that one")
        self.weights: pretrained.PretrainedWeights | None = None
        if asked.problem:
            return
        if s.load:
            self.weights = pretrained.checkpoint_weights(s.load, "--load", actor, self.vocab_size)
        else:
            self.weights = pretrained.find_pretrained(actor, self.vocab_size)
        if self.weights is None and asked.options.from_turn is not None:
            raise UsageError(f"--from-turn {asked.options.from_turn}: {_DRAWN}; give --load")


def replay(asked: ReplayRequest, config: RunConfig, timers: Timers) -> int:
    """Shows the response, and what its replay gives; returns 1 if its own policy writes another text."""
    saved, checks, lines = asked.saved, [], [saved_response.heading(asked.saved)]
    inputs, mesh, _ = read_inputs(config, timers, lambda: ReplayInputs(asked, config), sys.stderr)
    if len(mesh["rollout"].replicas) > 1:
        raise UsageError(f"{mesh.size} ranks are {len(mesh['rollout'].replicas)} replicas; a replay has one")
    episodes = EpisodeRunner(config.settings, mesh["rollout"], inputs.encoder)
    try:
        if inputs.weights is None:
            lines += [f"from the record alone: {asked.problem or _DRAWN}"]
            lines += saved_response.saved_turns(saved, episodes.turn_tokens)
        else:
            player = _player(inputs, mesh, episodes, config, timers)
            checks = player.check()
            lines += [f"weights: {asked.load or 'those that the run began with'}"]
            lines += saved_response.saved_turns(saved, episodes.turn_tokens, checks)
            if asked.options.from_turn is not None:
                lines += _fork(asked.options, inputs, episodes, player)
    finally:
        episodes.close()
    if mesh.rank == 0:
        print("\n".join(lines), flush=True)
    return int(asked.options.load is None and not all(check.is_same for check in checks))


def _player(inputs: ReplayInputs, mesh: RoleMesh, episodes: EpisodeRunner, config: RunConfig, timers: Timers) -> Player:
    saved = inputs.saved
    model = load_policy(config.roles["actor"], mesh["actor"], inputs.vocab_size, inputs.weights)
    if inputs.images is not None:
        inputs.images.attach(config.roles["actor"], model)
    role = pretrained.with_stored_factors(config.roles["rollout"], inputs.weights)
    rollout = Rollout(config.settings, role, mesh, model, inputs.tokenizer, timers)
    rollout.load_weights()
    (request,) = _requests(inputs, config.settings).build([saved.place[1]])
    limits = episodes.limits if saved.record is not None else None
    return Player(rollout, saved, request, limits)


def _requests(inputs: ReplayInputs, s: Settings) -> RoundRequests:
    """The request for the response's group, as the step that drew its prompt made it."""
    line = inputs.saved.place[0]
    step, draw = inputs.saved.draw
    limit = inputs.prompts.response_limit(line) or s.max_response_length
    size = inputs.prompts.group_size(line) or s.samples_per_prompt
    prompt = PromptRequest(line, inputs.prompt_tokens.view(line), size, limit, step, draw)
    return RoundRequests([prompt], s.seed, step, inputs.thinking, branching_of(s))


def _fork(options: argparse.Namespace, inputs: ReplayInputs, episodes: EpisodeRunner, player: Player) -> list[str]:
    """Goes on after the turn of `--from-turn` with the given answer; returns what to print."""
    turn, (line, number) = options.from_turn - 1, inputs.saved.place
    prompt = inputs.prompts[line]
    task = episodes.task(_requests(inputs, episodes.settings), number, prompt)
    go_on = _fork_agent if player.saved.is_agent else _fork_environment
    messages, lines = go_on(turn, options.answer, episodes, player, prompt, task)
    if not messages:
        return ["", f"fork: the agent has not come to turn {options.from_turn} again, or sent nothing after it", *lines]
    return ["", f"fork: after turn {options.from_turn} the policy reads", *saved_response.answer(messages), *lines]


def _fork_environment(
    turn: int, texts: list[str], episodes: EpisodeRunner, player: Player, prompt: Prompt, task: Task
) -> tuple[list[Message], list[str]]:
    """(the other answer, the lines of what follows)."""
    saved, client = player.saved, episodes.client
    messages = other_answer(saved.observations[turn], texts)
    episode = player.forked(turn, episodes.turn_tokens.bridge(messages))
    seen: list[Observation] = []
    if client is not None:
        go_on_after(turn, client, saved, prompt, task)
    if episode.end is None:
        episode = player.play(episode, client)
    if client is not None:
        seen = client.take_played(0).observations
    seen = [*seen[:turn], saved.observations[turn], *seen[turn + 1 :]]
    lines = [*saved_response.forked_turns(episode, turn + 1, seen, episodes.turn_tokens)]
    failures = [] if client is None else client.statistics.failures
    return messages, lines + [f"  {reason}" for reason in failures[-1:]]


def _fork_agent(
    turn: int, texts: list[str], episodes: EpisodeRunner, player: Player, prompt: Prompt, task: Task
) -> tuple[list[Message], list[str]]:
    """(the other answer, none if the agent did not come there, the lines of the whole episode)."""
    client, pool = None, None
    if episodes.client is not None:
        assert isinstance(episodes.client.pool, EnvironmentPool)  # a session is not played again
        options = episodes.client.pool.options
        pool = ForkedPool(options, player.saved, turn, texts)
        limits, longest = episodes.limits, episodes.settings.max_prompt_length
        client = EnvironmentClient(options, episodes.turn_tokens, limits, longest, None, 0, 1, pool)
    try:
        episode = player.begun()
        if client is not None:
            client.begin(episode.number, prompt, episode.request, task, None)
        episode = player.play(episode, client)
        episode.settle(None)
    finally:
        if client is not None:
            client.close()
    played = player.saved._replace(episode=episode)
    failures = [] if client is None else [f"  {reason}" for reason in client.statistics.failures]
    answer = [] if pool is None else pool.answer
    return answer, [*saved_response.saved_turns(played, episodes.turn_tokens), *failures]


def prepared(argv: list[str]) -> tuple[ReplayRequest, list[str]]:
    """What a command line asks for, and the flags with which the run's policy generates it. UsageError."""
    options, rest = arguments_of(argv)
    flags, lag = flags_of_run(options.run)
    asked = asked_of(options, lag)
    return asked, [*flags, *(["--load", asked.load] if asked.load else []), *rest]


def main(argv: list[str]):
    """Runs the program with the flags of the run."""
    try:
        asked, flags = prepared(argv)
    except UsageError as error:
        refuse(int(os.environ.get("RANK", 0)), error)
        sys.exit(2)
    os.environ[WARNED] = "1"  # that flags of training have no effect is no news
    sys.argv = [sys.argv[0], *flags]
    launch(partial(replay, asked), "rl")


if __name__ == "__main__":
    main(sys.argv[1:])
