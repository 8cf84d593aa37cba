"""/v1/completions: texts or tokens to texts, with log-probs and with the prompt's own (echo)."""

from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from megarl.data.detokenizer import Vocabulary
from megarl.serving import sampling
from megarl.serving.answer_text import AnswerProgress, AnswerText
from megarl.serving.answers import OpenAIAnswer, Parts, finite
from megarl.serving.context import ServingContext
from megarl.serving.error_answers import invalid
from megarl.serving.replica_messages import Request, RequestUpdate, ScorePrompt
from megarl.serving.replica_pool import Submission
from megarl.serving.schemas import MAX_PROMPTS, CompletionRequest


async def complete(context: ServingContext, request: CompletionRequest) -> Response:
    """Answers one request; RequestError if it is wrong or cannot run."""
    context.check_model(request.model)
    prompts = await _prompts(context, request)
    return await context.respond(CompletionAnswer(context, request, prompts), request.stream)


async def _prompts(context: ServingContext, request: CompletionRequest) -> list[list[int]]:
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)) or not given:
        given = [given]
    count = len(given) * sampling.choices(context, request)
    if count > MAX_PROMPTS:
        raise invalid(f"prompts times n: at most {MAX_PROMPTS} answers are allowed", "n")
    context.pool.check_room(count)  # before the work of tokenizing
    is_text = isinstance(given[0], str)
    prompts = await context.encode_texts(given, request.add_special_tokens) if is_text else given
    for prompt in prompts:
        context.check_prompt(prompt, "prompt")
    return prompts


class CompletionAnswer(OpenAIAnswer):
    """The answer to one request: choice number `prompt * n + choice`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, context: ServingContext, request: CompletionRequest, prompts: list[list[int]]):
        super().__init__(context.config.model_name, request)
        self._context, self._prompts, self._session = context, prompts, request.session
        self._count, self._rules = sampling.choices(context, request), sampling.stop_rules(context, request)
        self.more, self.prompt_tokens = {"system_fingerprint": None}, sum(map(len, prompts))
        self._generates = request.max_tokens != 0
        self._echoes, self._wants_logprobs = bool(request.echo), request.logprobs is not None
        if not self._generates and not self._echoes:
            raise invalid("max_tokens 0: needs echo", "max_tokens")
        sampling.check_top_logprobs(context, request.logprobs or 0, "logprobs")
        self._requests = self._make_requests(request)

    def _make_requests(self, request: CompletionRequest) -> list[Request]:
        """Requests for all choices, then those that score the prompts."""
        context, top = self._context, request.logprobs or 0
        keys = sampling.stream_keys(request.seed, len(self._prompts), self._count)
        found: list[Request] = []
        for number, prompt in enumerate(self._prompts):
            length = context.response_length(prompt, request.max_tokens)
            for choice in range(self._count if self._generates else 0):
                key = keys[number * self._count + choice]
                found.append(sampling.generation(context, request, prompt, length, key, top))
        self._scored_from = len(found)
        if self._echoes and self._wants_logprobs:
            found += [ScorePrompt(prompt, sampling.temperature(request), top) for prompt in self._prompts]
        return found

    def empty_choices(self) -> list[dict[str, Any]]:
        count = len(self._prompts) * self._count
        return [{"index": index, "text": "", "logprobs": None} for index in range(count)]

    def merge(self, choice: dict[str, Any], part: dict[str, Any]):
        choice["text"] += part["text"]
        if part["logprobs"] is not None:
            choice["logprobs"] = choice["logprobs"] or {name: [] for name in part["logprobs"]}
            for name, values in part["logprobs"].items():
                choice["logprobs"][name] += values
        super().merge(choice, part)

    async def parts(self) -> Parts:
        """See OpenAIAnswer."""
        texts = [AnswerText(self._context.vocabulary, self._rules) for _ in range(len(self._prompts) * self._count)]
        scores = self._scored_from < len(self._requests)
        late: dict[int, list[AnswerProgress]] = {}  # of choices whose prompt has no scores yet
        with Submission(self._context.pool, self._requests, self._session) as running:
            for index, text in enumerate(texts if self._echoes else ()):
                echo = text.prompt(self._prompts[index // self._count])
                echo.finish = None if self._generates else "length"
                if scores:
                    late[index] = [echo]
                else:
                    yield self._part(index, echo)
            async for number, update in running.updates():
                if number >= self._scored_from:
                    for part in self._scored(number - self._scored_from, update, late):
                        yield part
                    continue
                progress = texts[number].feed(update)
                self.generated_tokens += len(progress.tokens)
                if progress.finish is not None:
                    running.end(number)
                if number in late:
                    late[number].append(progress)
                elif progress.text or progress.finish or (self._wants_logprobs and progress.tokens):
                    yield self._part(number, progress)

    def _scored(
        self, prompt: int, update: RequestUpdate, late: dict[int, list[AnswerProgress]]
    ) -> Iterator[dict[str, Any]]:
        """The parts of a prompt's choices that waited for its scores."""
        for index in range(prompt * self._count, (prompt + 1) * self._count):
            waiting = late.pop(index)
            waiting[0].logprobs, waiting[0].top = list(update.logprobs), update.top
            waiting[0].fingerprint = update.fingerprint
            yield from (self._part(index, progress) for progress in waiting)

    def _part(self, index: int, progress: AnswerProgress) -> dict[str, Any]:
        if progress.fingerprint is not None:
            self.more = {"system_fingerprint": progress.fingerprint}
        logprobs = completion_logprobs(self._context.vocabulary, progress) if self._wants_logprobs else None
        ends = {"finish_reason": progress.finish, "stop_reason": progress.stop_reason}
        return {"index": index, "text": progress.text, "logprobs": logprobs, **ends}


def completion_logprobs(vocabulary: Vocabulary, progress: AnswerProgress) -> dict[str, list[Any]]:
    """OpenAI's `logprobs` of completions; each alternatives' object has the token itself, too."""
    names = [vocabulary.token(token)[0] for token in progress.tokens]
    tops: list[dict[str, float | None] | None] = []
    for number, (name, logprob) in enumerate(zip(names, progress.logprobs, strict=True)):
        listed = progress.top[number] if progress.top else None
        top: dict[str, float | None] = {}
        for token, value in listed or ():
            top.setdefault(vocabulary.token(token)[0], finite(value))
        if logprob is not None:
            top.setdefault(name, finite(logprob))
        tops.append(top if logprob is not None else None)
    logprobs = [finite(each) for each in progress.logprobs]
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": progress.offsets}
