"""What does not go with images in prompts, and a source of a store."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megarl.batch import Batch
from megarl.comm import exchange
from megarl.comm.exchange import PendingSends
from megarl.data.images.book import Images
from megarl.data.images.names import image_ids
from megarl.errors import UsageError
from megarl.mcore.vision.store import Image, ImageStore, images_from_bytes, images_to_bytes
from megarl.trainers import image_inputs
from megarl.trainers.image_inputs import RunImages, folders_of
from tests.helpers.models.batches import create_mesh
from tests.helpers.worlds import run_world


def config(model_folder=None, role: str = "actor", virtual: int | None = None, **settings):
    plain = {"mtp_drafts": False, "predicts": False, "rollout_server": None, "environment": None}
    args = SimpleNamespace(model_folder=model_folder, virtual_pipeline_model_parallel_size=virtual)
    one = SimpleNamespace(name=role, megatron=args)
    return SimpleNamespace(settings=SimpleNamespace(**plain | settings), with_models=lambda: [one], trained=("actor",))


@pytest.mark.parametrize(
    "given, needle",
    [
        ({"predicts": True}, "multi-token prediction (--mtp-drafts, --mtp-train) does not go with images"),
        ({"mtp_drafts": True}, "multi-token prediction (--mtp-drafts, --mtp-train) does not go with images"),
        ({"rollout_server": "http://x"}, "--rollout-server http://x: is sent tokens of texts alone, and prompts"),
        ({"role": "critic", "virtual": 2}, "critic: virtual pipeline stages do not go with images in prompts yet"),
        ({"role": "reward", "model_folder": "x"}, "reward: --model-source transformers does not go with images"),
    ],
)
def test_what_does_not_go_with_images(given, needle):
    with pytest.raises(UsageError) as caught:
        image_inputs._check(config(**given))
    assert needle in str(caught.value)
    image_inputs._check(config())


def run_of(tmp_path, are_shown: bool, scores: bool, reason: str | None) -> tuple:
    """(what `RunImages.of` gives, the images) of a run with an environment, whose models cannot read images if there is
    a reason."""

    def begin(images, config, encoder):
        if reason is not None:
            raise UsageError(reason)

    given = config(environment="e", save=str(tmp_path / "run"), reward="judge", load=None, load_rollouts=None)
    given.roles = {"reward": SimpleNamespace(has_model=scores)}
    images = Images("a folder without a processor")
    images.are_shown = are_shown
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunImages, "__init__", begin)
        return RunImages.of(given, SimpleNamespace(images=images), folders_of(given.settings)), images


def test_what_environments_may_show_is_refused_where_it_cannot_be_read(tmp_path):
    for are_shown in (False, True):
        assert isinstance(run_of(tmp_path, are_shown, False, None)[0], RunImages)
    found, images = run_of(tmp_path, False, False, "another family")  # and texts are
    with pytest.raises(UsageError, match="has images; another family"):
        images.keep(b"")
    assert found is None
    with pytest.raises(UsageError, match="another family"):
        run_of(tmp_path, True, False, "another family")
    with pytest.raises(UsageError, match="^--environment e: has images; --reward judge reads none of environments"):
        run_of(tmp_path, True, True, None)
    with pytest.raises(UsageError, match="has images; --reward judge reads none of environments"):
        run_of(tmp_path, False, True, None)[1].keep(b"")


def test_where_images_of_earlier_runs_are(tmp_path):
    for name in ("a/images", "a/checkpoints/step_1", "b/images", "b/rollouts"):
        (tmp_path / name).mkdir(parents=True)
    for load in ("a", "a/checkpoints/step_1"):
        settings = SimpleNamespace(load=str(tmp_path / load), load_rollouts=str(tmp_path / "b" / "rollouts"), save=None)
        assert folders_of(settings) == [tmp_path / "a" / "images", tmp_path / "b" / "images"]
    settings = SimpleNamespace(load=str(tmp_path / "a"), load_rollouts=None, save=str(tmp_path / "a"))
    assert folders_of(settings) == []


@dataclasses.dataclass
class Known:
    """Images of a process that knows one."""

    key: int

    def of_token(self, token: int):
        return SimpleNamespace(width=96, height=64) if -(token + 1) >> 16 == self.key else None

    processor = SimpleNamespace(grid=lambda width, height: (1, height // 16, width // 16))


def test_sizes_come_from_headers_alone():
    tower = SimpleNamespace(size=lambda grid: (grid[0], grid[1] // 2, grid[2] // 2))
    source = image_inputs.TowerSource(Known(7), tower)
    assert source.size(7) == (1, 2, 3)
    with pytest.raises(RuntimeError, match="the image 0x8 of a token stream is in none of the run's data"):
        source.size(8)


# -- images on their way to other ranks ----------------------------------------------------------------------------


SIZES = {5: (1, 2, 3), 6: (1, 4, 2), 2**46 + 3: (1, 1, 1)}
LAYOUTS = {
    "two replicas to one of two ranks": ("--role-map actor=0-1;critic=2-3;reward=2;reference=3"
                                         " --critic-tensor-model-parallel-size 2", 4),
    "one to two, on a rank of its own": ("--role-map actor=0;critic=1-2;reward=0;reference=0", 3),
    "same ranks": ("", 2),
}  # fmt: skip


def image(key: int, dtype: torch.dtype = torch.float32) -> Image:
    size, generator = SIZES[key], torch.Generator().manual_seed(key)
    rows = size[0] * size[1] * size[2]
    return Image(size, *(torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 4), (2, rows, 4))))


def store_with(*keys: int, dtype: torch.dtype = torch.float32) -> ImageStore:
    store = ImageStore(None, 4, 2, dtype)
    for key in keys:
        store.put(key, image(key, dtype))
    return store


def is_same(store: ImageStore, key: int, dtype: torch.dtype = torch.float32) -> bool:
    expected, found = image(key, dtype), store[key]
    return found.size == expected.size and all(map(torch.equal, found[1:], expected[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_round_trip(dtype):
    keys = sorted(SIZES)
    buffer = images_to_bytes(store_with(*keys, dtype=dtype), keys, [5])
    there = store_with(dtype=dtype)
    unaligned = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer])[3:]
    assert images_from_bytes(there, unaligned) == (keys, [5])
    assert all(is_same(there, key, dtype) for key in keys) and len(there) == 3
    assert images_from_bytes(there, images_to_bytes(there, [])) == ([], [])


def batch_of(numbers: list[int], rows: list[list[int]]) -> Batch:
    return Batch(
        sequence_ids=torch.tensor(numbers),
        lengths=torch.tensor([len(rows[i]) for i in numbers]),
        tokens=torch.tensor([t for i in numbers for t in rows[i]]),
    )


def counted(sizes: list[list]):
    """Appends the bytes that this rank sends to another one."""
    all_to_all = exchange.all_to_all

    def count(buffers, group, pending):
        sizes[-1] += [len(each) for each in buffers if len(each)]
        return all_to_all(buffers, group, pending)

    exchange.all_to_all = count


def there(rank: int, flags: str):
    """(dp rank in the critic, of each step the bytes that were sent or the keys that were kept, whether these have the
    same bits) of each rank."""
    mesh = create_mesh(flags)
    rows = [[1, *image_ids(5, 6), 2], [3], [*image_ids(6, 8), *image_ids(5, 6)], [*image_ids(5, 6), 7]]
    actor, critic = mesh["actor"], mesh["critic"]
    dp_assignment = {
        "actor": torch.arange(4) % len(actor.replicas), "critic": torch.arange(4) // 2 % len(critic.replicas)
    }  # fmt: skip
    batch = store = None
    if actor.is_member:
        batch = batch_of([i for i in range(4) if dp_assignment["actor"][i] == actor.dp_rank], rows)
        store = store_with(*SIZES)
    elif critic.is_member:
        store = store_with()
    is_apart = set(actor.ranks).isdisjoint(critic.ranks)
    pending = PendingSends() if is_apart else None
    sent, sizes = image_inputs.SentImages(), []
    counted(sizes)
    for share in (0, 400, 10**6, 10**6):  # bytes; none, one of the images and both fit
        sent.begin_step(share)
        sizes.append([])
        for _ in range(2):  # roles
            image_inputs.send_images(mesh, store, batch, "actor", "critic", dp_assignment, sent, pending)
            if pending is not None:
                pending.wait()
        if critic.is_member and is_apart:
            store.trim(0, sent.all_to_keep)
            sizes[-1].append(sorted(store))
    return critic.dp_rank, sizes, all(is_same(store, key) for key in store or ())


# A message without images; the bytes of the images 5 and 6, of 6 and 8 rows of 4 numbers and twice as many features.
EMPTY, FIVE, SIX = 16, 32 + 3 * 6 * 16, 32 + 3 * 8 * 16
KEPT = 8  # a key


def test_images_go_with_their_sequences_once():
    """Both roles of a step get an image once, and so does a later step whose replicas still have it."""
    flags, size = LAYOUTS["one to two, on a rank of its own"]
    (_, sizes, _), (first, kept, is_same_there), (second, kept_of_second, is_same_too) = run_world(there, size, flags)
    both = FIVE + SIX
    assert sizes == [
        [EMPTY + FIVE, EMPTY + both, EMPTY, EMPTY],  # in the order of the replicas, for each role
        [EMPTY + FIVE + KEPT, EMPTY + both + KEPT, EMPTY + KEPT, EMPTY + KEPT],
        [EMPTY + KEPT, EMPTY + FIVE + 2 * KEPT, EMPTY + KEPT, EMPTY + 2 * KEPT],
        [EMPTY + KEPT, EMPTY + 2 * KEPT, EMPTY + KEPT, EMPTY + 2 * KEPT],
    ]
    assert (first, second) == (0, 1) and is_same_there and is_same_too
    assert kept == [[[]], [[5]], [[5]], [[5]]] and kept_of_second == [[[]], [[6]], [[5, 6]], [[5, 6]]]


def test_all_ranks_of_a_replica_get_the_images():
    flags, size = LAYOUTS["two replicas to one of two ranks"]
    *_, third, fourth = run_world(there, size, flags)
    assert third[1][-1] == fourth[1][-1] == [[5, 6]] and third[0] == fourth[0] == 0 and third[2] and fourth[2]


def test_images_of_sequences_that_stay_are_not_sent():
    """Of the four, which two ranks share in turns, the second one's go to the other rank."""
    (_, first, _), (_, second, _) = run_world(there, 2, LAYOUTS["same ranks"][0])
    whole = EMPTY + FIVE + SIX
    assert first[:2] == [[whole, EMPTY], [whole + KEPT, EMPTY + KEPT]]
    assert first[2:] == [[EMPTY + FIVE + 2 * KEPT, EMPTY + 2 * KEPT], [EMPTY + 2 * KEPT] * 2]
    assert second == [[EMPTY, EMPTY]] * 4  # no image
