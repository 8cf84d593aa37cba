"""A server with keys, weights and a small limit of bodies, which tests share that bring none of their own."""

import pytest

from tests.helpers.server.serving import Served


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "weights" / "step_9").mkdir(parents=True)
    (folder / "secret").mkdir()
    (folder / "weights" / "link").symlink_to(folder / "secret")
    made = Served(
        folder,
        api_keys=["sk-1", "sk-2"],
        admin_keys=["root"],
        weights_folder=str(folder / "weights"),
        max_body_mb=5000 / 2**20,
    )
    yield made
    made.close()
    assert made.stderr == ""
