"""Flags of distillation: a teacher whose distributions the policy learns, on its own responses or on given ones."""

import dataclasses
from typing import Any

from megarl.algorithms.divergence import DIVERGENCES
from megarl.algorithms.estimators import NO_ADVANTAGE
from megarl.flags.fields import flag, not_negative, one_of, parses, positive
from megarl.named_paths import ALLOWED, parse_named_paths
from megarl.observe.alarms import ALARMS_WITHOUT_REWARD
from megarl.rewards import expression

NONE, REWARD, LOSS = FORMS = ("none", "reward", "loss")
GIVEN, START, AVERAGE = TEACHERS = ("given", "self", "ema")
PROMPT, SIBLING = CONTEXTS = ("prompt", "sibling")
STUDENTS = "rl sft"


@dataclasses.dataclass(frozen=True)
class DistillSettings:
    """How the policy learns from the teacher."""

    distill: str = one_of(NONE, FORMS, "learn from a teacher: its log-prob of each token adds to the advantage"
                           " (reward), or a divergence over the whole vocabulary is a loss (loss, 2306.13649)",
                           programs=STUDENTS, when="trained")  # fmt: skip
    teacher: str = one_of(GIVEN, TEACHERS, "the teacher's weights: those of --teacher-hf-model or"
                           " --teacher-pretrained-checkpoint (given), those that the policy starts from (self), or in"
                           " train_rl its moving average, --ema-decay (ema)", programs=STUDENTS,
                           when="distill")  # fmt: skip
    teachers: str | None = flag(None, "several teachers, NAME=FOLDER …: Hugging Face folders, or run folders of megarl;"
                                " the field teacher of a prompt's line names one, and a line without it has the one"
                                " called default", parses(parse_named_paths), f"NAME=FOLDER …, {ALLOWED}",
                                programs=STUDENTS, when="distill", several=True)  # fmt: skip
    teacher_temperature: float = positive(1.0, "temperature of the teacher's distributions, whatever the policy's is",
                                          programs=STUDENTS, when="distill")  # fmt: skip
    teacher_max_prompt_length: int | None = positive(None, "maximum length of the prompt that a teacher reads, which"
                                                      " may be a line's teacher_prompt or have a sibling's response,"
                                                      " tokens; default: --max-prompt-length",
                                                      when="distill")  # fmt: skip
    teacher_context: str = one_of(PROMPT, CONTEXTS, "what the teacher reads before a response: the prompt, or a correct"
                                   " response of the same group and then the question (sibling)", programs="rl",
                                   when="distill")  # fmt: skip
    teacher_context_reward: float = flag(0.0, "a sibling's response is read if its reward is the highest of its group"
                                         " and above this; 1 is that of a correct one where no term of --reward counts",
                                         when="context")  # fmt: skip
    teacher_context_template: str = flag("configs/teacher_context.txt", "text file with the places {question} and"
                                         " {response}: what the teacher reads instead of the user's last message",
                                         when="context")  # fmt: skip
    distill_coefficient: float = positive(1.0, "weight of what the teacher says: of its share of the advantage, or"
                                           " of the divergence in the loss", programs=STUDENTS,
                                           when="distill")  # fmt: skip
    distill_divergence: str = one_of("reverse", DIVERGENCES, "divergence of the loss: KL(teacher‖policy) (forward),"
                                      " KL(policy‖teacher) (reverse), or the generalized Jensen-Shannon divergence"
                                      " (jsd)", programs=STUDENTS, when="distill-loss")  # fmt: skip
    distill_beta: float = flag(0.5, "share β of the teacher in the mixture of jsd", lambda v: 0 < v < 1,
                                "between 0 and 1", programs=STUDENTS, when="jsd")  # fmt: skip
    distill_sft_coefficient: float = not_negative(0.0, "weight of the cross-entropy of the given tokens beside the"
                                                   " divergence", programs="sft", when="distill-loss")  # fmt: skip

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """The teachers of `--teachers`; none of a run with one teacher, or none."""
        return () if self.teachers is None else tuple(parse_named_paths(self.teachers))

    @property
    def teacher_fields(self) -> tuple[str, ...]:
        """Batch fields that the teacher computes for the actor; several say whose they are."""
        found = {NONE: (), REWARD: ("teacher_logprobs",), LOSS: ("teacher_states",)}[self.distill]
        return (*found, "teacher_ids") if found and self.teachers is not None else found


def with_defaults_of_distillation(fields: dict[str, Any]) -> dict[str, Any]:
    """Values of megarl's own flags of a run that has a teacher: without a reward that counts it has no advantages."""
    reward = fields.get("reward", expression.NONE)
    if any(term.weight for term in expression.parse(reward)):
        return fields
    of_teacher_alone = {"advantage": NO_ADVANTAGE, "kl_coefficient": 0.0, "alarms": ALARMS_WITHOUT_REWARD}
    return of_teacher_alone | fields | {"reward": reward}
