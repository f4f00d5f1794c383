"""What can be converted: a Hugging Face model directory or a GGUF file, as tensors with their sources."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from yaml import YAMLError

from ggml_tern import _core
from ggml_tern.convert.model.architectures import Role, TensorSpec, find_architecture
from ggml_tern.convert.model.hadamard import add_rotation_keys
from ggml_tern.convert.model.input_model import InputModel
from ggml_tern.convert.model.rotated_checkpoint import apply_manifest
from ggml_tern.convert.model.sources import Source, find_sources
from ggml_tern.convert.model.vocab import read_vocab
from ggml_tern.convert.read.checkpoint import Checkpoint
from ggml_tern.convert.read.hadamard_manifest import MANIFEST_FILE, read_manifest
from ggml_tern.convert.read.lora import Adapter
from ggml_tern.errors import TernError
from ggml_tern.gguf import bitnet
from ggml_tern.gguf.identify import Kind, identify
from ggml_tern.gguf.keys import Keys
from ggml_tern.gguf.model_file import require_model
from ggml_tern.gguf.reader import (
    LEGACY_NOTE,
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS,
    GGUFSource,
    GGUFTensor,
    Part,
)
from ggml_tern.tensors.names import kind_name

#: What llama.cpp wants or is worth keeping in full precision, although it has several dimensions: routers,
#: convolutions, and the small projections of state-space layers.
_FULL_PRECISION = re.compile(
    r"(.*\.)?(ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d|ssm_alpha|ssm_beta|ssm_ba|.*norm.*)"
)


#: The matrices in the blocks that llama.cpp multiplies activations with, and does nothing else with, in every
#: architecture that has them. Whatever else has rows and columns may be a table that is looked up, a
#: convolution or a state's dynamics.
_MATRICES = re.compile(
    r"((enc|dec)\.)?blk\.\d+\.("
    r"attn_(q|k|v|qkv|gate|output|o|q_a|q_b|kv_a_mqa|kv_b)|cross_attn_(q|k|v|o)"
    r"|ffn_(gate|up|down)(_exps|_shexp|_chexps)?|ffn_gate_up_exps"
    r"|ssm_in|ssm_out|shortconv\.in_proj|shortconv\.out_proj|nextn\.eh_proj)"
)


class HuggingFaceModel(InputModel):
    """A model directory as the hub serves it: config.json, safetensors, a tokenizer."""

    def __init__(self, path: Path, adapters: Sequence[Adapter] = (), *, keep_mtp: bool = False) -> None:
        self.path = path
        self._checkpoint = Checkpoint(path, adapters)
        self._architecture = find_architecture(self._checkpoint, keep_mtp=keep_mtp)
        self.arch = gguf.MODEL_ARCH_NAMES[self._architecture.model_arch]
        self.specs = list(self._architecture.tensors())
        self.rotations = {}
        self.value_heads = self._architecture.value_heads
        self.notes = [*self._checkpoint.notes, *self._architecture.notes]
        manifest = path / MANIFEST_FILE
        # A link to nothing is a download that did not end, and not a model without a manifest.
        if manifest.exists() or manifest.is_symlink():
            self._apply_manifest(manifest, adapters)
        self.sources = find_sources(self._checkpoint, self._architecture, self.specs)
        self.tied = self._architecture.tied

    def _apply_manifest(self, path: Path, adapters: Sequence[Adapter]) -> None:
        if self.arch not in _core.ROTATED_ARCHITECTURES:
            raise TernError(
                f"{path}: rotated weights are not defined for {self.arch}, only for "
                f"{', '.join(_core.ROTATED_ARCHITECTURES)}"
            )
        if adapters:
            raise TernError(
                f"{path}: the weights are rotated, and a LoRA is of plain ones; give it to llama.cpp, whose "
                "option is --lora too"
            )
        manifest = read_manifest(path)
        self.specs, self.rotations = apply_manifest(manifest, self._architecture, self.specs)
        self.notes.append(
            f"{len(self.rotations)} tensors are stored rotated, in blocks of {manifest.block}, as "
            f"{MANIFEST_FILE} says"
        )

    def files(self) -> list[Path]:
        return self._checkpoint.files()

    def add_metadata(self, writer: gguf.GGUFWriter) -> list[str]:
        vocab = read_vocab(self.path, self._architecture.vocab_size)
        self._add_general(writer)
        self._architecture.add_metadata(writer)
        vocab.add_to(writer)
        if self.rotations:
            add_rotation_keys(writer, self.rotations, [spec.name for spec in self.specs])
        return vocab.notes

    def notes_for(self, types: Mapping[str, int]) -> list[str]:
        return self._architecture.notes_for(types)

    def _add_general(self, writer: gguf.GGUFWriter) -> None:
        """The general.* keys: name, licence and so on from the model card and the directory; size."""
        try:
            metadata = self._load_metadata()
        except (YAMLError, ValueError, TypeError, AttributeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise TernError(
                f"{self.path / 'README.md'}: the front matter cannot be read ({reason}); mend or remove the "
                "file"
            ) from None
        if metadata.name is None:
            metadata.name = model_name(self.path)
        if metadata.size_label is None:
            metadata.size_label = gguf.size_label(self.n_weights, self.n_weights, 0, 0)
        writer.add_type(gguf.GGUFType.MODEL)
        metadata.set_gguf_meta_model(writer)

    def _load_metadata(self) -> gguf.Metadata:
        path, name = self.path.resolve(), model_name(self.path)
        if path.name == name:
            return gguf.Metadata.load(model_path=path, total_params=self.n_weights)
        # gguf-py takes name, size and version from that of the folder: it gets one with the right name.
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, name)
            link.symlink_to(path)
            return gguf.Metadata.load(model_path=link, total_params=self.n_weights)


def model_name(path: Path) -> str:
    """What a model directory is called. The hub's cache keeps the model of OWNER/NAME in
    models--OWNER--NAME/snapshots/COMMIT."""
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


class GGUFModel(InputModel):
    """A GGUF file, whose tensors get other types; everything else stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFSource(path)
        require_model(self._file)
        assert self._file.architecture is not None
        self._stored_arch = self.arch = self._file.architecture
        self.tied = "output.weight" not in self._file.tensors
        self.rotations = self._file.rotations
        self.value_heads = self._value_heads()
        self.notes = []
        if self._file.is_legacy:
            self.notes.append(LEGACY_NOTE)
        if self.arch in bitnet.FOREIGN_ARCHITECTURES:
            bitnet.check_foreign(self._file)
            self.arch = bitnet.ARCHITECTURE
            self.notes.append(bitnet.renaming_note(self._stored_arch))
        self.specs = []
        sources: dict[str, list[Source]] = {}
        for tensor in self._file.tensors.values():
            self.specs.append(TensorSpec(tensor.name, tensor.shape, _role(tensor), (tensor.name,)))
            # I2_S can be written by nobody but bitnet.cpp: its values are those of float32.
            type_id, packed = tensor.type, tensor.blocks
            source = Source(tensor.rows, tensor.where, type_id, packed)
            if type_id == _core.TYPE_I2_S:
                source = Source(tensor.rows, tensor.where)
            sources[tensor.name] = [source]
        self.sources = sources
        if others := [spec for spec in self.specs if spec.role is Role.OTHER]:
            kinds = list(dict.fromkeys(kind_name(spec.name) for spec in others))
            more = f" and {len(kinds) - 5} more kinds" if len(kinds) > 5 else ""
            self.notes.append(
                f"kept as they are stored, as they are none of the matrices that ternconv knows: "
                f"{', '.join(kinds[:5])}{more} ({len(others)} tensors)"
            )

    def files(self) -> list[Path]:
        return self._file.files()

    def add_metadata(self, writer: gguf.GGUFWriter) -> list[str]:
        first = self._file.parts[0]
        rewritten = {
            gguf.Keys.General.ARCHITECTURE,
            gguf.Keys.General.FILE_TYPE,
            gguf.Keys.General.QUANTIZATION_VERSION,
            gguf.Keys.General.ALIGNMENT,
            SPLIT_COUNT,
            SPLIT_NO,
            SPLIT_TENSORS,
        }
        for key, value in self._file.metadata.items():
            if key not in rewritten:
                kind, element = _value_types(first, key)
                plain: Any = value.tolist() if isinstance(value, np.ndarray) else value
                name = bitnet.stock_key(key, self._stored_arch)
                writer.add_key_value(name, plain, kind, sub_type=element)
        if self._has_squared_relu and self.arch != self._stored_arch:
            writer.add_string(bitnet.ACTIVATION_KEY, bitnet.SQUARED_RELU)
        return []

    @property
    def _has_squared_relu(self) -> bool:
        return bitnet.has_squared_relu(self._file.metadata)

    def _value_heads(self) -> tuple[int, int] | None:
        keys = Keys(self._file, self.arch)
        heads = keys.integer("ssm.group_count", 0, least=0), keys.integer("ssm.time_step_rank", 0, least=0)
        return heads if all(heads) else None

    def notes_for(self, types: Mapping[str, int]) -> list[str]:
        return bitnet.notes_on_squared_relu(types) if self._has_squared_relu else []


