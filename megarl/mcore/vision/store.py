"""What the language model gets of images, by their keys, and which tokens of a stream are theirs.

A row of an image is a negative token id (`megarl.data.images.names`). So whatever compares, hashes, copies or sends
tokens tells images apart without knowing of them. Three places read the store: the embedding, the rotation, and the
layers that add features (Qwen3-VL's deepstack, 2511.21631 §2).
Shapes: T tokens, M of them rows of images, n rows of one image, H hidden size, K layers that add features.
"""

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.data.images.names import key_of, row_of
from megarl.mcore import device


class Image(NamedTuple):
    """What a tower makes of an image, on the host."""

    size: tuple[int, int, int]  # rows in time, height and width; their product is n
    embeddings: Tensor  # [n, H]
    features: Tensor  # [K, n, H]

    @property
    def bytes(self) -> int:
        return self.embeddings.nbytes + self.features.nbytes


# What gives a store an image that it does not have, by its key: the size of its rows, and all of it in any precision.
SizeOf = Callable[[int], tuple[int, int, int]]
Compute = Callable[[int], Image]


class ImageCounts(NamedTuple):
    """What a rank did with images: key -> (rows, whether it was here before) of those read, and its tower's seconds."""

    read: dict[int, tuple[int, bool]]
    seconds: float

    def plus(self, later: "ImageCounts") -> "ImageCounts":
        """Both; an image that was read twice counts as at first."""
        return ImageCounts(later.read | self.read, self.seconds + later.seconds)

    def metrics(self, role_groups) -> dict[str, float]:
        """The metrics of all replicas of a role. A collective of the role.

        Ranks of a replica read other images: under sequence parallelism each those of its tokens, and later stages
        none. An image was here before if it was on each rank that has read it.
        """
        ranks: list[ImageCounts] = role_groups.gather(self)
        read: dict[int, tuple[int, bool]] = {}
        for key, (rows, was_here) in itertools.chain.from_iterable(each.read.items() for each in ranks):
            read[key] = rows, was_here and read.get(key, (rows, True))[1]
        hits = sum(was_here for _, was_here in read.values())
        seconds = max(each.seconds for each in ranks)
        counts = [len(read), sum(rows for rows, _ in read.values()), hits, seconds]
        summed = role_groups.dp_all_reduce(torch.tensor(counts, dtype=torch.float64, device=device.device())).tolist()
        names = ("images/count", "images/tokens", "images/cache_hits")
        return dict(zip(names, map(int, summed[:3]), strict=True)) | {"time/tower_s": summed[3]}


