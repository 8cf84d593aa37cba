"""Sessions in their HTTP process: a driver takes one, asks in it, ends it; nothing that a driver sends goes further."""

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import pytest

from megarl.environments.calls import Answer, Offer, Reply
from megarl.environments.protocol import Observation, Task, parse_turn
from megarl.environments.session_front import Registry
from megarl.serving.error_answers import RequestError
from tests.helpers.envs.open_sessions import API_KEY, LOGPROBS, PROMPT, TOKENS, Leader, open_sessions
from tests.helpers.envs.session_driver import post
from tests.helpers.server import rude_clients
from tests.helpers.server.serving import stderr_in
from tests.helpers.waiting import wait_until

HELLO = [{"role": "user", "content": "2+3="}]
TOKEN_FIELDS = {"prompt_token_ids": PROMPT, "generation_token_ids": TOKENS, "generation_log_probs": LOGPROBS}


@pytest.fixture(scope="module")
def leader():
    with open_sessions(max_body_mb=1.0, max_connections=50) as made:
        yield made


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(8) as made:
        yield made


def taken(leader: Leader, number: int) -> dict:
    leader.offer(number)
    return taken_again(leader)


def finish(leader: Leader, found: dict, body, key: str | None = None) -> tuple[int, dict]:
    """(status, answer) of the end of a session."""
    return post(f"{leader.url}/sessions/{found['id']}/finish", key or found["key"], body)


def test_a_driver_takes_a_session_asks_and_ends_it(leader, threads):
    import openai

    assert post(f"{leader.url}/sessions", API_KEY)[1]["error"]["code"] == "no_session"
    found = taken(leader, 1)
    assert found["task"] == {"messages": HELLO, "answer": "5", "metadata": {"level": 1}, "task": None, "seed": 7,
                             "sample_seed": 8}  # fmt: skip
    assert (found["group"], found["sample"], found["evaluation"]) == ("4/9", 1, False)
    client = openai.OpenAI(base_url=leader.url + found["path"], api_key=found["key"], max_retries=0)
    waiting = threads.submit(client.chat.completions.create, model="policy", messages=HELLO)
    assert leader.answer().ask.messages == HELLO
    message = waiting.result().choices[0].message
    assert {name: getattr(message, name) for name in TOKEN_FIELDS} == TOKEN_FIELDS
    again = [*HELLO, message.model_dump(), {"role": "user", "content": "and?"}]
    waiting = threads.submit(client.chat.completions.create, model="policy", messages=again)
    asked = leader.answer()  # what the client sends back is not read
    assert [each["content"] for each in asked.ask.messages] == ["2+3=", "5", "and?"]
    assert not {*TOKEN_FIELDS} & {name for each in asked.ask.messages for name in each}
    assert waiting.result().usage.completion_tokens == 2
    status, _ = finish(leader, found, {"reward": 1, "correct": True, "parts": {"tests": 0.5}})
    event = leader.next()
    assert status == 200 and isinstance(event, Answer) and event.is_agent and event.failure is None
    assert event.observation == Observation([], 1.0, True, True, {"tests": 0.5})
    assert finish(leader, found, {"reward": 1})[1]["error"]["code"] == "session_ended"
    lines = [json.loads(line) for line in leader.record.read_text().splitlines()]
    assert [(line["event"], line["sample"]) for line in lines[-2:]] == [("claimed", 1), ("finished", 1)]


def test_other_dialects_have_the_tokens_where_nemo_gym_looks(leader, threads):
    import openai

    found = taken(leader, 2)
    client = openai.OpenAI(base_url=leader.url + found["path"], api_key=found["key"], max_retries=0)
    waiting = threads.submit(client.responses.create, model="policy", input=HELLO)
    leader.answer("<think>so</think>5")
    *thoughts, last = waiting.result().output
    assert {name: getattr(last, name) for name in TOKEN_FIELDS} == TOKEN_FIELDS
    assert not any(hasattr(item, "prompt_token_ids") for item in thoughts) and thoughts
    again = [*HELLO, *(item.model_dump() for item in (*thoughts, last)), {"role": "user", "content": "and?"}]
    waiting = threads.submit(client.responses.create, model="policy", input=again)
    assert [each["content"] for each in leader.answer().ask.messages] == ["2+3=", "5", "and?"]
    waiting.result()
    assert finish(leader, found, {"failure": "the simulator is gone"})[0] == 200
    assert taken_again(leader)["sample"] == 2  # once more
    leader.pool.end(2)


