"""Tokenizes prompts, responses and whole conversations, with or without a chat template.

What a policy writes of an assistant's turn is the text after the opening, up to an end token. Published templates
differ: a turn may end with the token with which the next message begins (GLM), and an opening may begin thoughts that
the template does not show of a turn (DeepSeek R1).
"""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.chat import NO_OPTIONS, ChatTemplate, TemplateOptions, load_template, probed
from megarl.data.images.book import Images, cut_at_borders
from megarl.data.images.names import ImageRef
from megarl.data.messages import CLOSE, OPEN, Message, MessageKey, conversation_of, template_message, tool_call
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError

# Encoded prompts to cache: about those of a step, because all samples of a prompt are scored together.
_CACHED_PROMPTS = 4096


class Encoder:
    """A tokenizer and its chat template; without one, texts are encoded unchanged and a response ends with EOS.

    Prompt and response are encoded separately and joined, exactly as in a rollout. Raises UsageError (naming the
    template's flag) for a template that fails on a prompt or writes BOS twice, and for one whose conversation does not
    begin with its prompt, or that ends an assistant's turn without an end token, where turns are encoded; and (naming
    `flag`) for messages without a template.

    `prefix_ids`: tokens before a text that is a prompt; None: those of the tokenizer's own rules.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        flag: str = "--chat-template",
        prefix_ids: Sequence[int] | None = None,
    ):
        self.tokenizer, self.template, self.flag = tokenizer, template, flag
        self.prefix_ids = list(tokenizer.prefix_ids if prefix_ids is None else prefix_ids)
        self.unshown_thoughts = 0  # turns to be trained on whose thoughts the template has left out
        self._encoded = functools.lru_cache(_CACHED_PROMPTS)(self._encode_prompt)
        if template is not None:
            self.prompt(Prompt(0, "a"))  # fail now, not in the middle of a run

    def __reduce__(self):
        """Pickles what the encoder is made of: the process of the server gets it from rank 0."""
        return type(self), (self.tokenizer, self.template, self.flag, self.prefix_ids)

    def check_turns(self):
        """UsageError for a template with which no turn of the assistant can be encoded. For programs that train on
        texts of turns, or score them: a policy's own turns are tokens already.
        """
        # Some templates drop a message with empty content.
        self.responses([(Prompt(0, "a"), "b"), (Prompt(0, "a"), "")])

    @property
    def fingerprint(self) -> tuple:
        """Tokenizer, template and flag, as values that differ where the tokens or the errors differ."""
        template = self.template and (self.template.source, self.template.options)
        of_images = () if self.images is None else (self.images.fingerprint,)
        return self.tokenizer.fingerprint, template, self.flag, self.prefix_ids, *of_images

    @property
    def images(self) -> Images | None:
        """The images that prompts may have; None: the model's folder has no tower, or there is no template."""
        return None if self.template is None else self.template.images

    def read_image(self, ref: ImageRef) -> bytes:
        """The bytes of an image of a prompt. UsageError: its file is another one now."""
        assert self.images is not None  # else no prompt has some
        return self.images.bytes_of(ref)

    def prompt(self, prompt: Prompt) -> list[int]:
        """The tokens that the policy continues; with a template they end with the opening of the assistant's turn."""
        return list(self._encoded(prompt.key, prompt.tools_key)[1])

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens that the policy continues after messages that may have tool calls, and with tools. Without those
        it equals `prompt`. `values`: variables of the template. UsageError without a template, or if the template fails
        on the messages.
        """
        if self.template is None:
            raise UsageError(f"a prompt in messages needs {self.flag}")
        plain = [template_message(message) for message in messages]
        rendered = self.template.render(plain, add_generation_prompt=True, tools=tools, values=values)
        return self._one_bos(self.template.encode(rendered))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens, with the names of images."""
        decode = self.tokenizer.decode
        return decode(ids) if self.images is None else self.images.text(ids, decode)

    def text(self, text: str) -> list[int]:
        """The tokens of a prompt that is a text without a template: BOS, if it belongs there, and the text's own."""
        return [*self.prefix_ids, *self.tokenizer.encode(text)]

    def response(self, prompt: Prompt, text: str) -> list[int]:
        """The tokens of the response after `prompt`, up to and including EOS."""
        return self.responses([(prompt, text)])[0]

    def responses(self, samples: Sequence[tuple[Prompt, str]]) -> list[list[int]]:
        """`response` of each (prompt, text)."""
        if self.template is None:
            return [[*ids, self.tokenizer.eos_id] for ids in self.tokenizer.encode_batch([text for _, text in samples])]
        return self.template.encode_following([self._turn(prompt, text) for prompt, text in samples])

    def reward_model_inputs(
        self, samples: Sequence[tuple[Prompt, str]], max_length: int
    ) -> list[tuple[list[int], int]]:
        """The reward model's input for each (prompt, text), at most `max_length` >= 1 tokens, and how many were cut.
        Tokens are cut from the start of the prompt (a leading BOS stays), then from the start of the response; never
        from the end, because the score is read at EOS. Never empty.
        """
        responses = self.responses(samples)
        return [
            self._cut([*self._encoded(prompt.key, prompt.tools_key)[1], *response], max_length)
            for (prompt, _), response in zip(samples, responses, strict=True)
        ]

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[tuple[list[int], list[bool]]]:
        """The sequences of a conversation: `(ids, mask)` of each, equally long. The masks cover each assistant's turn
        once, with its EOS, after what a policy would read before it.

        It is one sequence unless the template shows an earlier turn otherwise once later messages follow, for example
        without its thoughts. Then a new one begins with the conversation as the template shows it at that place.

        The calls and thoughts of a turn are part of it. The opening of the turn and the template's text after that EOS
        are context, outside the mask, as are the results of tools. UsageError if the template leaves calls out; turns
        whose thoughts it leaves out are counted in `unshown_thoughts`.
        """
        if self.template is None:
            raise UsageError(f"a conversation in messages needs {self.flag}")
        messages = [template_message(message) for message in messages]
        texts, borders = [""], [[0]]  # of each sequence: its text so far, and where turns begin and end in it
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened = self.template.render(messages[:number], add_generation_prompt=True, tools=tools)
            turn = written_turn(self.template, opened, messages[:number], message, tools)
            self._check_shown(message, turn)
            if not opened.startswith(texts[-1]):
                texts.append("")
                borders.append([0])
            borders[-1] += [len(opened), len(opened) + len(turn)]
            texts[-1] = opened + turn
        whole = self.template.render(messages, tools=tools)
        if whole.startswith(texts[-1]):
            texts[-1] = whole
        return [self._sequence(text, [*ends, len(text)]) for text, ends in zip(texts, borders, strict=True)]

    def _sequence(self, text: str, borders: list[int]) -> tuple[list[int], list[bool]]:
        """`(ids, mask)` of a rendered text. Its parts between `borders` are context, assistant's turn, context, …"""
        ranges = list(itertools.pairwise(borders))
        assert self.template is not None
        segments = self.template.encode_following([(text[:start], text[start:end]) for start, end in ranges])
        ids = self._one_bos([i for segment in segments for i in segment])
        return ids, [bool(number % 2) for number, segment in enumerate(segments) for _ in segment]

    def trained_response(self, prompt: Prompt, text: str) -> list[int]:
        """`response`, of a text to be trained on: it is counted if the template leaves its thoughts out."""
        if self.template is None:
            return self.response(prompt, text)
        opened, written = self._turn(prompt, text)
        self._check_shown({"role": "assistant", "content": text}, written)
        return self.template.encode_following([(opened, written)])[0]

    def _encode_prompt(self, key: str | tuple[MessageKey, ...], tools: str | None) -> tuple[str, tuple[int, ...]]:
        if self.template is None:
            if tools is not None:
                raise UsageError(f"tools need {self.flag}, which shows them to the policy")
            if not isinstance(key, str):
                raise UsageError(f"a prompt in messages needs {self.flag}")
            return key, tuple(self.text(key))
        listed = None if tools is None else json.loads(tools)
        rendered = self.template.render(conversation_of(key), add_generation_prompt=True, tools=listed)
        return rendered, tuple(self._one_bos(self.template.encode(rendered)))

    def _one_bos(self, ids: list[int]) -> list[int]:
        if self.tokenizer.bos_id is not None and ids[:2] == [self.tokenizer.bos_id] * 2:
            raise UsageError(f"{self.template.flag}: the template writes BOS {self.tokenizer.bos_token!r} twice")
        return ids

    def _turn(self, prompt: Prompt, text: str) -> tuple[str, str]:
        """The rendered prompt with the opening of a turn, and what the policy writes of the turn with that text."""
        before, opened = conversation_of(prompt.key), self._encoded(prompt.key, prompt.tools_key)[0]
        assert self.template is not None
        answer = {"role": "assistant", "content": text}
        return opened, written_turn(self.template, opened, before, answer, prompt.tools)

    def _check_shown(self, turn: Message, written: str):
        """UsageError if the template leaves a call out of `written`, a turn to be trained on; counts one without its
        thoughts."""
        assert self.template is not None
        shown = self.template.plain(written)
        for call in turn.get("tool_calls", ()):
            name = call["function"]["name"]
            if name not in shown:
                raise UsageError(f"{self.template.flag}: the template leaves out the assistant's call of {name!r}")
        self.unshown_thoughts += thoughts_of(turn) not in shown

    def _cut(self, ids: list[int], max_length: int) -> tuple[list[int], int]:
        cut = max(0, len(ids) - max_length)
        if not cut:
            return ids, 0
        kept = 1 if max_length > 1 and ids[0] == self.tokenizer.bos_id else 0
        end = cut_at_borders(ids, cut + kept)
        return ids[:kept] + ids[end:], end - kept


