"""/v1/completions: texts or tokens to texts, with log-probs and with the prompt's own (echo). /v1/chat/completions:
messages to messages through the server's chat template, with tool calls. /generate: tokens to tokens with log-probs and
policy versions, for reinforcement learning."""

from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from megarl.data.detokenizer import Vocabulary
from megarl.serving import sampling
from megarl.serving.answer_text import AnswerProgress, AnswerText, ToolCallParser, has_opened_thoughts
from megarl.serving.answers import ChatAnswer, OpenAIAnswer, Parts, chat_part, delta_of, finite, offered
from megarl.serving.context import ServingContext
from megarl.serving.error_answers import invalid
from megarl.serving.replica_messages import Request, RequestUpdate, ScorePrompt
from megarl.serving.replica_pool import Submission
from megarl.serving.schemas import MAX_PROMPTS, ChatCompletionRequest, CompletionRequest, GenerateRequest


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


# -- chat completions --------------------------------------------------------------------------------------------------


async def chat(context: ServingContext, request: ChatCompletionRequest) -> Response:
    """Answers one request; RequestError if it is wrong or cannot run."""
    context.check_model(request.model)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs: needs logprobs true", "top_logprobs")
    prompt, images = await context.encode_messages(request)
    context.check_prompt([token for token in prompt if token >= 0], "messages")
    return await context.respond(ServedChat(context, request, prompt, images), request.stream)


class ServedChat(ChatAnswer):
    """The answer to one request, after its prompt's tokens; `images`: those among them, as replicas read them."""

    def __init__(self, context: ServingContext, request: ChatCompletionRequest, prompt: list[int], images: list[str]):
        super().__init__(context.config.model_name, request, sampling.choices(context, request))
        self._context, self._session = context, request.session
        self._tools = offered([tool.function for tool in request.tools or ()], request.tool_choice)
        self._rules, self.prompt_tokens = sampling.stop_rules(context, request), len(prompt)
        self._opened = has_opened_thoughts(context.form, context.vocabulary, prompt)
        top = request.top_logprobs or 0
        sampling.check_top_logprobs(context, top, "top_logprobs")
        if request.max_completion_tokens is not None:
            length = context.response_length(prompt, request.max_completion_tokens, "max_completion_tokens")
        else:
            length = context.response_length(prompt, request.max_tokens)
        self._requests = [
            sampling.generation(context, request, prompt, length, key, top)._replace(images=images)
            for key in sampling.stream_keys(request.seed, 1, self._count)
        ]

    async def parts(self) -> Parts:
        form, may_call = self._context.form, self._tools is not None
        parsers: list[ToolCallParser | None] = [None] * self._count  # all of an answer is content
        if may_call or form.has_apart:
            parsers = [ToolCallParser(form, self._tools or (), self._opened, may_call) for _ in parsers]
        marks = self._context.form.answer_marks if parsers[0] is not None else ()
        texts = [AnswerText(self._context.vocabulary, self._rules, marks) for _ in range(self._count)]
        begun: set[int] = set()
        with Submission(self._context.pool, self._requests, self._session) as running:
            async for index, update in running.updates():
                progress = texts[index].feed(update)
                self.generated_tokens += len(progress.tokens)
                self.more = {"system_fingerprint": progress.fingerprint}
                if progress.finish is not None:
                    running.end(index)
                part = self._part(index, progress, parsers[index])
                if index not in begun:
                    begun.add(index)
                    part["delta"] = {"role": "assistant", "content": "", **part["delta"]}
                if part["delta"] or part["finish_reason"] or part["logprobs"]:
                    yield part

    def _part(self, index: int, progress: AnswerProgress, parser: ToolCallParser | None) -> dict[str, Any]:
        count, delta = 0, delta_of(progress.text, "", [])
        if parser is not None:
            first = parser.count
            delta = delta_of(*parser.feed(progress.text, is_last=progress.finish is not None), first)
            count = parser.count
        logprobs = chat_logprobs(self._context.vocabulary, progress) if self._wants_logprobs else None
        part = chat_part(index, delta, progress.finish, count > 0, logprobs)
        return {**part, "stop_reason": progress.stop_reason}