def test_fields_of_clients_that_train(leader, threads):
    found = taken(leader, 7)
    chat, plain = f"{leader.url}{found['path']}/chat/completions", {"model": "policy", "messages": HELLO}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}, "strict": True}}
    fields = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    more = {"metadata": {"extra": "{}"}, "tools": [tool]}
    waiting = threads.submit(post, chat, found["key"], {**plain, **fields, **more})
    leader.answer()
    status, answer = waiting.result()
    (choice,) = answer["choices"]
    assert status == 200 and answer["prompt_token_ids"] == PROMPT and choice["token_ids"] == TOKENS
    named = [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]]
    assert named == [(f"token_id:{token}", value) for token, value in zip(TOKENS, LOGPROBS, strict=True)]
    for wrong in ({"logprobs": True}, {**fields, "top_logprobs": 1}, {**fields, "stream": True}):
        status, answer = post(chat, found["key"], {**plain, **wrong})
        assert (status, answer["error"]["param"]) == (400, "logprobs")
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "routed_experts": None}
    items = [*HELLO, call | TOKEN_FIELDS, {"type": "function_call_output", "call_id": "c", "output": "5"}]
    waiting = threads.submit(post, f"{leader.url}{found['path']}/responses", found["key"], {"input": items})
    leader.answer()
    assert waiting.result()[0] == 200
    leader.pool.end(7)


def taken_again(leader: Leader) -> dict:
    """The next session that is offered, after the leader has read what came."""
    answers: list[dict] = []

    def ask() -> bool:
        leader.came += leader.pool.poll(0.01)
        status, answer = post(f"{leader.url}/sessions", API_KEY)
        answers.append(answer)
        return status == 200

    assert wait_until(ask)
    return answers[-1]


DEEP = b'{"reward": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
WRONG_ENDS = [
    ({"reward": 1, "rewards": 2}, 400, "rewards: unknown field"), ({"reward": "1"}, 400, "reward"),
    ({"reward": True}, 400, "reward"), ({"reward": None}, 400, "either a reward or a failure"),
    ({"reward": 1, "failure": "x"}, 400, "either a reward or a failure"), ({"reward": 1e10}, 400, "reward"),
    (b'{"reward": NaN}', 400, "reward"), (b'{"reward": 1e999}', 400, "reward"), (b"[]", 400, "JSON object"),
    ({"reward": 1, "parts": {"a": "b"}}, 400, "parts"), (b'{"reward": 1, "parts": {"a": 1e999}}', 400, "parts"),
    ({"reward": 1, "parts": {"a\nb": 1}}, 400, r"parts has the name 'a\nb'; allowed are 1 to 100 printable"),
    ({"reward": 1, "parts": {"../../metrics": 1}}, 400, "parts has the name '../../metrics'"),
    ({"reward": 1, "parts": {"a": -1e300}}, 400, "a is -1e+300; allowed is -1e+09 to 1e+09"),
    ({"reward": 1, "parts": {f"p{i}": 0.5 for i in range(65)}}, 400, "parts has 65 names; allowed are 64"),
    (b'{"reward": 1', 400, "no JSON"), (DEEP, 400, ""), (b"[" * 10_000, 400, ""), ({"failure": ""}, 400, "failure"),
    (b'{"failure": "' + b"x" * (2 << 20) + b'"}', 413, "more than 1048576 bytes"),
]  # fmt: skip


def test_wrong_ends_are_refused_and_the_session_goes_on(leader):
    found = taken(leader, 3)
    for body, status, said in WRONG_ENDS:
        code, answer = finish(leader, found, body)
        assert code == status, answer
        assert said in answer["error"]["message"]
    assert finish(leader, found, {"reward": -0.5})[0] == 200
    assert leader.next().observation.reward == -0.5


def test_metadata_that_json_lacks_reach_the_driver(leader):
    half = {"half": "a\ud800", "nan": [float("nan")], "more": {"\udfff": 1}}
    leader.pool.start(90, Task(HELLO, "5", half, None, 7, 8), None, "4/9/90")
    found = taken_again(leader)
    assert found["task"]["metadata"] == half | {"nan": [None]}
    assert finish(leader, found, {"failure": "a\nb \x1b[2J"})[0] == 200
    again = taken_again(leader)
    assert finish(leader, again, {"failure": "a\nb \x1b[2J"})[0] == 200
    assert leader.next().failure == r"its driver says: a\nb \x1b[2J"


