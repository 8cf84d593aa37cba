"""Building verifiers: names, plug-ins, what prompts need, lazy imports."""

import subprocess
import sys

import pytest

from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from megarl.flags.settings import Settings
from megarl.rewards.base import Sample, Score
from megarl.rewards.chosen_verifiers import Options, build_named_verifiers, build_verifiers, check_prompts
from tests.helpers.programs import write_lines
from tests.helpers.texts.refusals import refusal


def outcome_of(name: str, *sample) -> Score | str:
    """What one verifier says of one sample."""
    return build_named_verifiers(Options.of(Settings()), [name])[name].outcomes([Sample(*sample)])[0]


def check(name: str, prompts, scores_here: bool = False):
    check_prompts(Settings(reward=name), prompts, scores_here)


def prompts_of(tmp_path, *lines):
    return load_prompts(str(write_lines(tmp_path / "p.jsonl", [*lines])))


def test_packages_are_imported_only_to_score_and_torch_never(tmp_path):
    prompts_of(tmp_path, {"prompt": "1 + 1 =", "answer": "2", "metadata": {"source_dataset": "chain_sum"}})
    program = """if True:
        import sys
        from types import SimpleNamespace
        from megarl.data.prompts import load_prompts
        from megarl.rewards.chosen_verifiers import build_verifiers, check_prompts
        prompts = load_prompts(sys.argv[1])
        flags = dict.fromkeys(("pattern", "format", "url"), "a") | {"length": 1, "retries": 0, "concurrency": 1}
        flags |= {"memory_mb": 1, "timeout": 9.0, "workers": 1, "fallback": 0.0}
        settings = SimpleNamespace(**{"reward_" + name: value for name, value in flags.items()})
        settings.reward = "reasoning-gym+format+length+regex+math-verify+code"
        settings.prompts, settings.eval_prompts, settings.evals = sys.argv[1], None, None
        build_verifiers(settings)
        settings.reward = "reasoning-gym+math-verify"
        check_prompts(settings, prompts)
        assert not {"reasoning_gym", "sympy", "urllib3"} & set(sys.modules)
        check_prompts(settings, prompts, scores_here=True)
        assert "sympy" in sys.modules and "reasoning_gym" not in sys.modules  # which a process of its own imports
        import megarl.rewards.remote
        assert "torch" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "p.jsonl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_prompts_must_suit_the_reward(tmp_path):
    good = {"prompt": "a", "answer": "b", "metadata": {"source_dataset": "chain_sum"}}
    check("exact-match", prompts_of(tmp_path, good))
    check("reasoning-gym", prompts_of(tmp_path, good), scores_here=True)
    for name, bad, message in [
        ("exact-match", {"prompt": "a"}, "needs an answer"),
        ("exact-match", {"prompt": "a", "answer": " "}, "needs an answer"),
        ("reasoning-gym", {"prompt": "a", "answer": "b"}, "source_dataset"),
        ("reasoning-gym", {"prompt": "a", "metadata": {"source_dataset": 3}}, "source_dataset"),
        ("math-verify", {"prompt": "a"}, "needs an answer"),
    ]:
        with pytest.raises(UsageError, match=rf"p\.jsonl:2: --reward {name}.*{message}"):
            check(name, prompts_of(tmp_path, good, bad))
    unknown = prompts_of(tmp_path, good, {"prompt": "a", "metadata": {"source_dataset": "no_such_task"}})
    check("reasoning-gym", unknown)
    with pytest.raises(UsageError, match=r"p\.jsonl:2: .*no scorer for task 'no_such_task'"):
        check("reasoning-gym", unknown, scores_here=True)
    unreadable = prompts_of(tmp_path, good, {"prompt": "a", "answer": "x plus"})
    check("exact-match+math-verify", unreadable, scores_here=True)  # it is compared as text


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "from megarl.rewards.base import Score\n"
        "limit = 3\n"
        "def scored(sample):\n    return Score(0.75, True, {'a': 0.5, 'b': 0.25})\n"
        "def length(sample):\n    return len(sample.response)\n"
        "from megarl.rewards import of_trl\n"
        "of_peer = of_trl(lambda completions, solution, level=1, **others: [len(completions[0])])\n"
    )
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_plugin(plugin, tmp_path):
    assert outcome_of("my_rewards:scored", "q", "a") == Score(0.75, True, {"a": 0.5, "b": 0.25})
    # A plain number: the whole response is the answer.
    assert outcome_of("my_rewards:length", "q", " abc") == Score(4.0, True, extracted="abc")
    assert outcome_of("my_rewards:length", "q", "abc", None, None, False) == Score(3.0, True)
    assert outcome_of("my_rewards:length", "q", "") == Score(0.0, False)
    check("my_rewards:length", prompts_of(tmp_path, {"prompt": "a"}), scores_here=True)


def test_data_without_a_column_of_a_plugin_is_refused(plugin, tmp_path):
    good = {"prompt": "a", "metadata": {"solution": "b"}}
    for name in ("my_rewards:of_peer", f"{tmp_path}/my_rewards.py:of_peer"):
        check(name, prompts_of(tmp_path, good))
        line = rf"p\.jsonl:2: --reward {name} needs the column solution; the line has prompt, answer, level$"
        with pytest.raises(UsageError, match=line):
            check(name, prompts_of(tmp_path, good, {"prompt": "a", "answer": "b", "metadata": {"level": 2}}))


KNOWN = (
    "model, judge, environment, exact-match, regex, math-verify, reasoning-gym, format, length, code, remote, cosine, "
    "repetition, truncated, adaptive-length, or a plug-in as file.py:function or package.module:function"
)


@pytest.mark.parametrize("name, message", [
    ("exactmatch", f"exactmatch is unknown; allowed: {KNOWN}"), (":scored", ":scored is unknown; allowed"),
    ("my_rewards:", "my_rewards: is unknown; allowed"), ("my_rewards:nothing", "my_rewards has no nothing"),
    ("no_such_module:f", "cannot import no_such_module: ModuleNotFoundError"),
    ("broken_rewards:f", "cannot import broken_rewards: ZeroDivisionError"),
    ("my_rewards:limit", "my_rewards has a non-callable limit"),
])  # fmt: skip
def test_wrong_reward_names(plugin, name, message):
    assert refusal(build_verifiers, Settings(reward=name)).startswith(f"--reward {name}: {message}")
