"""Reads a Hugging Face folder: config.json, and the names, types and shapes of its tensors."""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megarl.errors import UsageError, one_line
from megarl.mcore.weights.hf import quantized
from megarl.mcore.weights.hf.stored_tensors import FolderTensor, StoredTensor
from megarl.plain_files import is_absent, read_json, reason_of

CONFIG = "config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_BYTES = 2**28  # of a JSON file
READABLE = ("F32", "BF16", "F16")


class HFFolder:
    """A folder as transformers' `save_pretrained` writes it, with weights in safetensors.

    Every error is a UsageError of one line that starts with `flag` and the path.
    """

    def __init__(self, path: str | Path, flag: str = "--hf-model"):
        """Reads config.json; the weights' headers are read when `tensors` is first used."""
        self.path, self.flag = Path(path), flag
        self.unnamed: set[str] = set()  # tensors that the index does not name, once `tensors` was used
        if not os.path.isdir(self.path):
            is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))
            hint = f"; nothing is downloaded: fetch it first (hf download {path} --local-dir …)" if is_name else ""
            raise self.error(f"no such folder{hint}")
        self.config = self._json(CONFIG)
        if self.config is None:
            raise self.error(f"{CONFIG} is missing; allowed is a folder of transformers' save_pretrained")

    def error(self, problem: str) -> UsageError:
        """A UsageError about this folder. Names from its files cannot break the line, nor make it endless."""
        return UsageError(one_line(f"{self.flag} {self.path}: {problem}"))

    @functools.cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors of the files by name; with an index, those that it names. UsageError for missing or damaged files."""
        index = self._json(INDEX)
        if index is None:
            if not (self.path / SINGLE).exists():
                others = sorted(path.name for path in self.path.glob("*.bin"))
                hint = f"; {others[0]} is a pickle: convert it to safetensors" if others else ""
                raise self.error(f"{SINGLE} and {INDEX} are missing{hint}")
            return self._header(SINGLE)
        file_of = index.get("weight_map")
        if not isinstance(file_of, dict) or not file_of or not all(isinstance(name, str) for name in file_of.values()):
            raise self.error(f"{INDEX} has no weight_map of tensor names to files")
        files = sorted(set(file_of.values()))
        if (self.path / SINGLE).exists() and SINGLE not in files:
            raise self.error(f"holds both {INDEX} and {SINGLE}; remove the one that is not the model's")
        for file in files:
            if Path(file).name != file:
                raise self.error(f"{INDEX} names {file!r}, which is no file of this folder")
        headers = {file: self._header(file) for file in files}
        for name, file in file_of.items():
            if name not in headers[file]:
                raise self.error(f"{INDEX} puts {name} into {file}, which does not hold it")
        for file, header in headers.items():
            for name in header:
                if file_of.get(name, file) != file:
                    raise self.error(f"{file} holds {name}, but {INDEX} puts it into {file_of[name]}")
            self.unnamed |= header.keys() - file_of.keys()
        return {name: headers[file_of[name]][name] for name in sorted(file_of)}

    @functools.cached_property
    def weights(self) -> Mapping[str, FolderTensor]:
        """The tensors as a model without quantization has them. UsageError if quantized ones do not fit together."""
        return quantized.dequantized(self.tensors, self.config, self.error)

    @functools.cached_property
    def has_weights(self) -> bool:
        """Whether the folder holds safetensors; without them it only describes a model."""
        return (self.path / SINGLE).exists() or (self.path / INDEX).exists()

    def files(self) -> list[str]:
        """Names of the weight files, in order."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    def _json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file; None if there is no such file."""
        try:
            content = read_json(self.path / name, MAX_BYTES)
        except FileNotFoundError:
            if is_absent(self.path / name):
                return None
            raise self.error(f"{name} is a link to a file that does not exist") from None
        except (ValueError, RecursionError) as error:
            raise self.error(f"{name} is not JSON ({reason_of(error)})") from None
        except OSError as error:
            raise self.error(f"{name} cannot be read ({error.strerror})") from None
        if not isinstance(content, dict):
            raise self.error(f"{name} holds no JSON object")
        return content

    def _header(self, file: str) -> dict[str, StoredTensor]:
        path = self.path / file
        try:
            if not path.is_file():
                raise self.error(f"{file} is missing")
            with safe_open(path, framework="pt") as stored:
                slices = {name: stored.get_slice(name) for name in stored.keys()}
                return {
                    name: StoredTensor(file, each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()
                }
        except (SafetensorError, OSError, ValueError) as error:
            raise self.error(f"{file} is no readable safetensors file ({' '.join(str(error).split())})") from None
