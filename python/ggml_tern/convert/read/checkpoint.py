"""Read: a Hugging Face model directory as one flat set of tensors, read by rows on demand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ggml_tern.convert.read.decoding import load_rows
from ggml_tern.convert.read.json_files import CONFIG_FILE, read_json
from ggml_tern.convert.read.lora import Adapter, merge
from ggml_tern.convert.read.prefixes import with_usual_prefix
from ggml_tern.convert.read.quantization import pair_scales, read_quantization
from ggml_tern.convert.read.stacked_experts import unstacked
from ggml_tern.convert.read.stored_tensors import StoredTensor, open_safetensors
from ggml_tern.errors import TernError
from ggml_tern.gguf.identify import Kind, identify
from ggml_tern.tensors.values import Rows

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class Checkpoint:
    """An opened model directory.

    Attributes:
        directory: the model directory.
        config: the content of config.json.
        tensors: name -> StoredTensor, over all shards, in file order. Scales of quantized weights belong to
            their weights and are not listed.
        notes: one line for each thing that the user should know.

    Args:
        directory: the model directory.
        adapters: LoRAs to merge into its weights.

    Raises TernError for a directory without config.json or safetensors, a missing shard, an index that
    disagrees with the shards, a truncated or malformed safetensors file, a quantization that ternconv does
    not read, scales that do not fit their weights, and an adapter for modules that the model does not have.
    """

    def __init__(self, directory: Path, adapters: Sequence[Adapter] = ()) -> None:
        self.directory = directory
        self._adapters = adapters
        try:
            self._check_directory()
            self.config = read_json(directory / CONFIG_FILE, unique_keys=True)
            quantization = read_quantization(self.config, str(directory / CONFIG_FILE))
            self.notes: list[str] = []
            stored = self._open()
        except OSError as error:
            raise TernError(f"{error.filename or directory}: cannot be read: {error.strerror}") from None
        self.tensors, notes = pair_scales(unstacked(with_usual_prefix(stored)), quantization)
        self.notes += notes
        for adapter in adapters:
            adapter.check_model(self.tensors)

    def _check_directory(self) -> None:
        found = identify(self.directory)
        if found.kind is not Kind.CHECKPOINT:
            raise found.refusal()
        self._has(CONFIG_FILE)

    def _has(self, name: str) -> bool:
        """Whether the directory holds a file. Raises TernError for a link to nothing: the cache of the hub is
        made of links, and one that dangles is a download that did not end."""
        path = self.directory / name
        if path.is_symlink() and not path.exists():
            raise TernError(
                f"{path}: is a link to {path.readlink()}, which leads nowhere; finish the download"
            )
        return path.is_file()

    def _open(self) -> dict[str, StoredTensor]:
        """All stored tensors by name: of the one file where that is there, as transformers has it, or of the
        shards."""
        names = sorted(path.name for path in self.directory.iterdir())
        single = self._has(SINGLE_FILE)
        beside = [name for name in names if _SHARD.fullmatch(name)]
        if self._has(INDEX_FILE):
            shards = self._read_index()
            if not single or SINGLE_FILE in shards:
                return self._open_index(shards)
            beside = [INDEX_FILE, *beside]
        if single:
            if beside:
                more = f" and {len(beside) - 1} shards" if len(beside) > 1 else ""
                self.notes.append(
                    f"{SINGLE_FILE} is converted, which transformers loads too, and not {beside[0]}{more} "
                    f"beside it; if those are the ones that you mean, move {SINGLE_FILE} away"
                )
            return {tensor.name: tensor for tensor in open_safetensors(self.directory / SINGLE_FILE)}
        if beside := [name for name in beside if self._has(name)]:
            return self._open_shards(beside)
        raise TernError(
            f"{self.directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}{self._hint_at_weights(names)}"
        )

    def _hint_at_weights(self, names: list[str]) -> str:
        """What to do with weights under names that mean nothing here."""
        found = [name for name in names if name.endswith(_OTHER_WEIGHTS) and self._has(name)]
        if not found:
            return ""
        if len(found) == 1 and found[0].endswith(".safetensors"):
            return f"; found {found[0]}: if that is all of the model, name it {SINGLE_FILE}"
        return f"; found {', '.join(found[:3])}, save the model as safetensors first"

    def _read_index(self) -> dict[str, list[str]]:
        """The shards that the index lists, and the names of the tensors in each."""
        index_path = self.directory / INDEX_FILE
        weight_map = read_json(index_path, unique_keys=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise TernError(f"{index_path}: has no weight_map; download the file again")
        shards: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            # A shard name is a plain file name: a path would let an index reach files outside the model
            # directory.
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise TernError(
                    f"{index_path}: tensor {name} names the shard {shard!r}, which is not a plain file name"
                )
            shards.setdefault(shard, []).append(name)
        return shards

    def _open_index(self, shards: dict[str, list[str]]) -> dict[str, StoredTensor]:
        missing = [shard for shard in sorted(shards) if not self._has(shard)]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise TernError(
                f"{self.directory}: shard {missing[0]}{more} is missing, of {len(shards)} that {INDEX_FILE} "
                "lists; finish the download"
            )
        tensors: dict[str, StoredTensor] = {}
        for shard in sorted(shards):
            expected = set(shards[shard])
            for tensor in open_safetensors(self.directory / shard):
                if tensor.name not in expected:
                    raise TernError(
                        f"{self.directory / shard}: holds {tensor.name}, which {INDEX_FILE} has elsewhere"
                    )
                expected.discard(tensor.name)
                tensors[tensor.name] = tensor
            if expected:
                raise TernError(
                    f"{self.directory / shard}: lacks {min(expected)}, which {INDEX_FILE} places there"
                )
        return tensors

    def _open_shards(self, shards: list[str]) -> dict[str, StoredTensor]:
        """Shards without an index, by name in order: their names tell whether all are there."""
        totals = {int(shard[15:20]) for shard in shards}
        if len(totals) > 1:
            raise TernError(
                f"{self.directory}: has no {INDEX_FILE} and shards of several sets, {shards[0]} and "
                f"{shards[-1]} among them; download {INDEX_FILE}"
            )
        total = totals.pop()
        whole = {f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)}
        if missing := whole - set(shards):
            raise TernError(
                f"{self.directory}: has {len(shards)} of {total} shards and no {INDEX_FILE}; {min(missing)} "
                "is missing, so finish the download"
            )
        tensors: dict[str, StoredTensor] = {}
        for shard in shards:
            for tensor in open_safetensors(self.directory / shard):
                if tensor.name in tensors:
                    raise TernError(
                        f"{tensor} is in {tensors[tensor.name].file.name} too; download {INDEX_FILE}, which "
                        "says where it belongs"
                    )
                tensors[tensor.name] = tensor
        self.notes.append(f"there is no {INDEX_FILE}; the names of the {total} shards make a full set")
        return tensors

    def files(self) -> list[Path]:
        """Every file that the conversion may read from: what an output must never overwrite."""
        own = sorted(path for path in self.directory.iterdir() if path.is_file())
        return own + [path for adapter in self._adapters for path in adapter.files()]

    def load(self, tensor: StoredTensor) -> Rows:
        """The values of a tensor, decoded and merged as rows are asked for: see `decoding.load_rows`."""
        return merge(load_rows(tensor), tensor, self._adapters)


__all__ = ["CONFIG_FILE", "INDEX_FILE", "SINGLE_FILE", "Checkpoint", "Rows", "StoredTensor", "read_json"]