def chat_logprobs(vocabulary: Vocabulary, progress: AnswerProgress) -> dict[str, Any] | None:
    """OpenAI's `logprobs` of chat answers; None without tokens."""

    def described(token: int, logprob: float | None) -> dict[str, Any]:
        text, data = vocabulary.token(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    tops = progress.top or [()] * len(progress.tokens)
    content = [
        {**described(token, logprob), "top_logprobs": [described(other, value) for other, value in top or ()]}
        for token, logprob, top in zip(progress.tokens, progress.logprobs, tops, strict=True)
    ]
    return {"content": content} if content else None


# -- tokens ------------------------------------------------------------------------------------------------------------


class GenerateAnswer:
    """The answer to a request with one or several prompts: one response to each."""

    def __init__(self, context: ServingContext, request: GenerateRequest):
        self._context, self._request = context, request
        self._is_batch = bool(request.input_ids) and isinstance(request.input_ids[0], list)
        given: Any = request.input_ids
        self._prompts: list[list[int]] = given if self._is_batch else [given]
        for prompt in self._prompts:
            context.check_prompt(prompt, "input_ids")
        if request.return_routes and not context.config.settings.serve_routes:
            raise invalid("return_routes: this server records no routes (--serve-routes)", "return_routes")
        sampling.check_top_logprobs(context, request.top_logprobs, "top_logprobs")
        self._keys = self._make_keys()
        settings = request.sampling_params
        sampling.check_stops(context, settings.stop)
        lengths = [context.response_length(prompt, settings.max_tokens) for prompt in self._prompts]
        top, routes = request.top_logprobs, request.return_routes
        self._requests = [
            sampling.generation(context, settings, prompt, length, key, top, routes, settings.stop)
            for prompt, length, key in zip(self._prompts, lengths, self._keys, strict=True)
        ]

    def _make_keys(self) -> list[int]:
        given, count = self._request.key, len(self._prompts)
        if given is None:
            return sampling.stream_keys(self._request.seed, count, 1)
        keys = given if isinstance(given, list) else [given]
        if self._request.seed is not None:
            raise invalid("key and seed exclude each other", "key")
        if len(keys) != count:
            raise invalid(f"key: {len(keys)} keys for {count} prompts", "key")
        return keys

    async def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        """One object for one prompt, a list for a list."""
        results = [
            {**self._result(index), "key": self._keys[index], "prompt_tokens": len(prompt), "routes": None}
            for index, prompt in enumerate(self._prompts)
        ]
        async with aclosing(self.chunks()) as parts:
            async for part in parts:
                result = results[part["index"]]
                for name in ("output_ids", "logprobs", "top_logprobs", "versions"):
                    if part[name]:
                        result[name] += part[name]
                for name in ("finish_reason", "system_fingerprint", "routes"):
                    result[name] = part[name] if part.get(name) is not None else result[name]
        return results if self._is_batch else results[0]

    async def chunks(self) -> Parts:
        """The parts of all responses as they come."""
        with Submission(self._context.pool, self._requests, self._request.session) as running:
            async for index, update in running.updates():
                if update.routes is not None:
                    yield {**self._result(index), "routes": update.routes}
                if update.tokens or update.finish:
                    yield self._part(index, update)

    def _part(self, index: int, update: RequestUpdate) -> dict[str, Any]:
        tokens = list(update.tokens)
        part = self._result(index)
        part |= {"output_ids": tokens, "versions": [update.version] * len(tokens), "finish_reason": update.finish}
        if self._request.return_logprobs:
            part["logprobs"] = [finite(each) for each in update.logprobs]
        if self._request.top_logprobs:
            tops = [best or () for best in update.top or ()]
            part["top_logprobs"] = [[[token, finite(value)] for token, value in best] for best in tops]
        return part | {"system_fingerprint": update.fingerprint}

    def _result(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "output_ids": [], "versions": [], "finish_reason": None}
        found |= {"logprobs": [] if self._request.return_logprobs else None, "system_fingerprint": None}
        return found | {"top_logprobs": [] if self._request.top_logprobs else None}
