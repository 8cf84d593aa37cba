"""What surrounds every request: metrics, faults, keys, sizes of bodies, and clients that go away."""

import asyncio
import hashlib
import hmac
import logging
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from megarl.serving import replica_routing
from megarl.serving.error_answers import RequestError, echo, internal, invalid, timed_out

log = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/health", "/ready")  # need no key
MAX_VALUES = 2**17  # lists, objects and fields of a body, or strings
_STRUCTURE, _STRING = (b"[", b"{", b":"), re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
NO_KEY, BEARER = "a valid API key is needed: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
CLOSED_REQUEST = 499  # nginx's status of a client that went away; only metrics see it
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 60)


class ServerMetrics:
    """Counters, gauges and histograms; times are in seconds. Labels take few values, none from a client's text."""

    def __init__(self):
        registry = self.registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "megarl_requests", "HTTP requests by endpoint and status", ["endpoint", "status"], registry=registry
        )
        self.generated_tokens = Counter("megarl_generated_tokens", "Generated tokens", registry=registry)
        self.prompt_tokens = Counter("megarl_prompt_tokens", "Tokens of the prompts to generate", registry=registry)
        self.first_token = Histogram(
            "megarl_time_to_first_token_seconds", "From request to token", buckets=_FIRST, registry=registry
        )
        self.between_tokens = Histogram(
            "megarl_time_between_tokens_seconds", "Between the tokens of a request", buckets=_BETWEEN, registry=registry
        )
        self.running = Gauge("megarl_running_requests", "Requests that a replica has", ["replica"], registry=registry)
        self.waiting = Gauge("megarl_waiting_requests", "Requests that no replica has taken", registry=registry)
        self.free_blocks = Gauge("megarl_free_cache_blocks", "Free blocks of the cache", ["replica"], registry=registry)
        self.version = Gauge("megarl_policy_version", "Version of the policy", ["replica"], registry=registry)


def observed(app, metrics: ServerMetrics, paths: Sequence[str]):
    """The outermost layer: counts requests, and turns faults into error answers and lines without any content."""

    async def answer(scope, receive, send):
        if scope["type"] != "http":
            return
        status, begun = CLOSED_REQUEST, False

        async def noted(message):
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
            await send(message)

        try:
            await app(scope, receive, noted)
        except Exception as error:
            log.error("%s at %s", type(error).__name__, _location(error))
            if not begun:
                await internal().response(scope, receive, noted)
        finally:
            endpoint = scope["path"] if scope["path"] in paths else "other"
            metrics.requests.labels(endpoint, str(status)).inc()

    return answer


def checked(app, check: Callable[[dict[str, Any]], Any], refusal: Callable = lambda error, path: error.response):
    """The application for requests that pass a check of their scope; others get the RequestError that it raises.

    What `check` returns is the application instead, if it is not None. `refusal`: the answer of an error at a path.
    """

    async def answer(scope, receive, send):
        try:
            chosen = check(scope) if scope["type"] == "http" else None
        except RequestError as error:
            return await refusal(error, scope["path"])(scope, receive, send)
        return await (chosen or app)(scope, receive, send)

    return answer


def one_length(scope: dict[str, Any]):
    """Refuses requests whose body has two lengths: a proxy before the server might read another one than the server."""
    names = [name for name, _ in scope["headers"]]
    if b"transfer-encoding" in names and b"content-length" in names or names.count(b"content-length") > 1:
        problem = "allowed is one of Content-Length and Transfer-Encoding"
        raise RequestError(400, problem, code="invalid_length", headers={"Connection": "close"})


def same_origin(host: str) -> Callable[[dict[str, Any]], None]:
    """For servers without keys, on a loopback address: no web page of another origin may use them.

    A page whose name resolves to the loopback address says that name as Host; one of another origin says it as Origin.
    """
    hosts = {"localhost", "127.0.0.1", "::1", host.lower()}

    def check(scope: dict[str, Any]):
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        asked, origin = headers.get(b"host", ""), headers.get(b"origin")
        name = asked.partition("]")[0][1:] if asked.startswith("[") else asked.partition(":")[0]  # without the port
        if name.lower() not in hosts:
            problem = f"Host {echo(asked)}: without --api-key-file this server answers requests to localhost alone"
            raise RequestError(403, problem, code="foreign_origin")
        if origin is not None and origin.partition("://")[2] != asked:
            problem = f"Origin {echo(origin)}: without --api-key-file no other page may use this server"
            raise RequestError(403, problem, code="foreign_origin")

    return check