def test_keys_and_names(leader, threads):
    one, other = taken(leader, 4), taken(leader, 5)
    chat = f"{leader.url}{one['path']}/chat/completions"
    body = {"model": "policy", "messages": HELLO}
    for key in (other["key"], API_KEY, "", "sk-x"):
        assert finish(leader, one, {"reward": 1}, key or "none")[0] == 401 == post(chat, key, body)[0]
    for key in ("", one["key"], "wrong"):
        assert post(f"{leader.url}/sessions", key)[0] == 401
    for path in ("x/finish", "x/v1/chat/completions", f"{one['id']}x/finish", "../finish"):
        assert post(f"{leader.url}/sessions/{path}", one["key"], {"reward": 1})[0] == 404
    for path in (f"{one['id']}/end", f"{one['id']}/v1/nothing", f"{one['id']}/v1/../finish", one["id"]):
        assert post(f"{leader.url}/sessions/{path}", one["key"], {"reward": 1})[0] in (404, 405)
    assert post(f"{leader.url}/sessions", API_KEY, {"count": 2})[1]["error"]["code"] == "unknown_field"
    assert post(chat, one["key"], {**body, "best_of": 2})[1]["error"]["code"] == "unknown_field"
    waiting = threads.submit(post, chat, one["key"], body)
    leader.next()
    leader.pool.end(4)  # the round needs it no more
    status, answer = waiting.result()
    assert (status, answer["error"]["code"]) == (409, "session_ended")
    leader.pool.end(5)
    assert wait_until(lambda: finish(leader, other, {"reward": 1})[0] == 409)


def test_a_thousand_connections_shut_out_drivers_only_while_they_last(leader):
    host, port = leader.url.removeprefix("http://").split(":")
    found = taken(leader, 6)
    connections = []
    for _ in range(1000):
        connections.append(socket.create_connection((host, int(port))))
    assert wait_until(lambda: post_or_none(f"{leader.url}/sessions", API_KEY) in (503, None))
    for connection in connections:
        connection.close()
    assert wait_until(lambda: post_or_none(f"{leader.url}/sessions/{found['id']}/finish", found["key"]) == 400)
    assert finish(leader, found, {"reward": 1})[0] == 200
    assert leader.next().observation.reward == 1.0


def test_drivers_that_break_off_leave_no_lines(tmp_path, threads):
    with stderr_in(tmp_path / "log"), open_sessions() as leader:
        found, port = taken(leader, 0), int(leader.url.rpartition(":")[2])
        body = {"model": "policy", "messages": HELLO, "stream": True}
        visits = (found["path"] + "/chat/completions", body, found["key"]), ("/sessions", {}, API_KEY)
        clients = [threads.submit(rude_clients.visit_all, port, *visit) for visit in visits]
        asked = 0
        while not all(client.done() for client in clients):
            for each in leader.pool.poll(0.01):
                asked += 1
                common = each.number, each.ticket, each.request
                leader.pool.reply(*common, Reply(parse_turn("5", 0), "stop", PROMPT, TOKENS, LOGPROBS))
        assert all(client.result() is None for client in clients) and asked > 5
        assert finish(leader, found, {"reward": 1})[0] == 200
        leader.child.connection.close()
        assert leader.child.status(20.0) == 0
    assert (tmp_path / "log").read_text() == ""


def post_or_none(url: str, key: str) -> int | None:
    """Status of a request; None if the connection is closed."""
    try:
        return post(url, key)[0]
    except (OSError, ValueError, HTTPException):  # before its answer, or in it
        return None


def test_without_keys_only_this_machine_may_ask():
    with open_sessions(api_keys=()) as leader:
        leader.offer(0)
        host = leader.url.removeprefix("http://")

        def status(name: str) -> bytes:
            with socket.create_connection(host.split(":")) as client:
                client.sendall(f"POST /sessions HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
                return client.makefile("rb").readline().split()[1]

        assert status("example.org") == b"403"
        assert wait_until(lambda: status(host) == b"200")
        leader.child.connection.close()  # the run ends
        assert leader.child.status(20.0) == 0


# -- time --------------------------------------------------------------------------------------------------------------


class Link:
    def __init__(self):
        self.told: list[Answer] = []

    def send(self, message: Answer):
        self.told.append(message)


def offered(number: int) -> Offer:
    return Offer(number, number, Task([]), f"1/2/{number}")


def test_what_no_driver_asks_for_expires(tmp_path: Path):
    async def lives():
        now, link = 100.0, Link()
        loop = asyncio.get_running_loop()
        registry = Registry(10.0, tmp_path / "record", lambda: now)
        registry.receive(link, offered(0))
        registry.receive(link, offered(1))
        now = 109.0
        first = registry.claim()
        first.session._idle_since = loop.time() - 11.0  # it has asked nothing for 11 s
        registry.expire()
        (end,) = link.told
        assert end.failure == "its driver asked nothing for 10 s" and end.replayable and end.number == 0
        with pytest.raises(RequestError, match="has ended"):
            registry.get(first.name)
        now = 118.0
        registry.expire()
        assert len(link.told) == 1  # a driver has been here 9 s ago
        now = 120.0
        registry.expire()
        assert not link.told[1].replayable and link.told[1].number == 1
        with pytest.raises(RequestError, match="no session waits"):
            registry.claim()

    asyncio.run(lives())
    events = [json.loads(line)["event"] for line in (tmp_path / "record").read_text().splitlines()]
    assert events == ["claimed", "failed"]
