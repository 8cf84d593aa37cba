"""Lines and their teachers; a teacher that gets the policy's weights has the policy's model."""

from types import SimpleNamespace

import pytest

from megarl.data.prompts import load_prompts
from megarl.flags.distillation import TeacherModels
from megarl.mcore.config.supported_flags import ARCHITECTURE
from megarl.trainers.teacher_inputs import check_same_model, teachers_of_lines
from tests.helpers.programs import write_lines
from tests.helpers.texts.character_tokenizer import PLAIN
from tests.helpers.texts.refusals import refusal


def lines_of(folder, *teachers):
    rows = [{"prompt": "1", "answer": "1"} | ({} if name is None else {"teacher": name}) for name in teachers]
    return load_prompts(str(write_lines(folder / "a.jsonl", rows)))


def config_of(*names: str):
    return SimpleNamespace(teachers=TeacherModels(names))


def test_each_line_has_the_number_of_its_teacher(tmp_path):
    prompts, numbers = teachers_of_lines(
        lines_of(tmp_path, "code", None, "math"), config_of("math", "default", "code"), PLAIN
    )
    assert numbers.tolist() == [2, 1, 0] and not prompts.notes


def test_what_is_not_read_and_who_has_nothing_to_do_is_said(tmp_path):
    prompts, numbers = teachers_of_lines(lines_of(tmp_path, "math"), config_of("math", "code"), PLAIN)
    assert numbers.tolist() == [0] and prompts.notes[-1].endswith("no line has the teacher code of --teachers")
    prompts, numbers = teachers_of_lines(lines_of(tmp_path, "math"), config_of(), PLAIN)
    assert numbers is None and prompts.notes[-1].endswith("teacher is not read without --teachers")


@pytest.mark.parametrize("teachers, says", [
    (("math", "x"), "a.jsonl:2: teacher 'x' is not in --teachers; allowed: math, code"),
    (("math", None), "a.jsonl:2: teacher is missing, and --teachers has none called default; allowed: math, code"),
])  # fmt: skip
def test_lines_without_a_teacher_are_refused(teachers, says, tmp_path):
    assert refusal(teachers_of_lines, lines_of(tmp_path, *teachers), config_of("math", "code"), PLAIN).endswith(says)


def test_another_model_is_refused():
    def role(name: str, layers: int):
        megatron = SimpleNamespace(**dict.fromkeys(ARCHITECTURE) | {"num_layers": layers})
        return SimpleNamespace(name=name, megatron=megatron)

    check_same_model("--teacher self", role("actor", 2), role("teacher", 2))
    line = refusal(check_same_model, "--teacher self", role("actor", 2), role("teacher", 3))
    assert line.startswith("--teacher self: the teacher gets the actor's weights, but --num-layers is 3 there and 2 in")
