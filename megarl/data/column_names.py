"""Names of columns in published files: which are fields of a prompt, and which change a prompt and are not read.

The names are those that verl, TRL, OpenRLHF, slime, ms-swift, LLaMA-Factory, axolotl and NeMo-RL read. A column of no
list is metadata in reinforcement learning and evaluation; other programs do not read it.
"""

from megarl.data.messages import THOUGHTS
from megarl.data.prompt import FIELD_TYPES

VERL_ANSWER = "reward_model.ground_truth"
# What prompts are read for; evaluation reads them as reinforcement learning. LABELLED: single responses, or pairs.
RL, SFT, REWARD, LABELLED = "rl", "sft", "reward", "labelled"
# Columns that have a part in any prompt: all programs read them. The text of `system` becomes the first message.
_PROMPT = {
    "prompt": ("prompt", "question", "problem", "instruction", "input", "query"),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
}
# Field -> names of its column, the first that a file has counts.
NAMES = {
    RL: {
        **_PROMPT,
        "answer": (VERL_ANSWER, "answer", "solution", "ground_truth", "label"),
        "task": ("task", "data_source"),
        "environment": ("environment",),
        "teacher_prompt": ("teacher_prompt",),
        "teacher": ("teacher",),
    },
    SFT: {
        **_PROMPT,
        "messages": ("messages", "conversations"),
        "response": ("response", "completion", "output", "answer", "solution"),
        "teacher": ("teacher",),
    },
    REWARD: {**_PROMPT, "chosen": ("chosen",), "rejected": ("rejected",), "margin": ("margin",)},
}
_LABELLED = {"response": ("response", "completion", "output"), "desirable": ("desirable", "label")}
NAMES[LABELLED] = NAMES[REWARD] | _LABELLED
NEEDED = {
    RL: ("prompt",),
    SFT: ("prompt", "response"),
    REWARD: ("chosen", "rejected"),
    LABELLED: ("prompt", "response", "desirable"),
}
# Fields that are the name of something: an object or a list in such a column is another thing.
NAME_FIELDS = frozenset(("task", "teacher", "environment"))
# Columns of fields that are metadata, too: rewards written for verl or TRL read the first two, and one may read who the
# teacher is, or where a line is played.
ALSO_METADATA = frozenset(("data_source", "tools", "teacher", "environment"))

_OF_ALL_LINES = "--chat-template-kwargs holds for all lines"
# Columns with which another framework shows the policy a different text -> what to do about it.
UNREAD = {
    "chat_template_kwargs": _OF_ALL_LINES,
    "enable_thinking": _OF_ALL_LINES,
    "history": "write the earlier turns as messages",
    "context": "write it into the prompt",
    **dict.fromkeys(("images", "image"), "the model has no vision tower, or no chat template"),
    **dict.fromkeys(("videos", "video", "audios", "audio", "objects"), "megarl reads text and images"),
}
# The same, of responses in a column of their own: thoughts that stand beside them.
UNREAD_THOUGHTS = dict.fromkeys(THOUGHTS, "write the thoughts into the response, or as messages")
# Two columns that some programs join to one prompt -> what to do about the one that is not read.
JOINED = ("instruction", "input")
UNREAD_PART = "write both into one column"
OWN_SYSTEM = "the messages begin with one of the system"

# A JSON line with one of these is not in megarl's own fields, whatever else it has.
FOREIGN = {name.split(".")[0] for fields in NAMES.values() for names in fields.values() for name in names}
FOREIGN |= {"extra_info", "ability", *UNREAD}
FOREIGN -= set(FIELD_TYPES)
