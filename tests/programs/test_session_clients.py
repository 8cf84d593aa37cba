"""NeMo Gym and verifiers, unchanged, as drivers of sessions (`--agent-sessions`): their servers, agents and proxies."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.environments.calls import Answer, Asked, Reply
from megarl.environments.protocol import parse_turn
from tests.helpers.envs import agent_programs
from tests.helpers.envs.open_sessions import LOGPROBS, PROMPT, TOKENS, open_sessions
from tests.helpers.envs.session_driver import free_port
from tests.helpers.programs import metrics, program, rl_argv
from tests.helpers.rollout.engine_records import asked_and_written, generated, recorded, turns_in_rows
from tests.helpers.waiting import SAFETY_SECONDS
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.nightly
HERE = Path(agent_programs.__file__).parent
CALL = '<think>so</think>Look. <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
PACKAGES = {"nemo_gym": ["nemo-gym>=0.4,<0.5"], "verifiers": ["verifiers>=0.4,<0.5", "uv"]}
NEMO_GYM, VERIFIERS = PACKAGES
GAME = ["<think>so</think>4", "6", "it is 5"], ["2+3=", "4", "and?", "6", "so?"]  # what the policy writes, and sees
TOOL = [CALL, "It is cold."], ["2+3=", "Look.", '{"city":"Rome","weather_description":"The weather in Rome is cold."}']
CASES = {
    (NEMO_GYM, "game"): GAME, (NEMO_GYM, "tool"): TOOL, (NEMO_GYM, "responses"): TOOL, (VERIFIERS, "game"): GAME,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of the programs of an environment with a package."""

    @functools.cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "-q", *PACKAGES[name]], check=True)
        return folder / "bin"

    return made


@contextlib.contextmanager
def driver(name: str, folder: Path, url: str, out: Path, kind: str) -> Iterator[subprocess.Popen]:
    """The driver of a package, from its environment's folder of programs."""
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = [folder / "python", HERE / f"{name}_driver.py", url, out, kind]
    process = subprocess.Popen(command, cwd=out.parent, env=os.environ | path)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def results(out: Path) -> list[dict]:
    """What a driver has of each episode."""
    return [json.loads(line) for line in out.read_text().splitlines()]


def turns(found: dict) -> list[dict]:
    """The items of the policy's turns in a result: those that have tokens."""
    return [item for item in found["output"] if item.get("generation_token_ids")]


@pytest.mark.parametrize("name, kind", CASES)
def test_a_policy_that_knows_the_task_solves_it(name, kind, folders, tmp_path):
    asks, (script, seen) = [], CASES[name, kind]
    with open_sessions(api_keys=()) as leader, driver(name, folders(name), leader.url, tmp_path / "out.jsonl", kind):
        leader.offer(0)
        while not isinstance(came := leader.next(), Answer):
            assert isinstance(came, Asked)
            text = script[len(asks)]
            turn = parse_turn(text, len(asks), leader.pool.form, came.ask.tools or (), text)
            asks.append(came.ask)
            reply = Reply(turn, prompt=PROMPT, tokens=TOKENS, logprobs=LOGPROBS)
            leader.pool.reply(came.number, came.ticket, came.request, reply)
    assert came.failure is None and came.observation.reward == 1.0
    assert [message["content"] for message in asks[-1].messages] == seen and len(asks) == len(script)
    if name == VERIFIERS:
        return  # it reads no tokens
    (found,) = results(tmp_path / "out.jsonl")
    tokens = [
        {name: item[name] for name in item if name.startswith(("prompt_", "generation_"))} for item in turns(found)
    ]
    assert tokens == len(asks) * [
        {"prompt_token_ids": PROMPT, "generation_token_ids": TOKENS, "generation_log_probs": LOGPROBS}
    ]


@pytest.mark.parametrize("name, kind", [(NEMO_GYM, "game"), (NEMO_GYM, "responses"), (VERIFIERS, "game")])
def test_what_is_trained_on_is_what_the_driver_has_seen(name, kind, folders, tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    port, out = free_port(), tmp_path / "out.jsonl"
    (tmp_path / "template.jinja").write_text(agent_programs.TEMPLATE)
    flags = (
        f"--agent-sessions --port {port} --chat-template {tmp_path / 'template.jinja'}"
        " --max-turns 3 --max-turn-length 4 --max-prompt-length 400"
        " --max-response-length 100 --max-tokens-per-microbatch 600 --rollout-max-requests 16 --environment-timeout 300"
        " --train-iters 2 --prompts-per-step 2 --samples-per-prompt 2 --minibatch-size 4 --save-rollouts"
        " --save-interval 1 --advantage rloo --kl-coefficient 0"
    )
    parsed = program("rl", rl_argv(tmp_path / "run", flags), 1)
    with driver(name, folders(name), f"http://127.0.0.1:{port}", out, kind) as process:
        run_world(recorded, 1, parsed, tmp_path / "seen.json")
        assert process.wait(SAFETY_SECONDS) == 0
    rows = metrics(tmp_path / "run")
    assert set(rows) == {1, 2} and len(results(out)) == 8
    rollouts = [fields for step in (1, 2) for fields in generated(tmp_path / "run", step).values()]
    trained = sorted(list(turn) for fields in rollouts for turn in turns_in_rows(*fields))
    assert trained == asked_and_written(tmp_path / "seen.json")
    assert len(trained) >= 8 * (3 if kind == "game" else 1)
    if name == NEMO_GYM:
        theirs = [item for found in results(out) for item in turns(found)]
        assert trained == sorted([item["prompt_token_ids"], item["generation_token_ids"]] for item in theirs)
        masked = [pair for _, logprobs, mask, *_ in rollouts for pair in zip(logprobs, mask, strict=True)]
        logprobs = sorted(value for item in theirs for value in item["generation_log_probs"])
        assert sorted(value for value, is_own in masked if is_own) == pytest.approx(logprobs, abs=0)
    for row in rows.values():
        assert row["environment/failures"] == 0 and row["rollout/logprob_gap_max"] == 0
        assert row["actor/ppo_kl_first"] == 0
