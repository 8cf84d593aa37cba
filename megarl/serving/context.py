"""What all endpoints share: configuration, tokenizer, pool of replicas, the checks of prompts and lengths."""

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from megarl.data.detokenizer import Vocabulary
from megarl.data.images.decoding import MAX_BYTES, decode_confined
from megarl.data.images.forms import source_of
from megarl.data.images.names import ImageRef, mark_of
from megarl.errors import UsageError
from megarl.serving.answers import image_urls, offered, start_stream, template_messages, with_marks
from megarl.serving.configuration import FrontendConfig
from megarl.serving.error_answers import JSONResponse, RequestError, echo, invalid
from megarl.serving.middleware import ServerMetrics
from megarl.serving.replica_pool import ReplicaPool
from megarl.serving.schemas import ChatCompletionRequest, TokenizeRequest
from megarl.tool_formats import FORMATS
from megarl.tool_formats.thinking_budget import ThoughtReader

_LONG_TEXT = 20_000  # characters or ids; from here on work is done in a thread, so that streams do not wait


class ServingContext:
    """The state of the HTTP process."""

    def __init__(self, config: FrontendConfig):
        self.config, self.encoder = config, config.encoder
        self.vocabulary = Vocabulary(self.encoder.tokenizer)
        self.form = FORMATS[config.tool_format]
        self.thoughts = ThoughtReader(self.vocabulary, self.form)
        self.metrics = ServerMetrics()
        self.pool = ReplicaPool(
            config.replicas, config.settings.max_queue, config.settings.request_timeout, self.metrics
        )
        self.created = int(time.time())

    @property
    def max_length(self) -> int:
        """Tokens that prompt and response may have together."""
        capacity = self.pool.capacity
        return self.config.max_model_length if capacity is None else min(capacity, self.config.max_model_length)

    def model_card(self) -> dict[str, Any]:
        """The server's model, in OpenAI's words."""
        card = {"id": self.config.model_name, "object": "model", "created": self.created, "owned_by": "megarl"}
        return card | {"root": self.pool.weights.get("label", ""), "max_model_len": self.max_length}

    def tokenizer_info(self) -> dict[str, Any]:
        """Special tokens and chat template, for clients that tokenize with this server, such as lm-eval."""
        tokenizer, template = self.encoder.tokenizer, self.encoder.template
        tokens = {"eos_token": tokenizer.eos_token, "bos_token": tokenizer.bos_token, "pad_token": None}
        return tokens | {"vocab_size": self.config.vocab_size, "chat_template": template.source if template else None}

    def check_model(self, name: str | None):
        """RequestError 404 for the name of another model; None is the server's model."""
        if name is not None and name != self.config.model_name:
            message = f"the model {echo(name)} does not exist; this server has {self.config.model_name!r}"
            raise RequestError(404, message, "model", "model_not_found")

    async def encode_texts(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of texts as in training: special tokens' names are text. `add_special_tokens`: with training's BOS."""
        prefix = self.encoder.prefix_ids if add_special_tokens else ()
        encode, is_long = self.encoder.tokenizer.encode_batch, sum(map(len, texts)) > _LONG_TEXT
        return [[*prefix, *ids] for ids in (await asyncio.to_thread(encode, texts) if is_long else encode(texts))]

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        decode = self.encoder.tokenizer.decode
        return await asyncio.to_thread(decode, ids) if len(ids) > _LONG_TEXT else decode(ids)

    async def encode_messages(self, request: ChatCompletionRequest | TokenizeRequest) -> tuple[list[int], list[str]]:
        """(ids of a request's conversation with the opening of the assistant's turn, its images as replicas read them).

        Images are decoded once in a confined process. RequestError 400 for a wrong one, and if the template fails.
        """
        messages, choice = request.messages or [], getattr(request, "tool_choice", None)
        tools, values = offered([tool.function for tool in request.tools or ()], choice), request.chat_template_kwargs
        if not (urls := image_urls(messages)):
            return await self.encode_chat(template_messages(messages), tools, values), []
        try:
            read = await asyncio.to_thread(self._read_images, urls)
        except UsageError as error:
            raise invalid(f"messages: {error}", "messages") from None
        assert self.encoder.images is not None
        refs: list[ImageRef] = []
        try:
            refs += map(self.encoder.images.add_bytes, read)
            marked = template_messages(with_marks(messages, map(mark_of, refs)))
            tokens = await self.encode_chat(marked, tools, values)
        except UsageError as error:
            raise invalid(f"messages: {error}", "messages") from None
        finally:
            self.encoder.images.forget(refs)
        return tokens, [base64.b64encode(data).decode() for data in dict.fromkeys(read)]

    def _read_images(self, urls: Sequence[str]) -> list[bytes]:
        """The bytes of images that the confined process could decode. UsageError."""
        images = self.encoder.images
        if images is None:
            raise UsageError("has images; this server's model has no vision tower, or no chat template")
        images.processor  # noqa: B018  # UsageError: there is none
        if len(urls) > images.max_images:
            raise UsageError(f"has {len(urls)} images; this server allows {images.max_images}")
        read = [source_of(url, None)[0] for url in urls]
        if sum(map(len, read)) > MAX_BYTES:
            raise UsageError(f"has {sum(map(len, read)):,} bytes of images; allowed: at most {MAX_BYTES:,}")
        for data in dict.fromkeys(read):
            decode_confined(data)
        return read

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation with the opening of the assistant's turn. RequestError if the template fails."""
        template = self.encoder.template
        if template is None:
            raise invalid("this server has no chat template; use /v1/completions", "messages", "no_chat_template")
        try:
            return await asyncio.to_thread(self.encoder.chat_prompt, messages, tools, values)
        except UsageError as error:
            raise invalid(str(error).removeprefix(f"{template.flag}: "), "messages") from None

    async def respond(self, answer: Any, streams: bool | None) -> Response:
        """The answer to a request, of its `chunks` or `whole`."""
        if streams:
            return await start_stream(answer.chunks(), self.config.settings.request_timeout)
        return JSONResponse(await answer.whole())

    def check_prompt(self, ids: Sequence[int], param: str):
        """RequestError 400 for an empty prompt, or ids outside the vocabulary."""
        if not ids:
            raise invalid(f"{param}: a prompt needs at least one token", param)
        if min(ids) < 0 or max(ids) >= self.config.vocab_size:
            raise invalid(f"{param}: token ids must be 0 to {self.config.vocab_size - 1}", param)

    def response_length(self, prompt: Sequence[int], wanted: int | None, param: str = "max_tokens") -> int:
        """How many tokens a response may have: `wanted`, by default as many as are allowed. RequestError 400."""
        limit, room = self.config.max_response_length, self.max_length - len(prompt)
        if room < (1 if wanted is None else min(wanted, 1)) or (wanted is not None and wanted > room):
            asked = "" if wanted is None else f" and {param} {wanted}"
            message = f"{len(prompt)} tokens of the prompt{asked}: prompt and response have at most {self.max_length}"
            raise invalid(message, param if wanted else "prompt", "context_length_exceeded")
        if wanted is not None and wanted > limit:
            raise invalid(f"{param} {wanted}: allowed are at most {limit}", param)
        return min(limit, room) if wanted is None else wanted
