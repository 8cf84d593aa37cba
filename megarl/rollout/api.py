"""What a generator of responses can be asked, whether it is the engine of this program or a server elsewhere.

`EngineGenerator` (`engine_generator.py`) generates on this program's ranks, `RemoteGenerator` (`remote_generator.py`)
asks a server (`python -m megarl.serve`). Requests and results are the records of
`megarl/mcore/inference/generation.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

from megarl.mcore.inference.generation import Completion, GenerationRequest, TokenChunk

# wait: running requests end first; abort: they end at once; keep: they stop, and continue after `resume`.
PauseMode = Literal["wait", "abort", "keep"]


class Generator(Protocol):
    """Generates responses with a policy whose weights can be changed. Equal requests get equal tokens."""

    @property
    def version(self) -> int:
        """Of the policy: grows by one with each change of weights."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Returns one completion per request, in their order."""

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[TokenChunk]:
        """Yields the tokens of requests, numbered from 0, as they come. Closing the iterator drops the rest."""

    def abort(self, numbers: Iterable[int]):
        """Drops requests of the present `stream`; nothing more is yielded of them."""

    def pause(self, mode: PauseMode = "keep") -> list[TokenChunk]:
        """Stops generating and gives the cache back; returns the chunks that requests got meanwhile."""

    def resume(self):
        """Continues after `pause`."""

    def update_weights(self, path: str) -> int:
        """Loads weights from a folder; running requests continue with them. Returns the new version.

        Raises:
            UsageError: no such folder, or weights of another model; the old ones stay.
        """

    def shut_down(self):
        """Drops all requests and frees what the generator holds."""


def completions_of(chunks: Iterable[TokenChunk], count: int) -> list[Completion]:
    """The completions of requests 0 … count − 1 from all of their chunks.

    Raises:
        RuntimeError: a request has no last chunk.
    """
    parts: list[list[TokenChunk]] = [[] for _ in range(count)]
    for chunk in chunks:
        parts[chunk.number].append(chunk)
    missing = [number for number, of in enumerate(parts) if not of or of[-1].finish_reason is None]
    if missing:
        raise RuntimeError(f"generation: no end of {len(missing)} of {count} requests, the first is {missing[0]}")
    return [_completion(of) for of in parts]


def _completion(chunks: list[TokenChunk]) -> Completion:
    last = chunks[-1]
    top = None
    if any(chunk.top_logprobs is not None for chunk in chunks):
        top = [best for chunk in chunks for best in chunk.top_logprobs or []]
    return Completion(
        tokens=[token for chunk in chunks for token in chunk.tokens],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        finished=last.finish_reason == "stop",
        routes=last.routes,
        top_logprobs=top,
        versions=[chunk.version for chunk in chunks for _ in chunk.tokens],
    )
