"""Compare the logits of a served ternary model with a plain computation on its decoded weights.

    python benchmarks/compare_logits.py MODEL.gguf HF_DIR  # a converted checkpoint and its config
    python benchmarks/compare_logits.py MODEL.gguf         # Qwen3: config from the file itself

The served logits come from stock llama.cpp (through llama-cpp-python) with the plug-in, on the main device
and with everything on the CPU list, with KV caches in fp16 and in fp32. The plain computation is the
transformers implementation in float32 on the CPU, whose every weight is decoded from the same file. For
scale, stock llama.cpp without the plug-in computes the same weights in a stock ternary type: TQ2_0, or
Q2_0 where a matrix does not fit into TQ2_0.

The text is Python's own help (pydoc_data.topics), which is on every machine. Printed for every way: mean
and largest KL divergence in nats, KL(plain || served), and the share of positions with the same top token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from ggml_tern import _core
from ggml_tern.convert.model.architectures import Role, TensorSpec
from ggml_tern.convert.quantize.targets import Target
from ggml_tern.convert.quantize.ternarize import Piece, Stats
from ggml_tern.convert.write.writer import OutputFile
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.gguf.repacking import unrotate
from ggml_tern.tensors.types import type_by_id

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
HOST_ARGUMENT = "--serve-one-request"


# ---- the served logits: each in a process of its own, since a plug-in once loaded stays ----


@dataclass(frozen=True)
class Serving:
    """How llama.cpp is to compute. kv_type is a ggml type id, F16 or F32."""

    plugin: bool = True
    n_gpu_layers: int = 99
    kv_type: int = _core.TYPE_F16
    flash_attention: bool = False
    n_batch: int = 512
    n_threads: int = 2


def host_logits(model: Path, tokens: I32, serving: Serving) -> F32:
    """Logits at every position of tokens, int32 [n_tokens] -> float32 [n_tokens, vocabulary].

    Raises TernError when the host cannot load or run the model; what it says goes to stderr.
    """
    return np.frombuffer(
        _ask_host({"model": str(model), "tokens": tokens.tolist(), "serving": asdict(serving)}), np.float32
    ).reshape(len(tokens), -1)


def host_tokens(model: Path, text: str, plugin: bool = True) -> I32:
    """The token ids of text, with the BOS token where the model wants one."""
    serving = asdict(Serving(plugin=plugin))
    return np.frombuffer(_ask_host({"model": str(model), "text": text, "serving": serving}), np.int32)


def _ask_host(request: dict[str, Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        # -P: this script's folder must not shadow packages of the same names.
        command = [sys.executable, __file__, HOST_ARGUMENT, str(answer)]
        done = subprocess.run(command, input=json.dumps(request), text=True, stdout=subprocess.DEVNULL)
        if done.returncode != 0 or not answer.exists():
            raise TernError(f"{request['model']}: the host failed with exit code {done.returncode}")
        return answer.read_bytes()


def _serve_one_request(answer: Path) -> None:
    request = json.load(sys.stdin)
    serving = Serving(**request["serving"])
    from ggml_tern.host import stock as host

    if serving.plugin:
        host.enable()
    else:
        os.environ.update(host.library_variables())
    import llama_cpp

    wants_text = "text" in request
    llm = llama_cpp.Llama(
        request["model"],
        n_gpu_layers=serving.n_gpu_layers,
        n_ctx=max(len(request.get("tokens", [])), 64),
        n_batch=serving.n_batch,
        n_ubatch=serving.n_batch,
        n_threads=serving.n_threads,
        n_threads_batch=serving.n_threads,
        type_k=serving.kv_type,
        type_v=serving.kv_type,
        flash_attn=serving.flash_attention,
        logits_all=not wants_text,
        vocab_only=wants_text,
        verbose=False,
    )
    if wants_text:
        answer.write_bytes(np.array(llm.tokenize(request["text"].encode()), np.int32).tobytes())
        return
    llm.eval(request["tokens"])
    answer.write_bytes(llm.scores[: len(request["tokens"])].tobytes())


# ---- the plain computation ----


def decoded_weights(path: Path) -> Iterator[tuple[str, F32]]:
    """Every tensor of the file in float32, [n_out, n_in] or [n_in], by its GGUF name."""
    header = _core.read_gguf_header(str(path))
    for tensor in header["tensors"]:
        n_in, n_out = tensor["shape"][0], int(np.prod(tensor["shape"][1:]))
        start, kind = header["data_offset"] + tensor["offset"], tensor["type"]
        data = np.fromfile(path, np.uint8, tensor["nbytes"], offset=start).reshape(n_out, -1)
        if kind in _core.TERNARY_TYPES:
            values = _core.dequantize(kind, data)
        else:
            values = gguf.dequantize(data, gguf.GGMLQuantizationType(kind)).astype(np.float32)
        yield tensor["name"], values.reshape(n_in) if len(tensor["shape"]) == 1 else values


def qwen3_config(path: Path) -> Any:
    """The transformers configuration of a Qwen3 file, from its own keys."""
    from transformers import Qwen3Config

    header = _core.read_gguf_header(str(path))
    keys = header["metadata"]
    if keys["general.architecture"] != "qwen3":
        raise TernError(f"{path}: architecture {keys['general.architecture']}: name its HF directory")
    names = {t["name"] for t in header["tensors"]}
    try:
        width, n_heads = keys["qwen3.embedding_length"], keys["qwen3.attention.head_count"]
        return Qwen3Config(
            vocab_size=len(keys["tokenizer.ggml.tokens"]),
            hidden_size=width,
            intermediate_size=keys["qwen3.feed_forward_length"],
            num_hidden_layers=keys["qwen3.block_count"],
            num_attention_heads=n_heads,
            num_key_value_heads=keys.get("qwen3.attention.head_count_kv", n_heads),
            # llama.cpp's defaults, where a file does not say.
            head_dim=keys.get("qwen3.attention.key_length", width // n_heads),
            rms_norm_eps=keys["qwen3.attention.layer_norm_rms_epsilon"],
            rope_parameters={"rope_type": "default", "rope_theta": keys.get("qwen3.rope.freq_base", 10000.0)},
            tie_word_embeddings="output.weight" not in names,
        )
    except KeyError as error:
        raise TernError(f"{path}: key {error} is missing: name its HF directory") from error


def plain_logits(path: Path, config: Any, tokens: I32) -> F32:
    """Logits at every position by transformers in float32: int32 [n_tokens] -> [n_tokens, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    arch = _core.read_gguf_header(str(path))["metadata"]["general.architecture"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), config.num_hidden_layers
    )
    parameters = {names.get_name(name, (".weight",)): p for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, values in decoded_weights(path):
            if name == "rope_freqs.weight":
                continue  # a function of the config, not a weight
            if arch == "gemma3" and name.endswith("norm.weight"):
                values = values - 1  # transformers multiplies by 1 + weight, GGUF files hold the sum
            elif arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
                # GGUF orders the rows of a head for rotating neighbours, transformers for rotating halves.
                n_heads = config.num_attention_heads if "_q." in name else config.num_key_value_heads
                by_pair = values.reshape(n_heads, -1, 2, values.shape[1])
                values = by_pair.swapaxes(1, 2).reshape(values.shape)
            parameter = parameters.pop(name)
            parameter.copy_(torch.from_numpy(values[: parameter.shape[0]]))
        if parameters:
            raise TernError(f"{path}: no tensors for {', '.join(map(str, parameters))}")
        logits: F32 = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    return logits


# ---- the same weights in a stock type ----


class _KeysOnly(gguf.GGUFReader):
    """gguf-py's reader for the keys of a file with tensor types that it does not know."""

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        pass


def write_stock_copy(path: Path, out: Path) -> str:
    """The same model with every ternary matrix in TQ2_0 where it fits without loss, else in Q2_0, which
    always takes it. Returns the names of the types used."""
    header = _core.read_gguf_header(str(path))
    used = set()
    tensors: list[tuple[Target, npt.NDArray[np.uint8]]] = []
    for tensor in header["tensors"]:
        kind, start = tensor["type"], header["data_offset"] + tensor["offset"]
        shape = tuple(reversed(tensor["shape"]))
        data = np.fromfile(path, np.uint8, tensor["nbytes"], offset=start)
        if kind in _core.TERNARY_TYPES:
            rows = data.reshape(int(np.prod(shape[:-1])), -1)
            try:
                data, kind = _core.transcode(kind, _core.TYPE_TQ2_0, rows), _core.TYPE_TQ2_0
            except ValueError:
                data, kind = _core.transcode(kind, _core.TYPE_Q2_0, rows), _core.TYPE_Q2_0
            used.add(_core.type_name(kind))
        tensors.append((Target(TensorSpec(tensor["name"], shape, Role.MATRIX), type_by_id(kind)), data))

    with OutputFile(out, header["metadata"]["general.architecture"]) as output:
        for key, field in _KeysOnly(path).fields.items():
            if key.startswith("GGUF.") or key == "general.architecture":
                continue
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            output.metadata.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
        output.write_header([target for target, _ in tensors])
        for target, data in tensors:
            output.write_tensor(target, iter([Piece(data, Stats())]), lambda n_bytes: None)
        output.commit()
    return " + ".join(sorted(used))


# ---- comparing ----


@dataclass(frozen=True)
class Agreement:
    """KL divergences in nats; top1: share of positions with the same most probable token."""

    mean_kl: float
    max_kl: float
    top1: float
    positions: int


def compare(plain: F32, served: F32) -> Agreement:
    """KL(plain || served) over the softmax of each position; both float32 [positions, vocabulary]."""
    kl = np.empty(len(plain))
    for i, (a, b) in enumerate(zip(plain, served, strict=True)):
        p, q = (row.astype(np.float64) - row.max() for row in (a, b))
        p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
        kl[i] = (np.exp(p) * (p - q)).sum()
    same = plain.argmax(axis=1) == served.argmax(axis=1)
    return Agreement(float(kl.mean()), float(kl.max()), float(same.mean()), len(plain))


def entropy(logits: F32) -> float:
    """Mean entropy of the softmax of each position, in nats."""
    p = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    p -= np.log(np.exp(p).sum(axis=1, keepdims=True))
    return float(-(np.exp(p) * p).sum(axis=1).mean())


def real_text() -> str:
    """English prose that is on every machine with Python: the language reference's help topics."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@click.command(help=__doc__.split("\n")[0])
@click.argument("model", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("hf_dir", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False)
@click.option("--positions", default=512, show_default=True, help="Length of the text in tokens.")
@click.option("--threads", default=2, show_default=True)
@click.option("--no-stock", is_flag=True, help="Leave out stock llama.cpp on the same weights.")
def main(model: Path, hf_dir: Path | None, positions: int, threads: int, no_stock: bool) -> None:
    try:
        run(model, hf_dir, positions, threads, not no_stock)
    except TernError as error:
        raise click.ClickException(str(error)) from error


def run(model: Path, hf_dir: Path | None, positions: int, threads: int, with_stock: bool) -> None:
    if hf_dir is None:
        config = qwen3_config(model)
    else:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(hf_dir)
    tokens = host_tokens(model, real_text())[:positions]
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        # What a rotated model means is what it is without its rotation, of which transformers knows nothing.
        copy, source = Path(folder) / "plain.gguf", GGUFSource(model)
        if source.is_rotated:
            unrotate(source, copy, _core.TYPE_F32)
            plain, types = plain_logits(copy, config, tokens), "F32"
        else:
            plain = plain_logits(model, config, tokens)
            types = write_stock_copy(model, copy) if with_stock else ""
        Console(width=110).print(_compared(model, copy, types, tokens, plain, threads, with_stock))


def _compared(
    model: Path, copy: Path, types: str, tokens: I32, plain: F32, threads: int, with_stock: bool
) -> Table:
    """A row for each way to serve the model, and its copy in stock types if asked."""
    table = Table(title=f"{model.name}: {len(tokens)} positions, plain entropy {entropy(plain):.2f} nats")
    table.add_column("host")
    for heading in ("-ngl", "KV", "flash", "mean KL", "max KL", "top-1 %"):
        table.add_column(heading, justify="right")

    def add_row(name: str, path: Path, serving: Serving) -> None:
        got = compare(plain, host_logits(path, tokens, serving))
        table.add_row(
            name,
            str(serving.n_gpu_layers),
            _core.type_name(serving.kv_type).lower(),
            "on" if serving.flash_attention else "off",
            f"{got.mean_kl:.2e}",
            f"{got.max_kl:.2e}",
            f"{100 * got.top1:.2f}",
        )

    ways = [(_core.TYPE_F16, False), (_core.TYPE_F16, True), (_core.TYPE_F32, False)]
    for n_gpu_layers in (99, 0):
        for kv_type, flash in ways:
            serving = Serving(True, n_gpu_layers, kv_type, flash, n_threads=threads)
            add_row("plug-in", model, serving)
    if with_stock:
        for kv_type, flash in ways:
            add_row(f"stock, {types}", copy, Serving(False, 0, kv_type, flash, n_threads=threads))
    return table


if __name__ == "__main__":
    if sys.argv[1:2] == [HOST_ARGUMENT]:
        _serve_one_request(Path(sys.argv[2]))
    else:
        main()
