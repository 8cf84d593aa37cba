"""Drives a `ServedEngine` as the server does: requests are added as there is room, and all of its steps are run."""

from collections.abc import Iterator

from tests.helpers.server.server_clients import completions_of


def steps(served, requests, dropped=()) -> Iterator[list]:
    """The chunks of each step until all requests have ended; between steps the engine may be paused and resumed.

    `dropped`: numbers of requests that the caller has aborted; it may grow.
    """
    waiting = list(enumerate(requests))
    served.resume()
    while waiting or served.needs_steps:
        waiting = [item for item in waiting if item[0] not in dropped]
        while waiting and served.has_room:
            served.add(*waiting.pop(0))
        yield served.step()


def generate(served, requests) -> list:
    """The completions of requests, in their order."""
    return completions_of((chunk for chunks in steps(served, requests) for chunk in chunks), len(requests))
