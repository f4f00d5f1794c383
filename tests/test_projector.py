"""A vision model with a stock projector (--mmproj): through the plug-in, as on the stock CPU backend."""

from __future__ import annotations

import base64
import ctypes
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import ggml_tern
from llama_server import TINY, serving

#: Of an image, and of a patch of it, in pixels; of the projector's own encoder, and of the tiny model.
SIZE, PATCH, WIDTH, N_EMBD = 28, 14, 64, 256
N_PATCHES = (SIZE // PATCH) ** 2


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CLIP with two layers and LLaVA's two-layer projector, of random weights that fit the tiny model."""
    path = tmp_path_factory.mktemp("projector") / "mmproj.gguf"
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    numbers = {"embedding_length": WIDTH, "feed_forward_length": 128, "block_count": 2, "image_size": SIZE}
    numbers |= {"projection_dim": N_EMBD, "attention.head_count": 2, "patch_size": PATCH}
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5] * 3)

    def add(name: str, *shape: int) -> None:
        is_matrix = name.endswith(".weight") and len(shape) > 1 and "position" not in name
        values = random.normal(size=shape, scale=0.3)
        writer.add_tensor(name, values.astype(np.float16 if is_matrix else np.float32))

    def add_pair(name: str, *shape: int) -> None:
        add(f"{name}.weight", *shape)
        add(f"{name}.bias", shape[0])

    add("v.class_embd", WIDTH)
    add("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    add("v.position_embd.weight", N_PATCHES + 1, WIDTH)
    for name in (
        "v.pre_ln",
        "v.post_ln",
        *(f"v.blk.{n}.{norm}" for n in range(2) for norm in ("ln1", "ln2")),
    ):
        add_pair(name, WIDTH)
    for n in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add_pair(f"v.blk.{n}.{name}", WIDTH, WIDTH)
        add_pair(f"v.blk.{n}.ffn_up", 128, WIDTH)
        add_pair(f"v.blk.{n}.ffn_down", WIDTH, 128)
    add_pair("mm.0", N_EMBD, WIDTH)
    add_pair("mm.2", N_EMBD, N_EMBD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encode(model: str, projector: str) -> dict[str, Any]:
    """In a process of its own: what mtmd makes of an image, on TERN0 and on the CPU, without and with flash
    attention."""
    ggml_tern.enable()
    import llama_cpp
    from llama_cpp import mtmd_cpp as mtmd

    text_model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
    image = np.random.default_rng(1).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    found: dict[str, Any] = {}
    for on_device in (True, False):
        for flash in (0, 1):
            params = mtmd.mtmd_context_params_default()
            params.use_gpu, params.n_threads, params.flash_attn_type = on_device, 1, flash
            params.media_marker, params.warmup = b"<image>", False
            context = mtmd.mtmd_init_from_file(projector.encode(), text_model, params)
            pixels = image.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmap = mtmd.mtmd_bitmap_init(SIZE, SIZE, pixels)
            text = mtmd.mtmd_input_text(b"<image>", len(b"<image>"), False, True)
            chunks = mtmd.mtmd_input_chunks_init()
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1) == 0
            for n in range(mtmd.mtmd_input_chunks_size(chunks)):
                chunk = mtmd.mtmd_input_chunks_get(chunks, n)
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                    assert mtmd.mtmd_encode_chunk(context, chunk) == 0
                    values = ctypes.cast(mtmd.mtmd_get_output_embd(context), ctypes.POINTER(ctypes.c_float))
                    shape = (mtmd.mtmd_input_chunk_get_n_tokens(chunk), N_EMBD)
                    key = f"{'device' if on_device else 'cpu'} {flash}"
                    found[key] = np.ctypeslib.as_array(values, shape).tolist()
    return found


def test_a_projector_gives_the_same_on_the_device_as_on_the_cpu(projector: Path) -> None:
    code = f"import json, test_projector as t; print(json.dumps(t.encode({str(TINY)!r}, {str(projector)!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {key: np.array(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}
    stock = found["cpu 0"]
    assert stock.shape == (N_PATCHES, N_EMBD) and np.isfinite(stock).all() and np.ptp(stock) > 1
    assert np.array_equal(found["device 0"], stock)
    # Attention of our own sums in fp32, the stock one in part in fp16.
    for key in ("device 1", "cpu 1"):
        assert np.linalg.norm(found[key] - stock) < 2e-3 * np.linalg.norm(stock), key


def png(random: np.random.Generator) -> bytes:
    """An image of noise."""
    rows = random.integers(0, 256, (SIZE, 3 * SIZE), dtype=np.uint8)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_tern_serve_answers_about_an_image(projector: Path) -> None:
    random = np.random.default_rng(5)
    images = [png(random) for _ in range(4)]
    options = ("--mmproj", str(projector), "--chat-template", "chatml", "-c", "512", "-np", "1")
    with serving(TINY, *options) as server:
        assert f"projector, larger passes {projector.stat().st_size / 1e6:,.1f}" in server.log()
        assert server.get("/props").json["modalities"]["vision"] is True

        def answer(image: bytes) -> str:
            url = "data:image/png;base64," + base64.b64encode(image).decode()
            content = [{"type": "text", "text": "Who?"}, {"type": "image_url", "image_url": {"url": url}}]
            request = {
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "ignore_eos": True,
            }
            reply = server.post("/v1/chat/completions", request | {"max_tokens": 32})
            assert reply.status == 200, reply.text
            # A marker at each end, and a token for each patch.
            assert reply.json["usage"]["prompt_tokens"] > N_PATCHES
            text: str = reply.json["choices"][0]["message"]["content"]
            return text

        answers = [answer(image) for image in images]
        assert len(set(answers)) > 1, "the image changes nothing"
        assert answer(images[0]) == answers[0]
