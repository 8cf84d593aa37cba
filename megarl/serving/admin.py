"""/admin: pausing generation and loading weights, for those with an admin key."""

import asyncio
from pathlib import Path
from typing import Any

from megarl.serving.context import ServingContext
from megarl.serving.errors import RequestError, invalid, timed_out


async def control(context: ServingContext, command: str, **fields: Any) -> dict[str, Any]:
    """Sends a command to all replicas, and says which weights they have when all have done it. RequestError."""
    seconds = context.config.request_timeout
    try:
        async with asyncio.timeout(seconds):
            await context.dispatcher.control(command, **fields)
    except TimeoutError:
        raise timed_out(seconds) from None
    return {"status": "ok", **weights_in_use(context)}


def weights_in_use(context: ServingContext) -> dict[str, Any]:
    """Policy version and label of the first replica's weights; empty before it has connected."""
    replicas = context.dispatcher.replicas
    return {"version": replicas[0].version, "label": replicas[0].label} if 0 in replicas else {}


def weights_path(context: ServingContext, given: str) -> str:
    """The resolved path of weights that may be loaded: inside the weights folder, also after following links.

    RequestError 400 for any other path, whether it exists or not.
    """
    folder = context.config.weights_folder
    if folder is None:
        raise RequestError(404, "this server has no weights folder", code="no_weights_folder")
    root = Path(folder).resolve()
    try:
        path = (root / given).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        path = None
    if path is None or not path.is_relative_to(root):
        raise invalid("path: no such weights in the weights folder", "path")
    return str(path)
