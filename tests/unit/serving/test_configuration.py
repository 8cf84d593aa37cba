"""Keys and addresses of a server, checked before any work starts."""

from types import SimpleNamespace

import pytest

from megarl.errors import UsageError
from megarl.serving.configuration import check_listening

KEY = "0123456789abcdef"


def listening(tmp_path, host: str, text: str | None) -> list[str]:
    path = None if text is None else tmp_path / "keys"
    if path is not None:
        path.write_text(text)
    return check_listening(SimpleNamespace(host=host, api_key_file=None if path is None else str(path)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_address_needs_no_keys(tmp_path, host):
    assert listening(tmp_path, host, None) == [] and listening(tmp_path, host, f"\n {KEY} \n") == [KEY]


@pytest.mark.parametrize(("host", "text", "said"), [
    ("0.0.0.0", None, "--host 0.0.0.0: others can reach it"), ("example.org", None, "--host example.org: others"),
    ("127.0.0.1", "\n", "has no key"), ("127.0.0.1", KEY[1:], "fewer than 16 characters"),
    ("127.0.0.1", f"{KEY} {KEY}", "others than letters"), ("127.0.0.1", "é" * 16, "others than letters"),
])  # fmt: skip
def test_what_is_refused(tmp_path, host, text, said):
    with pytest.raises(UsageError, match=said):
        listening(tmp_path, host, text)