def build_encoder(
    tokenizer: Tokenizer,
    chat_template: str | None,
    flag_prefix: str = "",
    folder: str | None = None,
    options: TemplateOptions = NO_OPTIONS,
    bos: str = "auto",
    images: Images | None = None,
) -> Encoder:
    """The encoder of a role: `chat_template` is the value of `--chat-template` (see `load_template`), or "none".
    `folder`: flag and path of the model's Hugging Face folder, whose tokenizer gives the default template. `bos`: value
    of `--bos`. `images`: those that prompts may have.
    """
    if bos == "always" and tokenizer.bos_id is None:
        raise UsageError(f"--{flag_prefix}bos always: the tokenizer has no BOS")
    prefix: Sequence[int] = {"auto": tokenizer.prefix_ids, "always": (tokenizer.bos_id,), "never": ()}[bos]
    if chat_template is None and folder is not None and tokenizer.template:
        where = f"{folder}: chat template"
        return Encoder(tokenizer, probed(tokenizer.template, tokenizer, where, options, images), where, prefix)
    chat_template = None if chat_template == "none" else chat_template
    flag = f"--{flag_prefix}chat-template"
    return Encoder(tokenizer, load_template(chat_template, tokenizer, flag, options, images), flag, prefix)


# -- what a policy writes of an assistant's turn -----------------------------------------------------------------------


