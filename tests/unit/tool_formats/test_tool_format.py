"""Ids of calls, to which results refer."""

from tests.helpers.texts.tool_calls import turn_of


def test_ids_that_results_refer_to():
    """Kimi's are those that the policy wrote, Mistral's have nine letters and digits."""
    call = "<|tool_call_begin|>%s<|tool_call_argument_begin|>{}<|tool_call_end|>"
    written = ["functions.f:0", "functions.f:1", "functions.f:1", "functions.f b:2", f"functions.f:{'1' * 300}"]
    turn = turn_of("kimi", "".join(call % each for each in written), 7)
    assert [each.id for each in turn.calls] == ["functions.f:0", "functions.f:1", "call_7_2", "call_7_3", "call_7_4"]
    assert [each.name for each in turn.calls] == ["f", "f", "f", "f b", "f"]
    written = ["abcdefgh1", "abcdefgh1", "c00700003", "a", "abcdefg-1", ""]
    text = "".join(f"[TOOL_CALLS]f[CALL_ID]{each}[ARGS]{{}}" for each in written)
    ids = [each.id for each in turn_of("mistral", text, 7).calls]
    assert ids == ["abcdefgh1", "c00700001", "c00700003", "c00700131", "c00700004", "c00700005"]
