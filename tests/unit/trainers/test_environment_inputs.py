"""What is checked of environments: a template whose calls nothing reads is refused or said, never ignored."""

import itertools

import numpy
import pytest

from megarl.data.prompts import load_prompts
from megarl.data.turns import TurnTokens
from megarl.environments.pool import PoolOptions
from megarl.environments.protocol import Task
from megarl.errors import UsageError
from megarl.flags.settings import Settings
from megarl.mcore.inference.generation import GenerationRequest
from megarl.rollout.episodes.client import EnvironmentClient
from megarl.rollout.episodes.episode import EpisodeLimits
from megarl.trainers.environment_inputs import _measured, check_environments, fitting
from tests.helpers.envs.greeting_environments import HERE, TOOL
from tests.helpers.programs import program, rl_argv, write_lines
from tests.helpers.texts.chat_encoders import encoder_of
from tests.helpers.texts.chat_templates import TEMPLATES
from tests.helpers.texts.picture_prompts import encoder_of as picture_encoder_of
from tests.helpers.texts.picture_prompts import write_folder
from tests.helpers.texts.small_tokenizers import PYTHONIC, chatml
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS

PROBLEM = "--tool-call-parser auto: no format reads the calls that --chat-template writes; name one of hermes,"


def checked(tmp_path, environment: str):
    settings = program("rl", rl_argv(tmp_path / "run", f"--environment {environment} --max-turns 2"), 1).settings
    check_environments(settings, encoder_of(tmp_path / "tokenizer", chatml, PYTHONIC), {})


def test_agents_hear_that_no_call_would_be_read(tmp_path, capfd):
    checked(tmp_path, "tests.helpers.envs.agents:sums")
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("megarl: "))
    assert line.startswith(f"megarl: warning: {PROBLEM}") and line.endswith("or a function, if agents offer tools")


def test_environments_with_tools_are_refused(tmp_path):
    with pytest.raises(UsageError, match=PROBLEM):
        checked(tmp_path, "calculator")


# -- prompts as a run with an environment builds them --------------------------------------------------------------