class ImageStore(OrderedDict[int, Image]):
    """Images by key, those used last at the end, and how a model reads them."""

    def __init__(
        self,
        axes: Tensor | None,
        hidden: int,
        layers: int,
        dtype: torch.dtype,
        size_of: SizeOf | None = None,
        compute: Compute | None = None,
    ):
        """Begins empty.

        Args:
            axes: [r] which of the three positions of a token, in time, height and width, turns each rotated channel;
                None: a token has one position, its index.
            hidden: H.
            layers: K, the first layers of the model.
            dtype: of the model.
            size_of, compute: images that are not here; None: they are an error.
        """
        super().__init__()
        self.axes, self.hidden, self.layers, self.dtype = axes, hidden, layers, dtype
        self._size_of, self._compute, self._seconds = size_of, compute, 0.0
        self._used: dict[int, bool] = {}  # since the last `take_counts`: key -> whether it was here

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of an image and of its features."""
        return self.hidden * (1 + self.layers) * self.dtype.itemsize

    def __missing__(self, key: int) -> Image:
        if self._compute is None:
            raise RuntimeError(f"the image {key:#x} of a token stream is not in the store of this rank")
        started = time.perf_counter()
        self.put(key, self._compute(key))
        self._seconds += time.perf_counter() - started
        return self[key]

    def put(self, key: int, image: Image):
        """Keeps an image in the model's precision."""
        self[key] = image._replace(embeddings=image.embeddings.to(self.dtype), features=image.features.to(self.dtype))

    def use(self, key: int) -> Image:
        """An image, which is then the one used last."""
        self._used.setdefault(key, key in self)
        image = self[key]
        self.move_to_end(key)
        return image

    def trim(self, size: float, kept: Collection[int] = ()):
        """Forgets the images that were not used for longest, but those to be kept, until the others have at most so
        many bytes."""
        held = sum(image.bytes for image in self.values())
        for key in [key for key in self if key not in kept]:
            if held <= size:
                return
            held -= self.pop(key).bytes

    def share(self, tokens: Tensor, group: dist.ProcessGroup):
        """Has the images of tokens [T] on all ranks of a group, each computed by one of them. A collective of the group
        if it has several ranks: all call it with the same tokens."""
        ranks = dist.get_world_size(group)
        if ranks == 1 or not (keys := keys_of(tokens)):
            return
        for key in keys:
            self._used.setdefault(key, key in self)
        is_here = torch.tensor([key in self for key in keys], dtype=torch.uint8, device=device.device())
        table = is_here.new_empty(ranks * len(keys))
        dist.all_gather_into_tensor(table, is_here, group=group)
        for number, holders in enumerate(table.view(ranks, -1).T.tolist()):
            if all(holders):
                continue
            key = keys[number]
            source = holders.index(1) if any(holders) else key % ranks
            size = _HEADER + _HEADER_OF_IMAGE + math.prod(self._size(key)) * self.row_bytes
            buffer = torch.empty(size, dtype=torch.uint8, device=device.device())
            if dist.get_rank(group) == source:
                buffer = images_to_bytes(self, [key]).to(buffer.device)
            dist.broadcast(buffer, dist.get_global_rank(group, source), group=group)
            images_from_bytes(self, buffer.cpu())

    def take_counts(self) -> ImageCounts:
        """What was done since the last call."""
        used, self._used, seconds, self._seconds = self._used, {}, self._seconds, 0.0
        return ImageCounts({key: (math.prod(self._size(key)), was_here) for key, was_here in used.items()}, seconds)

    def _size(self, key: int) -> tuple[int, int, int]:
        return self[key].size if key in self or self._size_of is None else self._size_of(key)

    def rows(self, tokens: Tensor) -> "ImageRows | None":
        """The rows of images among tokens [T]; None: there are none. Steps that become a CUDA graph decode: no token of
        a response is a row."""
        if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        at = (tokens < 0).nonzero().flatten()
        return ImageRows(at, tokens[at].cpu(), self) if len(at) else None

    def feature_rows(self, tokens: Tensor) -> "ImageRows | None":
        """`rows`, if layers add features to them."""
        return self.rows(tokens) if self.layers else None

    def positions(self, tokens: Tensor) -> Tensor:
        """[3, T] positions in time, height and width of one sequence [T] on the host: a function of its tokens alone.

        The three of a text token are equal. The one after an image is one beyond the largest of the image (2409.12191
        §2.1). An image begins at its row 0, so two without text between them are two.
        """
        is_first = (tokens < 0) & (row_of(tokens) == 0)
        spans, position, end = [], 0, 0
        for first in is_first.nonzero().flatten().tolist():
            size = self._size(key_of(int(tokens[first])))
            spans.append((position + torch.arange(first - end)).expand(3, -1))
            position += first - end
            grid = torch.stack(torch.meshgrid(*map(torch.arange, size), indexing="ij"))
            spans.append((position + grid.flatten(1))[:, : len(tokens) - first])
            position, end = position + max(size[1:]), first + size[0] * size[1] * size[2]
        spans.append((position + torch.arange(max(len(tokens) - end, 0))).expand(3, -1))
        return torch.cat(spans, 1)

    def packed_positions(self, tokens: Tensor, lengths: Tensor) -> Tensor | None:
        """[3, T] positions of sequences [T] one after another, on the device; None: all are those of text."""
        if self.axes is None or not (tokens < 0).any():
            return None
        sequences = tokens.cpu().split(lengths.tolist())
        return torch.cat([self.positions(each) for each in sequences], 1).to(tokens.device)


# -- images as bytes ---------------------------------------------------------------------------------------------------

_HEADER, _HEADER_OF_IMAGE = 16, 32


def keys_of(tokens: Tensor) -> list[int]:
    """The keys of the images among tokens [T], in ascending order."""
    return key_of(tokens[tokens < 0]).unique().tolist()


