"""A server with keys, weights and a small limit of bodies, which tests share that bring none of their own."""

import pytest

from tests.helpers.server.serving import answering, openai_client


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "weights" / "step_9").mkdir(parents=True)
    (folder / "secret").mkdir()
    (folder / "weights" / "link").symlink_to(folder / "secret")
    keys = dict(api_keys=["sk-1", "sk-2"], admin_keys=["root"])
    with answering(folder, {}, **keys, weights_folder=str(folder / "weights"), max_body_mb=5000 / 2**20) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's client of the module's server."""
    with openai_client(server) as made:
        yield made
