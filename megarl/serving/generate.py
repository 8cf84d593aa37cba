"""/generate: tokens to tokens with log-probs and policy versions, for reinforcement learning."""

from contextlib import aclosing
from typing import Any

from megarl.serving import sampling
from megarl.serving.answers import Parts, finite
from megarl.serving.context import ServingContext
from megarl.serving.error_answers import invalid
from megarl.serving.replica_messages import RequestUpdate
from megarl.serving.replica_pool import Submission
from megarl.serving.schemas import GenerateRequest


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
