"""From the fields of a request to what the replicas are asked (`replica_messages.py`)."""

import secrets
from collections.abc import Sequence

from megarl.serving.context import ServingContext
from megarl.serving.error_answers import invalid
from megarl.serving.replica_messages import Generate
from megarl.serving.schemas import OpenAIFields, SamplingFields

SERVE_STEP = 2**31 + 1  # the step number of all requests; no training step is as large

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


# What ends a response besides its length: stop strings, the tokens of `stop_token_ids`, and whether the strings are
# part of the text.
StopRules = tuple[tuple[str, ...], frozenset[int], bool]


def stop_rules(context: ServingContext, fields: OpenAIFields) -> StopRules:
    """The stop rules of a request; RequestError 400 for too many."""
    stops = fields.stops
    check_stops(context, stops)
    if fields.thinking_budget is not None and any(stop in _thinking_text(context, fields) for stop in stops):
        raise invalid("stop: a string is part of the text that ends thoughts (thinking_budget_text)", "stop")
    return tuple(stops), frozenset(fields.stop_token_ids or ()), fields.include_stop_str_in_output


def check_stops(context: ServingContext, stops: Sequence[str]):
    """RequestError 400 for too many stop strings."""
    if len(stops) > context.config.settings.max_stops:
        raise invalid(f"stop: at most {context.config.settings.max_stops} strings are allowed", "stop")


def _thinking_text(context: ServingContext, fields: SamplingFields) -> str:
    return fields.thinking_budget_text or context.config.thinking_text or context.thoughts.default_text


def _thinking(context: ServingContext, fields: SamplingFields) -> tuple[int, list[int], str] | None:
    """The thinking budget of `Generate`. RequestError 400 for a text that does not end thoughts."""
    if fields.thinking_budget is None:
        if fields.thinking_budget_text is not None:
            raise invalid("thinking_budget_text: needs thinking_budget", "thinking_budget_text")
        return None
    text = _thinking_text(context, fields)
    try:
        tokens = context.thoughts.encode(text)
    except ValueError as error:
        raise invalid(f"thinking_budget_text: {error}", "thinking_budget_text") from None
    return fields.thinking_budget, list(tokens), context.config.tool_format


def choices(context: ServingContext, fields: OpenAIFields) -> int:
    """How many answers to each prompt; RequestError 400 for too many."""
    count = 1 if fields.n is None else fields.n
    if count > context.config.settings.max_choices:
        raise invalid(f"n {count}: allowed are 1 to {context.config.settings.max_choices}", "n")
    return count


def check_top_logprobs(context: ServingContext, count: int, param: str):
    """RequestError 400 if more alternatives are wanted than the server gives."""
    if count > context.config.settings.max_top_logprobs:
        raise invalid(f"{param} {count}: allowed are at most {context.config.settings.max_top_logprobs}", param)


def stream_keys(seed: int | None, prompts: int, count: int) -> list[int]:
    """Keys of `count` answers to each prompt, prompt by prompt; without a seed no client can guess them."""
    seed = secrets.randbits(63) if seed is None else seed
    return [stream_key(seed, prompt, choice) for prompt in range(prompts) for choice in range(count)]


def stream_key(seed: int, prompt: int, choice: int) -> int:
    """The signed 64-bit key of the random stream of one choice for one prompt of a request with this seed:
    `token_sampling.stream_keys(seed, SERVE_STEP, prompt, choice)`, without torch.
    """
    key = _splitmix64(seed + _GOLDEN_GAMMA)
    for counter in (SERVE_STEP, prompt, choice):
        key = _splitmix64((key ^ (counter & _MASK)) + _GOLDEN_GAMMA)
    return key - 2**64 if key >> 63 else key


def _splitmix64(state: int) -> int:
    z = state & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def temperature(fields: SamplingFields) -> float:
    """The temperature of the log-probs: greedy responses have those of temperature 1."""
    return 1.0 if fields.temperature in (None, 0) else float(fields.temperature)


def generation(
    context: ServingContext,
    fields: SamplingFields,
    prompt: Sequence[int],
    max_tokens: int,
    key: int,
    top_logprobs: int = 0,
    routes: bool = False,
    stops: Sequence[str] = (),
) -> Generate:
    """What a replica is asked for one response, whose text has its `stops`. RequestError 400 for wrong stop tokens."""
    size = context.config.vocab_size
    end_ids = fields.stop_token_ids or []
    if end_ids and max(end_ids) >= size:
        raise invalid(f"stop_token_ids: token ids must be 0 to {size - 1}", "stop_token_ids")
    own_ends = [] if fields.ignore_eos else context.encoder.tokenizer.end_ids
    top_k = fields.top_k or 0
    return Generate(
        prompt=list(prompt),
        key=key,
        max_tokens=max_tokens,
        temperature=temperature(fields),
        greedy=fields.temperature == 0,
        top_k=top_k if 0 < top_k < size else 0,
        top_p=1.0 if fields.top_p is None else float(fields.top_p),
        min_p=float(fields.min_p or 0),
        end_ids=list(dict.fromkeys([*own_ends, *end_ids])),
        stops=list(stops),
        thinking=_thinking(context, fields),
        top_logprobs=top_logprobs,
        routes=routes,
    )
