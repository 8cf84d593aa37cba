"""What surrounds every request: faults, keys, sizes of bodies, and clients that go away."""

import asyncio
import hashlib
import hmac
import logging
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from megarl.serving import routing
from megarl.serving.errors import RequestError, echo, internal, invalid, timed_out
from megarl.serving.metrics import ServerMetrics

log = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/health", "/ready")  # need no key
MAX_VALUES = 2**17  # lists, objects and fields of a body, or strings
_STRUCTURE, _STRING = (b"[", b"{", b":"), re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
CLOSED_REQUEST = 499  # nginx's status of a client that went away; only metrics see it


class Observed:
    """The outermost layer: counts requests, and turns faults into error answers and lines without any content."""

    def __init__(self, app, metrics: ServerMetrics, paths: Sequence[str]):
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        status = CLOSED_REQUEST
        begun = False

        async def observed(message):
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            log.error("%s at %s", type(error).__name__, _location(error))
            if not begun:
                await internal().response(scope, receive, observed)
        finally:
            endpoint = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(endpoint, str(status)).inc()


def checked(app, check: Callable[[dict[str, Any]], None]):
    """The application for requests that pass a check of their scope; others get the RequestError that it raises."""

    async def answer(scope, receive, send):
        try:
            if scope["type"] == "http":
                check(scope)
        except RequestError as error:
            return await error.response(scope, receive, send)
        return await app(scope, receive, send)

    return answer


def one_length(scope: dict[str, Any]):
    """Refuses requests whose body has two lengths: a proxy before the server might read another one than the server."""
    names = [name for name, _ in scope["headers"]]
    if b"transfer-encoding" in names and b"content-length" in names or names.count(b"content-length") > 1:
        problem = "allowed is one of Content-Length and Transfer-Encoding"
        raise RequestError(400, problem, code="invalid_length", headers={"Connection": "close"})


def same_origin(host: str) -> Callable[[dict[str, Any]], None]:
    """For servers without keys, on a loopback address: no web page of another origin may use them.

    The browser of this machine's user can reach the server. A page whose name was made to resolve to the loopback
    address says that name as Host; one of another origin says its own as Origin. `host`: that the server listens on.
    """
    hosts = {"localhost", "127.0.0.1", "::1", host.lower()}

    def check(scope: dict[str, Any]):
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        asked, origin = headers.get(b"host", ""), headers.get(b"origin")
        if _name_of(asked) not in hosts:
            problem = f"Host {echo(asked)}: without --api-key-file this server answers requests to localhost alone"
            raise RequestError(403, problem, code="foreign_origin")
        if origin is not None and origin.partition("://")[2] != asked:
            problem = f"Origin {echo(origin)}: without --api-key-file no other page may use this server"
            raise RequestError(403, problem, code="foreign_origin")

    return check


def _name_of(host: str) -> str:
    """The name in a Host header, without the port."""
    return host.partition("]")[0][1:].lower() if host.startswith("[") else host.partition(":")[0].lower()


def has_key(api_keys: Sequence[str], admin_keys: Sequence[str]) -> Callable[[dict[str, Any]], None]:
    """Checks `Authorization: Bearer`: admin keys for /admin, which does not exist without them; API keys elsewhere.

    The check says for the queue which client it is.
    """
    api, admin = (list(map(_digest, map(str.encode, keys))) for keys in (api_keys, admin_keys))

    def check(scope: dict[str, Any]):
        path = scope["path"]
        is_admin = path == "/admin" or path.startswith("/admin/")
        if is_admin and not admin:
            raise RequestError(404, "not found")
        keys = admin if is_admin else [] if path in OPEN_PATHS else api
        if keys and not _matches(_bearer(scope), keys):
            problem, headers = "a valid API key is needed: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
            raise RequestError(401, problem, code="invalid_api_key", headers=headers)
        routing.client.set(_digest(_bearer(scope)) if keys else (scope.get("client") or ("",))[0].encode())

    return check


class BodyAndDisconnect:
    """Reads the body up to a limit before the application runs, and ends the application if the client goes away."""

    def __init__(self, app, max_bytes: int, seconds: float):
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope, receive, send):
        try:
            body = await self._read(scope, receive)
        except RequestError as error:
            return await error.response(scope, receive, send)
        if body is None:
            return None
        gone = asyncio.Event()
        given = False

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

        application = asyncio.create_task(self._app(scope, replay, send))
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

    async def _read(self, scope, receive) -> bytes | None:
        """The body; None if the client went away. RequestError for a body that is too large, slow or no JSON."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit():
            _check_length(int(declared), self._max_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    _check_length(len(body), self._max_bytes)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise timed_out(self._seconds) from None
        check_body(body, scope["headers"], self._max_bytes)
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

    Parsing and validating holds the interpreter, and so all streams; a million fields take it seconds, while numbers
    and long strings take little.
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
    """The key of a request, or nothing."""
    for name, value in scope["headers"]:
        scheme, _, key = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            return key.strip()
    return b""


def _matches(key: bytes, keys: Sequence[bytes]) -> bool:
    """Whether a key is one of those with these digests; takes the same time whichever it is."""
    digest, found = _digest(key), False
    for each in keys:
        found |= hmac.compare_digest(digest, each)
    return found


def _location(error: BaseException) -> str:
    """Where an error was raised, without its message, which may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