def images_to_bytes(store: ImageStore, keys: Sequence[int], kept: Sequence[int] = ()) -> Tensor:
    """Images of a store as uint8: two counts; of each its key and size; keys of images to be `kept`, all int64;
    embeddings and features of each."""
    images = [store[key] for key in keys]
    header = [number for key, image in zip(keys, images, strict=True) for number in (key, *image.size)]
    parts = [part for image in images for part in image[1:]]
    parts.insert(0, torch.tensor([len(keys), len(kept), *header, *kept], dtype=torch.int64))
    return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])


def images_from_bytes(store: ImageStore, buffer: Tensor) -> tuple[list[int], list[int]]:
    """Puts the images of a buffer of `images_to_bytes` into a store of a model with the same tower and precision;
    returns their keys, and those to be kept."""
    count, of_kept = buffer[:_HEADER].clone().view(torch.int64).tolist()  # a copy: it may begin at any byte
    start, at = _HEADER + _HEADER_OF_IMAGE * count, _HEADER + _HEADER_OF_IMAGE * count + 8 * of_kept
    header = buffer[_HEADER:start].clone().view(torch.int64).view(count, 4).tolist()
    kept = buffer[start:at].clone().view(torch.int64).tolist()
    for key, *size in header:
        rows = size[0] * size[1] * size[2]
        parts = []
        for shape in ((rows, store.hidden), (store.layers, rows, store.hidden)):
            end = at + math.prod(shape) * store.dtype.itemsize
            parts.append(buffer[at:end].clone().view(store.dtype).view(shape))
            at = end
        if key not in store:
            store.put(key, Image((size[0], size[1], size[2]), parts[0], parts[1]))
    return [key for key, *_ in header], kept


# -- how a model reads them --------------------------------------------------------------------------------------------


class ImageRows(NamedTuple):
    """The rows of a stream that are of images."""

    at: Tensor  # [M] int64 their places in the stream
    ids: Tensor  # [M] int64 on the host
    store: ImageStore

    def of_rank(self, count: int, group) -> "ImageRows":
        """Those of this rank's `count` tokens under sequence parallelism over a group, with their places there."""
        start = dist.get_rank(group) * count
        is_own = (self.at >= start) & (self.at < start + count)
        return self._replace(at=self.at[is_own] - start, ids=self.ids[is_own.cpu()])

    def embeddings(self) -> Tensor:
        """[M, H] on the device."""
        return self._gather(lambda image: image.embeddings)

    def features(self, layer: int) -> Tensor:
        """[M, H] on the device, of the layer with this index."""
        return self._gather(lambda image: image.features[layer])

    def _gather(self, part) -> Tensor:
        keys, rows = key_of(self.ids), row_of(self.ids)
        found = torch.empty(len(keys), self.store.hidden, dtype=self.store.dtype)
        for key in keys.unique().tolist():
            is_own = keys == key
            found[is_own] = part(self.store.use(key))[rows[is_own]]
        return found.to(device.device(), non_blocking=True)


class RequestPositions:
    """Positions of the requests of an engine, by their ids: what `ImageStore.positions` says of their sequences."""

    def __init__(self, store: ImageStore):
        self._store = store
        self._prompts: dict[int, Tensor] = {}  # id -> [3, P] positions of a prompt with images
        self._shifts = torch.zeros(1, dtype=torch.int64)  # by id: position of a token after the prompt, less its index
        self._lengths = torch.zeros(1, dtype=torch.int64)  # by id: P; 0: no image

    def begin(self, request_id: int, prompt: Tensor):
        """A request begins with a prompt [P] on the host. One that is evicted keeps the positions of its prompt."""
        has_images = bool((prompt < 0).any())
        if self._prompts.pop(request_id, None) is None and not has_images:
            return
        missing = request_id + 2 - len(self._shifts)  # the last place is that of padding
        self._shifts, self._lengths = (
            torch.nn.functional.pad(each, (0, max(missing, 0))) for each in (self._shifts, self._lengths)
        )
        self._shifts[request_id] = self._lengths[request_id] = 0
        if has_images:
            found = self._store.positions(torch.cat([prompt, prompt.new_zeros(1)]))
            self._prompts[request_id] = found[:, :-1]
            self._lengths[request_id] = len(prompt)
            self._shifts[request_id] = found[0, -1] - len(prompt)

    def shifts(self, requests: Tensor) -> Tensor:
        """[T] what the position of a token after its prompt is more than its index. `requests`: [T] ids, −1: none."""
        return self._shifts[requests.clamp(max=len(self._shifts) - 1)]

    def at(self, indices: Tensor, requests: Tensor) -> Tensor:
        """[3, T] positions of tokens, or [T] if the three are equal for all. `indices`, `requests`: [T] of the tokens
        in their sequences, and the ids of these, −1: padding; on the host."""
        shifted = indices + self.shifts(requests)
        is_prompt = indices < self._lengths[requests.clamp(max=len(self._lengths) - 1)]
        if not is_prompt.any():
            return shifted
        found = shifted.expand(3, -1).clone()
        for request_id in requests[is_prompt].unique().tolist():
            own = (is_prompt & (requests == request_id)).nonzero().flatten()
            found[:, own] = self._prompts[request_id][:, indices[own]]
        return found