def has_key(api_keys: Sequence[str], admin_keys: Sequence[str]) -> Callable[[dict[str, Any]], None]:
    """Checks `Authorization: Bearer`: admin keys for /admin, which does not exist without them; API keys elsewhere.
    The queue gets to know which client it is.
    """
    api, admin = (list(map(_digest, map(str.encode, keys))) for keys in (api_keys, admin_keys))

    def check(scope: dict[str, Any]):
        path = scope["path"]
        is_admin = path == "/admin" or path.startswith("/admin/")
        if is_admin and not admin:
            raise RequestError(404, "not found")
        keys = admin if is_admin else [] if path in OPEN_PATHS else api
        if keys:
            check_key(_digest(_bearer(scope)), keys, NO_KEY, BEARER)
        replica_routing.client.set(_digest(_bearer(scope)) if keys else (scope.get("client") or ("",))[0].encode())

    return check


def with_body(app, max_bytes: int, seconds: float):
    """Reads the body, up to a limit, before the application runs, and ends that if the client goes away."""

    async def answer(scope, receive, send):
        try:
            body = await _read_body(scope, receive, max_bytes, seconds)
        except RequestError as error:
            return await error.response(scope, receive, send)
        if body is None:
            return None
        gone, given = asyncio.Event(), False

        async def replay():
            nonlocal given
            if given:
                await gone.wait()
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def watch():
            while (await receive())["type"] != "http.disconnect":
                pass

        application = asyncio.create_task(app(scope, replay, send))
        watcher = asyncio.create_task(watch())
        try:
            await asyncio.wait((application, watcher), return_when=asyncio.FIRST_COMPLETED)
            gone.set()
        finally:
            watcher.cancel()
            if not application.done():
                application.cancel()
            ended = (await asyncio.gather(application, return_exceptions=True))[0]
        if isinstance(ended, Exception):
            raise ended

    return answer


async def _read_body(scope, receive, max_bytes: int, seconds: float) -> bytes | None:
    """The body; None if the client went away. RequestError for a body that is too large, slow or no JSON."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit():
        _check_length(int(declared), max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                _check_length(len(body), max_bytes)
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise timed_out(seconds) from None
    check_body(body, scope["headers"], max_bytes)
    return bytes(body)


def check_body(body: bytes | bytearray, headers: Sequence[tuple[bytes, bytes]], max_bytes: int):
    """RequestError for a body that is too large, too complex or no JSON; `headers`: with names in lower case."""
    _check_length(len(body), max_bytes)
    media = dict(headers).get(b"content-type", b"").split(b";")[0].strip().lower()
    if body and media != b"application/json":
        raise RequestError(415, "Content-Type must be application/json")
    if not is_plain(body):
        raise invalid(f"the body has more than {MAX_VALUES} lists, objects, fields or strings", code="too_complex")


def _check_length(count: int, max_bytes: int):
    if count > max_bytes:
        raise RequestError(413, f"the body has more than {max_bytes} bytes")


def is_plain(body: bytes | bytearray) -> bool:
    """Whether a JSON body has few enough lists, objects, fields and strings, without parsing it.

    Parsing holds the interpreter, and so all streams: a million fields take it seconds, long strings little.
    """
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_VALUES:
        return False
    if sum(map(body.count, _STRUCTURE)) <= MAX_VALUES:
        return True
    outside = _STRING.sub(b"", body)  # texts may hold any number of these characters
    return sum(map(outside.count, _STRUCTURE)) <= MAX_VALUES


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(scope) -> bytes:
    for name, value in scope["headers"]:
        scheme, _, key = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            return key.strip()
    return b""


def check_key(key: bytes, keys: Sequence[bytes], problem: str, headers: dict[str, str] | None = None):
    """RequestError 401 for a key that is none of these; takes the same time whichever it is."""
    if not sum(hmac.compare_digest(key, each) for each in keys):
        raise RequestError(401, problem, code="invalid_api_key", headers=headers)


def _location(error: BaseException) -> str:
    """Where an error was raised, without its message, which may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