USER = {"role": "user", "content": "a"}
RESULT = {"role": "tool", "content": "a", "tool_call_id": "call00000", "name": "f"}
_ANSWER = {"role": "assistant", "content": "a"}
_CALL = {"role": "assistant", "content": "", "tool_calls": [tool_call("call00000", "f", {})]}


def end_of_turn(tokenizer: Tokenizer, rendered: str, start: int) -> int | None:
    """Where the first end token after `start` ends; None if there is none. Only special tokens count: their strings are
    marked in contents, so the one that is found is the template's.
    """
    special = [token for token in tokenizer.end_tokens if token in tokenizer.special]
    found = re.compile("|".join(map(re.escape, special)) or "(?!)").search(rendered, start)
    return None if found is None else found.end()


def end_of_next(tokenizer: Tokenizer, longer: str, alone: str) -> int | None:
    """Where the token with which the next message begins ends in `longer`, which begins with `alone`, the conversation
    up to a turn; None if that is no end token. It may end the turn (GLM)."""
    end = end_of_turn(tokenizer, longer, len(alone))
    return end if longer[len(alone) : end].strip() in tokenizer.end_tokens else None


def written_turn(
    template: ChatTemplate,
    opened: str,
    before: Sequence[Mapping[str, Any]],
    turn: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """The text that the policy writes of `turn` after the rendered messages `before` with their opening, `opened`. It
    ends with an end token. UsageError for a template that begins the turn otherwise than it opens it, or that ends it
    without such a token.
    """
    shown = _after_opening(template, opened, template.render([*before, turn], tools=tools), turn)
    end_tokens = template.tokenizer.end_tokens
    # Special tokens in contents are marked, so this end is the template's.
    found = re.compile("|".join(map(re.escape, end_tokens))).search(shown)
    return shown + _closing(template, "tool_calls" in turn) if found is None else shown[: found.end()]


def thoughts_of(turn: Mapping[str, Any]) -> str:
    """The thoughts of a turn, of a field of their own or at the beginning of its content; "" if it has none."""
    thoughts = turn.get("reasoning_content") or ""
    if not thoughts and CLOSE in turn["content"]:
        thoughts = turn["content"].split(CLOSE)[0].split(OPEN)[-1]
    return thoughts.strip()


def _after_opening(template: ChatTemplate, opened: str, whole: str, turn: Mapping[str, Any]) -> str:
    """What follows the opening in `whole`, the rendered conversation with the turn, as the policy would write it."""
    if whole.startswith(opened):
        return whole[len(opened) :]
    at = opened.rfind(OPEN)
    if opened.rstrip().endswith(OPEN) and whole.startswith(opened[:at]):
        rest = whole[at:]
        if rest.startswith(OPEN):  # with other white space after it
            return rest.removeprefix(OPEN)
        return f"{template.marked(thoughts_of(turn))}\n{CLOSE}\n\n{rest.lstrip()}"
    said = "the rendered conversation does not begin with its rendered prompt"
    if opened.rstrip().endswith(CLOSE) and thoughts_of(turn):
        said = "a turn with thoughts follows an opening that ends them; --chat-template-kwargs may switch them on"
    raise UsageError(f"{template.flag}: {said}")


@functools.lru_cache(maxsize=16)
def _closing(template: ChatTemplate, has_calls: bool) -> str:
    """The text up to the token that ends a turn, if that is the beginning of the next message: a result, or a user's.
    UsageError if no end token does.
    """
    turn, following = (_CALL, RESULT) if has_calls else (_ANSWER, USER)
    alone, longer = template.render([USER, turn]), template.render([USER, turn, following])
    end = end_of_next(template.tokenizer, longer, alone) if longer.startswith(alone) else None
    if end is None:
        raise UsageError(
            f"{template.flag}: an assistant's turn ends without the tokenizer's EOS "
            f"{template.tokenizer.end_tokens[0]!r}; write eos_token there, make the token that ends a turn the "
            "tokenizer's eos_token, or name it in eos_token_id of generation_config.json"
        )
    return longer[len(alone) : end]
