"""The settings of a report: a row for each flag, and what differs from another run."""

from megarl.extras import report_settings


def _settings(**more) -> dict:
    rates = {"actor": 1, "critic": 2}
    roles = {name: {"ranks": "0-1", "megatron": {"lr": lr, "bf16": False}} for name, lr in rates.items()}
    return {"megarl": {"seed": 1, "load": None, "tags": ["a"]}, "world_size": 4, "roles": roles} | more


def test_settings_have_a_row_for_each_flag():
    rows = report_settings.table(_settings(), None)
    assert [row[:3] for row in rows] == [
        ["run", "world_size", "4"],
        ["megarl", "load", "null"], ["megarl", "seed", "1"], ["megarl", "tags", '["a"]'],
        ["roles", "actor · ranks", "0-1"], ["roles", "critic · ranks", "0-1"],
        ["megatron", "bf16", "false"], ["megatron", "lr · actor", "1"], ["megatron", "lr · critic", "2"],
    ]  # fmt: skip
    assert not any(row[4] for row in rows)


def test_settings_of_the_user_come_first():
    said = {"megarl": ["tags", "critic_ranks"], "megatron": ["critic_lr", "bf16"]}
    settings = _settings(user_settings=said, command_line=["megarl.train_rl", "--tags", "a b", "--bf16"])
    rows = report_settings.table(settings, None)
    plain = report_settings.table(_settings(), None)
    first = [["megarl", "tags"], ["roles", "critic · ranks"], ["megatron", "bf16"], ["megatron", "lr · critic"]]
    assert [row[:2] for row in rows if row[5]] == [row[:2] for row in rows[:4]] == first
    assert rows[4:] == [row for row in plain if row[:2] not in first] and sorted(rows) != sorted(plain)
    # A flag of one role counts for the row of all roles. Of two runs either may have set it; old files say nothing.
    alike = _settings(user_settings={"megatron": ["actor_bf16"]})
    assert [row[1] for row in report_settings.table(alike, None) if row[5]] == ["bf16"]
    for pair in ((settings, _settings()), (_settings(), settings)):
        compared = report_settings.table(*pair)
        assert [row[:2] for row in compared if row[5]] == first and not any(row[4] for row in compared)
    assert not any(row[5] for row in plain)
    for damaged in (3, ["lr"], {"megarl": 3, "megatron": None}):
        assert report_settings.table(_settings(user_settings=damaged), None) == plain
    assert report_settings.command_line(settings) == "megarl.train_rl --tags 'a b' --bf16"
    assert [report_settings.command_line(_settings(**more)) for more in ({}, {"command_line": 3})] == [None, None]


def test_differences_from_another_run():
    other = _settings(megarl={"seed": 2, "load": None, "new": 0}, world_size=4)
    del other["roles"]["critic"]
    changed = {row[1]: row[2:4] for row in report_settings.table(_settings(), other) if row[4]}
    assert changed == {
        "seed": ["1", "2"], "tags": ['["a"]', None], "new": [None, "0"], "critic · ranks": ["0-1", None],
        "lr · critic": ["2", None],
    }  # fmt: skip
    assert report_settings.table(_settings(), {})[0] == ["run", "world_size", "4", None, True, False]