def axes_of(sections: tuple[int, int, int], is_interleaved: bool) -> Tensor:
    """[r] axis (0 time, 1 height, 2 width) of each rotated channel, of which the sections have r/2 frequencies.

    Plain (Qwen2-VL, GLM-4.5V): the first frequencies are of time, the next of height, the last of width. Interleaved
    (Qwen3-VL, Qwen3.5): height and width have every third one, up to three times their section, time the others.
    """
    half = torch.zeros(sum(sections), dtype=torch.int64)
    if is_interleaved:
        for axis in (1, 2):
            half[axis : 3 * sections[axis] : 3] = axis
    else:
        half[sections[0] : sections[0] + sections[1]] = 1
        half[sections[0] + sections[1] :] = 2
    return half.repeat(2)


def attach(chunk, store: ImageStore):
    """Has a model's chunk read the images of a store: its embedding, its rotations, and its first layers."""
    if chunk.images is store:  # two roles may run one model
        return
    chunk.images = store
    if chunk.replaces_rows:
        return
    if chunk.pre_process:
        # Rows of images stand on token 0, whose gradient then has exactly nothing of them.
        chunk.embedding.word_embeddings.register_forward_pre_hook(lambda module, args: (args[0].clamp(min=0),))
        chunk.embedding.register_forward_hook(_replacer(chunk), with_kwargs=True)
    for layer in chunk.decoder.layers:
        if layer.layer_number <= store.layers:
            layer.register_forward_hook(_adder(chunk, layer.layer_number - 1), with_kwargs=True)


def share(chunk, tokens: Tensor | Sequence[int], group: dist.ProcessGroup):
    """As `ImageStore.share`, for a model's chunk; nothing on pipeline stages that read no rows."""
    store: ImageStore | None = chunk.images
    if store is None:
        return
    if chunk.pre_process or any(layer.layer_number <= store.layers for layer in chunk.decoder.layers):
        store.share(torch.as_tensor(tokens), group)


def _replacer(chunk):
    def replace(module, args, kwargs, embedded: Tensor) -> Tensor:
        rows = chunk.images.rows((args[0] if args else kwargs["input_ids"]).flatten())
        if rows is None:
            return embedded
        rows = _of_rank(rows, chunk, embedded)
        return embedded.index_copy(0, rows.at, rows.embeddings().unsqueeze(1).to(embedded.dtype))

    return replace


def _adder(chunk, number: int):
    """The hook of the layer with this index.

    Rows come with the micro-batch or step, not from the module: a layer that is computed again in backward sees its own
    micro-batch.
    """

    def add(layer, args, kwargs, output):
        context, packing = kwargs.get("inference_context"), kwargs.get("packed_seq_params")
        rows = packing.images if context is None else context.plan(kwargs.get("rotary_pos_emb")).images
        if rows is None:
            return output
        hidden, *rest = output
        rows = _of_rank(rows, chunk, hidden)
        added = rows.features(number).unsqueeze(1).to(hidden.dtype)
        return (hidden.index_add(0, rows.at, added), *rest)

    return add


def _of_rank(rows: ImageRows, chunk, hidden: Tensor) -> ImageRows:
    return rows.of_rank(len(hidden), chunk.pg_collection.tp) if chunk.config.sequence_parallel else rows