def open_model(path: Path, adapters: Sequence[Adapter] = (), *, keep_mtp: bool = False) -> InputModel:
    """The model in a directory or a GGUF file.

    Raises TernError for a path that is neither, and for anything wrong with what is there.
    """
    if identify(path).kind is not Kind.GGUF:
        return HuggingFaceModel(path, adapters, keep_mtp=keep_mtp)
    if adapters:
        raise TernError(f"{path}: is a GGUF file; a LoRA is merged into a Hugging Face model directory")
    if keep_mtp:
        raise TernError(f"{path}: is a GGUF file, which keeps its MTP head if it has one; drop --mtp")
    return GGUFModel(path)


def _role(tensor: GGUFTensor) -> Role:
    name = tensor.name.removesuffix(".weight")
    if len(tensor.shape) < 2 or _FULL_PRECISION.fullmatch(name):
        return Role.VECTOR
    if name == tensor.name:
        return Role.OTHER
    if _MATRICES.fullmatch(name):
        return Role.MATRIX
    return {"token_embd": Role.EMBEDDING, "output": Role.HEAD}.get(name, Role.OTHER)


def _value_types(part: Part, key: str) -> tuple[gguf.GGUFValueType, gguf.GGUFValueType | None]:
    """The type of a key's value, and that of the elements of an array."""
    kind, element = part.header["key_types"][key]
    return gguf.GGUFValueType(kind), None if element is None else gguf.GGUFValueType(element)