SHORT, MIDDLE, LONG = "Hi", "What is the answer to the question?", "the world and the world? " * 24
SYSTEM = [{"role": "system", "content": "Be kind to the world."}, {"role": "user", "content": SHORT}]
OTHER_TOOL = {**TOOL, "function": {**TOOL["function"], "name": "own"}}
ROWS = [
    {"prompt": MIDDLE, "metadata": {"story": "A short story."}},
    {"prompt": LONG, "metadata": {"story": "A short story, but not the same."}},
    {"prompt": SYSTEM, "metadata": {"story": "the world " * 99}},
    {"prompt": SHORT, "tools": [OTHER_TOOL], "metadata": {"story": "so"}},
    {"prompt": SHORT, "metadata": {"story": ""}},
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return encoder_of(tmp_path_factory.mktemp("hermes") / "files", *TEMPLATES["hermes"][:2])


class Case:
    """A file, an environment and a limit."""

    def __init__(self, folder, encoder, environment: str, rows=ROWS, **settings):
        name = environment if ":" in environment or environment.islower() else f"{HERE}:{environment}"
        given = {"max_prompt_length": 10_000, "environment_timeout": SAFETY_SECONDS} | settings
        self.settings, self.encoder = Settings(environment=name, **given), encoder
        self.path = write_lines(folder / "lines.jsonl", rows)
        self.prompts = load_prompts(str(self.path))
        self.tokens = self.prompts.encode(encoder)

    def fitting(self) -> tuple[list[str], list[str], list[int]]:
        """(texts of the prompts that fit, notes of the environment, lengths of their tokens alone)."""
        prompts, tokens = fitting(self.settings, self.encoder, self.prompts, self.tokens)
        notes = [note.removeprefix(f"--prompts {self.path}: ") for note in prompts.notes]
        return [prompt.text for prompt in prompts], notes, list(map(len, tokens))

    def measured(self) -> list[int]:
        """Lengths as the check measures them."""
        alone = numpy.diff(self.tokens.offsets)
        return _measured(self.settings, self.encoder, self.prompts, alone)["lengths"].tolist()

    def built(self) -> list[int]:
        """Tokens of the prompts that a run builds."""
        options = PoolOptions(1, SAFETY_SECONDS, 0, "hermes", self.settings.environment)
        turns = TurnTokens(self.encoder, 1024)
        client = EnvironmentClient(options, turns, EpisodeLimits(9, 9, 99), 10_000, None, 0, 1)
        found: dict[int, int] = {}
        try:
            for prompt in self.prompts:
                task = Task([dict(message) for message in prompt.conversation], metadata=prompt.metadata)
                client.begin(prompt.index, prompt, GenerationRequest(self.tokens[prompt.index], 0, 0), task, None)
            for _ in itertools.count():
                client.wait(1.0)
                for result in client.results():
                    assert not result.failed
                    found[result.number] = len(result.tokens)
                if len(found) == len(self.prompts):
                    return [found[number] for number in range(len(found))]
        finally:
            client.close()
        return []


@pytest.fixture
def case(tmp_path, encoder):
    return lambda *args, **settings: Case(tmp_path, encoder, *args, **settings)


@pytest.mark.parametrize("environment", ["calculator", "Greets", "Equips"])
def test_the_check_measures_what_a_run_builds(environment, case):
    made = case(environment)
    built, alone = made.built(), list(map(len, made.tokens))
    assert all(more > less for more, less in zip(built, alone, strict=True) if more != alone[3])
    assert made.measured() == built


def test_what_depends_on_the_line_counts_where_it_is_known(case):
    made = case("Tells")
    built, found = made.built(), made.measured()
    assert found == [built[row] if row in (1, 4) else len(tokens) for row, tokens in enumerate(made.tokens)]
    _, (note,), _ = made.fitting()
    assert note.endswith(f"; it adds other text on other lines, which counts on --prompts {made.path}:2 alone")
    made = case("Tells", max_prompt_length=built[1] - 1)
    with pytest.raises(UsageError) as caught:
        made.fitting()
    assert str(caught.value).startswith(f"--prompts {made.path}:2: the prompt has {built[1]} tokens with the first ")


def test_a_line_keeps_its_own_tools_beside_a_message(case, encoder):
    made, said = case("Greets"), []
    tools = [OTHER_TOOL]
    for given in (None, tools):
        messages = [*made.prompts[3].conversation, {"role": "user", "content": "Answer with one word. " * 3}]
        said.append(len(encoder.chat_prompt(messages, given)))
    assert said[0] < said[1] == made.built()[3]


@pytest.mark.parametrize("environment", [long("calculator"), "Greets", long("Equips")])
def test_a_prompt_that_is_too_long_is_refused_or_dropped(environment, case):
    made = case(environment)
    longest, *others = sorted(made.measured(), reverse=True)
    texts, (note,), _ = case(environment, max_prompt_length=longest).fitting()
    assert len(texts) == len(ROWS) and note.startswith(f"prompts have at most {longest} tokens with the ")
    with pytest.raises(UsageError) as caught:
        case(environment, max_prompt_length=longest - 1).fitting()
    assert str(caught.value).startswith(f"--prompts {made.path}:2: the prompt has {longest} tokens with the ")
    assert str(caught.value).endswith(f"allows {longest - 1}; --filter-long-prompts drops such lines")
    filtered = case(environment, max_prompt_length=longest - 1, filter_long_prompts=True).fitting()
    assert filtered[0] == [text for text in texts if text != LONG]
    assert filtered[1][0].startswith(f"prompts have at most {others[0]} tokens with ")
    assert filtered[1][1] == (
        f"dropped 1 of 5 prompts, with what their environments add, longer than {longest - 1} tokens"
    )
    assert filtered[2] == [len(row) for number, row in enumerate(made.tokens) if number != 1]
    with pytest.raises(UsageError, match="each of the 5 prompts, with what their environments add, of --prompts"):
        case(environment, max_prompt_length=others[-1] - 1, filter_long_prompts=True).fitting()


@pytest.mark.parametrize("environment, seconds, said", [
    ("Raises", SAFETY_SECONDS, r"ConnectionError: no game\nserver"), ("Hangs", 0.2, "no answer within 0.2 s"),
    ("Leaves", SAFETY_SECONDS, "its process ended with status 3"),
])  # fmt: skip
def test_a_reset_that_fails_is_said(environment, seconds, said, case):
    made = case(environment, environment_timeout=seconds)
    failure = f"the reset of --environment {HERE}:{environment} failed on one of its lines, --prompts {made.path}:2: "
    texts, notes, _ = made.fitting()
    assert len(texts) == len(ROWS) and notes == [f"{failure}{said}; what it adds to prompts is not counted"]
    with pytest.raises(UsageError) as caught:
        case(environment, environment_timeout=seconds, filter_long_prompts=True).fitting()
    assert str(caught.value) == f"--filter-long-prompts: {failure}{said}"


def test_each_line_has_its_own_environment(case):
    rows = [
        *ROWS,
        {"prompt": LONG, "environment": f"{HERE}:Greets"},
        {"prompt": "x", "environment": "calculator-agent"},
    ]
    made = case("calculator", rows)
    _, notes, _ = made.fitting()
    lengths = made.measured()
    assert lengths[-1] == len(made.tokens[6])
    assert [note.split(" with ")[0] for note in notes] == [
        f"prompts have at most {max(lengths[:5])} tokens",
        "what the agent calculator-agent asks is not known before the run; tokens of its first request beyond "
        "--max-prompt-length count as response",
        f"prompts have at most {lengths[5]} tokens",
    ]  # fmt: skip


def test_what_drivers_ask_is_not_known(case):
    texts, (note,), _ = case("agent-sessions", agent_sessions=True).fitting()
    assert len(texts) == len(ROWS) and note.startswith("what a driver asks is not known before the run; ")


def test_tools_of_a_reset_need_a_template_whose_calls_are_read(tmp_path):
    unread = encoder_of(tmp_path / "pythonic", chatml, PYTHONIC)
    Case(tmp_path, unread, "Greets", [{"prompt": SHORT}]).fitting()
    with pytest.raises(UsageError, match="no format reads the calls"):
        Case(tmp_path, unread, "Equips", [{"prompt": SHORT}]).fitting()


# -- images ------------------------------------------------------------------------------------------------------------


PICTURED = "tests.helpers.envs.sum_environments:PicturedSums"


def test_images_of_a_reset_count_and_are_known_at_the_start(case, tmp_path):
    made = case(PICTURED, [{"prompt": "Hi"}])
    with pytest.raises(UsageError) as caught:
        made.fitting()
    expected = "its messages have images; the model has no vision tower, or no chat template"
    assert str(caught.value) == f"--environment {PICTURED}: {expected}"
    made.encoder = picture_encoder_of(write_folder(tmp_path / "vision"))
    made.tokens = made.prompts.encode(made.encoder)
    _, (note,), (alone,) = made.fitting()
    images = made.encoder.images
    assert images.are_shown and images.of_data == 0  # which says how many data have
    length = int(note.removeprefix("prompts have at most ").partition(" ")[0])
    assert length > alone + 60 and note.endswith(f"tokens with the first message of --environment {PICTURED}")
