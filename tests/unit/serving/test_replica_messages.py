"""Each message is the same at the other end of a link."""

import pytest

from megarl.serving import links
from megarl.serving.replica_messages import (
    Abort,
    Control,
    Drain,
    Generate,
    Ready,
    Report,
    RequestUpdate,
    ScorePrompt,
    ToFrontend,
    ToReplica,
)

GENERATE = Generate([1], -5, 9, 0.5, False, 0, 1.0, 0.0, [2], ["a"], [3, [4], "hermes"], 1, True, 7, ["AA=="])
LAST = RequestUpdate(7, [1], [-0.5], [[[1, -0.5]]], "stop", {"shape": [1], "data": "AA=="})
TO_REPLICA = [GENERATE, ScorePrompt([1, 2], 1.0, 2, 8), Abort([7, 8]), Control("pause", 1, "keep"), Control("stop")]
FROM_LEADERS = [Ready(0, 8, 99, 5, 1, "a"), Report(2, "b", 5, False, [], 1, "c"), Drain()]


@pytest.mark.parametrize(("messages", "union"), [(TO_REPLICA, ToReplica), (FROM_LEADERS, ToFrontend)])
def test_messages_go_both_ways(messages, union):
    found = links.decode(links.packet(map(links.encode, messages)), links.kinds_of(union))
    assert found == messages and [type(each) for each in found] == [type(each) for each in messages]


def test_updates_are_made_of_their_fields():
    (found,) = links.decode(links.packet([links.encode(Report(3, "a", 5, updates=[LAST]))]), links.kinds_of(ToFrontend))
    (update,) = (RequestUpdate._make(each)._replace(version=3, label="step_3") for each in found.updates)
    assert update.is_last and update.fingerprint == "step_3-v3" and update == LAST._replace(version=3, label="step_3")
    assert RequestUpdate(1, error="x").is_last and not RequestUpdate(1, [5]).is_last
