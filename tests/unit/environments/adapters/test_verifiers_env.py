"""Environments of verifiers with the real package, which the test extra does not install: it would bring 96 others."""

import asyncio
import json
from pathlib import Path

import pytest

from megarl.data.prompts import load_prompts
from megarl.environments.adapters.verifiers_env import VerifiersEnvironment, verifiers_prompt
from megarl.environments.protocol import Task
from megarl.errors import UsageError
from tests.helpers.envs.played_environments import check_replay, play, said, written

REFERENCES = Path(__file__).parents[3] / "references"


@pytest.fixture
def guess(monkeypatch):
    """The module of the taskset."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(REFERENCES)
    import verifiers_guess

    return verifiers_guess


@pytest.fixture
def env(guess):
    return guess.GuessEnv(guess.GuessEnvConfig(taskset=guess.vf.TasksetConfig(id="verifiers_guess")))


def lines(env):
    return [verifiers_prompt(task) for task in env.taskset]


def task_of(env, number):
    line = json.loads(json.dumps(lines(env)[number]))
    return Task(line["prompt"], metadata=line["metadata"])


def test_tasks_are_lines_of_a_prompt_file(env, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines(env)))
    prompts = load_prompts(str(file))
    assert len(prompts) == 5 and prompts[2].metadata["task"]["number"] == 2
    assert lines(env)[0]["prompt"] == [{"role": "system", "content": "Be brief."},
                                       {"role": "user", "content": "Guess 0 to 4."}]  # fmt: skip


def test_an_exchange_and_its_rewards(env):
    first, observations = play(VerifiersEnvironment(env), task_of(env, 3), written("1", "4", "3"))
    assert first.messages == [] and said(observations) == ["higher", "lower", ""]
    assert observations[-1].parts == {"right": 2.0, "short": 0.0, "transcript": 0.25}
    assert [(o.reward, o.done) for o in observations] == [(0.0, False), (0.0, False), (2.25, True)]
    _, observations = play(VerifiersEnvironment(env), task_of(env, 3), written("3", "never read"))
    assert [(o.reward, o.done) for o in observations] == [(2.75, True)]


def test_a_stop_of_the_task_ends_the_episode(env):
    _, observations = play(VerifiersEnvironment(env), task_of(env, 3), written("1", "enough", "3"))
    assert [o.done for o in observations] == [False, True] and observations[-1].parts["right"] == 0.0


def test_an_exception_of_the_environment_is_its_failure(env):
    with pytest.raises(KeyError, match="broken"):
        play(VerifiersEnvironment(env), task_of(env, 3), written("1", "crash"))


def test_a_single_turn_environment(guess):
    from verifiers.v1.envs.single_agent.env import SingleAgentEnv, SingleAgentEnvConfig

    env = SingleAgentEnv(SingleAgentEnvConfig(taskset=guess.vf.TasksetConfig(id="verifiers_guess")))
    _, observations = play(VerifiersEnvironment(env), task_of(env, 4), written("4", "never read"))
    assert [(o.reward, o.done, o.parts) for o in observations] == [(2.5, True, {"right": 2.0, "short": 0.5})]


def test_episodes_at_the_same_time_share_the_environment(env):
    async def episode(number):
        environment = VerifiersEnvironment(env)
        await environment.reset(task_of(env, number))
        answers = []
        for turn in written("2", "enough"):
            answers.append(await environment.step(turn))
            if answers[-1].done:
                break
        await environment.close()
        return said(answers)

    async def together():
        return await asyncio.gather(*map(episode, range(5)))

    assert asyncio.run(together()) == [["lower", ""], ["lower", ""], [""], ["higher", ""], ["higher", ""]]


def test_an_episode_that_is_given_up_leaves_no_task(env):
    async def given_up():
        environment = VerifiersEnvironment(env)
        await environment.reset(task_of(env, 1))
        await environment.step(written("0")[0])
        await environment.close()
        await environment.close()
        await VerifiersEnvironment(env).close()
        return len(asyncio.all_tasks())

    assert asyncio.run(given_up()) == 1, "only the test's own"


def test_restored_at_each_turn(env):
    check_replay(lambda: VerifiersEnvironment(env), task_of(env, 3), written("1", "4", "3"))


def test_what_needs_verifiers_own_runtimes_is_refused(env, guess, monkeypatch):
    vf, task = guess.vf, guess.GuessTask

    async def setup(self, trace, runtime):
        pass

    async def needy(self, trace: vf.Trace, runtime) -> float:
        return 1.0

    async def on_request(self, request: vf.Request) -> bool:
        return False

    for name, value, problem in [
        ("NEEDS_CONTAINER", True, "containers or tool servers"),
        ("toolsets", classmethod(lambda cls, config: ["a server"]), "containers or tool servers"),
        ("setup", setup, "setup or finalize for a runtime"),
        ("needy", vf.reward(needy), "rewards or metrics need a runtime"),
        ("on_request", vf.stop(on_request), "hooks on requests or responses"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(task, name, value, raising=False)
            with pytest.raises(UsageError, match=f"VerifiersEnvironment verifiers_guess: .*{problem}"):
                VerifiersEnvironment(env)
    VerifiersEnvironment(env)

    class Two(guess.GuessEnvConfig):
        other: vf.AgentConfig = vf.AgentConfig()

    monkeypatch.setattr(env, "config", Two(taskset=env.config.taskset))
    with pytest.raises(UsageError, match="has 2 agents"):
        VerifiersEnvironment(env)


@pytest.mark.parametrize("metadata", [{}, {"task": 3}, {"task": {}}])
def test_wrong_metadata(env, metadata):
    with pytest.raises(ValueError, match="metadata must hold task|validation error"):
        play(VerifiersEnvironment(env), Task([], metadata=metadata), [])
