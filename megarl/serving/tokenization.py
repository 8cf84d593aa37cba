"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shapes."""

from typing import Any

from megarl.serving.context import ServingContext
from megarl.serving.conversation import template_messages, template_tools
from megarl.serving.errors import invalid
from megarl.serving.schemas import DetokenizeRequest, TokenizeRequest


async def tokenize(context: ServingContext, request: TokenizeRequest) -> dict[str, Any]:
    """The ids that the same text or messages would have as a prompt."""
    context.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if request.prompt is not None:
        tokens = await context.encode_text(request.prompt, request.add_special_tokens)
    else:
        tools = template_tools(request.tools) if request.tools else None
        tokens = await context.encode_chat(template_messages(request.messages or []), tools)
    names = [context.vocabulary.token(token)[0] for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": context.max_length, "tokens": tokens, "token_strs": names}


async def detokenize(context: ServingContext, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, without special tokens."""
    context.check_model(request.model)
    if request.tokens:
        context.check_prompt(request.tokens, "tokens")
    return {"prompt": context.encoder.tokenizer.decode(request.tokens)}


def tokenizer_info(context: ServingContext) -> dict[str, Any]:
    """Special tokens and chat template, for clients that tokenize with this server, such as lm-eval."""
    tokenizer, template = context.encoder.tokenizer, context.encoder.template
    return {
        "eos_token": tokenizer.eos_token,
        "bos_token": tokenizer.bos_token,
        "pad_token": None,
        "vocab_size": context.config.vocab_size,
        "chat_template": template.source if template else None,
    }
