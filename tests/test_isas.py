"""The kernels of every instruction set, those that this processor lacks too, against the numpy reference.

A small driver (isa/driver.cpp) is compiled with the kernels as they are: once through SIMDe, which has the
instructions in plain C++; once for 64-bit Arm, run in an emulator; and once natively with sanitizers.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ggml_tern import _core
from isa import tools
from reference import attention as attention_ref
from reference import formats as ref

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

TILE_ROWS = 8
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"] if "avx2" in _core.available_isas() else []

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni"))]
_DOTPROD = "-march=armv8.2-a+dotprod"


def files(isa: str, flags: list[str]) -> dict[Path, list[str]]:
    """Those of an instruction set, with what they are compiled with."""
    return dict.fromkeys(sorted(tools.KERNELS.glob(f"*_{isa}.cpp")), flags)


X86_FILES = files("avx2", _AVX2) | files("avxvnni", [*_AVX2, "-mavxvnni"]) | files("avx512", _AVX512)
ARM_FILES = files("neon", [_DOTPROD]) | files("i8mm", [f"{_DOTPROD}+i8mm"])


@dataclass
class Driver:
    """A command that runs the kernels of the tables `isas`. `scale`: of the work, where it is slow."""

    command: list[str]
    isas: list[str]
    folder: Path
    scale: float = 1.0
    runs: int = field(default=0)

    def run(self, isa: str, jobs: list[bytes]) -> bytes:
        self.runs += 1
        given, found = self.folder / f"{isa}-{self.runs}.in", self.folder / f"{isa}-{self.runs}.out"
        given.write_bytes(np.int64(len(jobs)).tobytes() + b"".join(jobs))
        done = subprocess.run([*self.command, isa, str(given), str(found)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        assert not done.stderr, done.stderr[-4000:]
        return found.read_bytes()


@dataclass
class Product:
    """W x. codes: uint8 [n_out, n_in], 0 to 3; scales: float16 [n_out, n_in/group]; x: f32 [n_cols, n_in]."""

    group: int
    codes: U8
    scales: npt.NDArray[np.float16]
    x: F32

    @property
    def column_bytes(self) -> int:
        n_in: int = self.x.shape[1]
        return (n_in + -(-n_in // 128) * 8 + 63) // 64 * 64

    def job(self, at_a_time: int, dense: bool) -> bytes:
        (n_out, n_in), n_cols = self.codes.shape, self.x.shape[0]
        numbers = np.array([0, self.group, n_in, n_out, n_cols], np.int64).tobytes()
        tiles = pack_tiles(self.codes, self.scales)
        return numbers + tiles + self.x.tobytes() + np.array([at_a_time, dense], np.int64).tobytes()

    def results(self, data: bytes) -> tuple[U8, F32, bytes]:
        """Quantized columns uint8 [n_cols, column_bytes] (gaps cleared), y [n_cols, n_out], the rest."""
        n_cols, n_in = self.x.shape
        quantized = np.frombuffer(data, np.uint8, n_cols * self.column_bytes).reshape(n_cols, -1).copy()
        groups = -(-n_in // 128)
        quantized[:, n_in + groups * 4 + n_in // 64 * 2 :] = 0
        y = np.frombuffer(data, np.float32, n_cols * len(self.codes), quantized.size).reshape(n_cols, -1)
        return quantized, y, data[quantized.size + y.nbytes :]

    def expected(self) -> F32:
        fmt = ref.Q2_0 if self.group == 64 else ref.PQ2_0
        trits = self.codes.astype(np.int8) - np.int8(1)
        packed = ref.pack(fmt, trits, self.scales.astype(np.float32))
        return ref.matmul(fmt, packed, self.x)


def pack_tiles(codes: U8, scales: npt.NDArray[np.float16]) -> bytes:
    """As csrc/cpu/tiles.h draws them: codes [n_in/16][8 rows][4 bytes], scales [n_in/group][8 rows]."""
    n_out, n_in = codes.shape
    n_tiles = -(-n_out // TILE_ROWS)
    padding = ((0, n_tiles * TILE_ROWS - n_out), (0, 0))
    pairs = np.pad(codes, padding).reshape(n_tiles, TILE_ROWS, n_in // 16, 4, 4)
    packed = (pairs << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=3, dtype=np.uint8)
    packed = packed.transpose(0, 2, 1, 3).reshape(n_tiles, -1)
    tile_scales = np.pad(scales, padding).reshape(n_tiles, TILE_ROWS, -1).transpose(0, 2, 1)
    halves = np.ascontiguousarray(tile_scales).view(np.uint8).reshape(n_tiles, -1)
    tiles = np.concatenate([packed, halves], axis=1)
    return np.pad(tiles, ((0, 0), (0, -tiles.shape[1] % 64))).tobytes()


def random_product(
    rng: np.random.Generator, group: int, n_in: int, n_out: int, n_cols: int, n_codes: int = 4
) -> Product:
    codes = rng.integers(0, n_codes, (n_out, n_in)).astype(np.uint8)
    scales = rng.uniform(0.001, 1, (n_out, n_in // group)).astype(np.float16)
    x = (rng.standard_normal((n_cols, n_in)) * rng.lognormal(0, 3)).astype(np.float32)
    return Product(group, codes, scales, x)


def extreme_products(rng: np.random.Generator) -> list[Product]:
    """The largest sums, scales of 0, the least and the greatest, columns of 0 and of both signs."""
    found = []
    for group in (64, 128):
        product = random_product(rng, group, 512, 21, 14)
        product.scales[:, 0] = np.float16(2**-24)
        product.scales[:, 1] = np.float16(65504)
        product.scales[3] = 0
        product.codes[4] = 3
        product.codes[5] = 0
        product.x[0] = 0
        product.x[1] = 1
        product.x[2] = -1
        product.x[3] *= np.float32(1e30) / np.abs(product.x[3]).max()  # and no sum is infinite
        product.x[4] *= np.float32(1e-30)
        product.x[5, 128:256] = 0
        product.x[6, :128] *= np.float32(1e-42) / np.abs(product.x[6, :128]).max()
        found.append(product)
    return found


def assert_close(found: F32, expected: F32) -> None:
    """Sums of the same integers in the same order: only the rounding of fp32 additions may differ."""
    scale = np.abs(expected).max(axis=1, keepdims=True)
    scale[scale == 0] = 1
    assert (np.abs(found - expected) <= 1e-5 * scale).all()


@pytest.fixture(scope="module")
def simde(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("simde")
    include = [
        f"-I{tools.HERE.relative_to(tools.ROOT)}/simde",
        "-isystem",
        str(tools.simde_include()),
        "-Wno-psabi",
    ]
    x86, arm = ["avx512", "avxvnni", "avx2"], ["neon", "i8mm"]
    # SIMDe's AVX-512 is made of AVX2 where there is that, in a fraction of the time.
    sources = {
        tools.KERNELS / f"{name}.cpp": [*include, *AVX2_FLAGS]
        for name in (
            *(f"{what}_{isa}" for what in ("kernels", "roofline") for isa in x86),
            "attention_avx2",
            "attention_avx512",
        )
    }
    sources |= {
        tools.KERNELS / f"{what}_{name}.cpp": include for what in ("kernels", "roofline") for name in arm
    }
    # SIMDe lacks what attention_neon.cpp wants of fp16; the emulator runs that.
    drivers = ["-DDRIVER_AVX2", "-DDRIVER_VNNI", "-DDRIVER_NEON", "-DDRIVER_NO_NEON_ATTENTION"]
    sources |= tools.common_sources(drivers)
    # Unrolled and optimized, SIMDe's functions would take minutes to compile.
    program = tools.build(folder / "driver", tools.compiler(), sources, ["-O0"])
    return Driver([str(program)], ["generic", *x86, *arm], folder)


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("arm")
    sources = tools.common_sources(["-DDRIVER_NEON"]) | ARM_FILES
    emulator = [tools.qemu_aarch64(), "-cpu", "max"]
    program = tools.build(
        folder / "driver", tools.cross_compiler(), sources, ["-O2", "-static", "-Wall", "-Werror"]
    )
    return Driver([*emulator, str(program)], ["generic", "neon", "i8mm"], folder, scale=0.25)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("sanitized")
    isas: list[str] = [isa for isa in ("generic", "avx2") if isa in _core.available_isas()]
    sources = tools.common_sources(["-DDRIVER_AVX2"] if "avx2" in isas else [])
    if "avx2" in isas:
        sources |= {file: flags for file, flags in X86_FILES.items() if file.stem.endswith("_avx2")}
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    program = tools.build(folder / "driver", tools.compiler(), sources, flags)
    return Driver([str(program)], isas, folder)


@pytest.fixture(params=["simde", "arm", "sanitized"])
def driver(request: pytest.FixtureRequest) -> Driver:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Driver)
    return found


def run_products(
    driver: Driver, isa: str, products: list[Product], at_a_time: int, dense: bool = False
) -> list[tuple[U8, F32]]:
    data = driver.run(isa, [product.job(at_a_time, dense) for product in products])
    results = []
    for product in products:
        quantized, y, data = product.results(data)
        results.append((quantized, y))
    assert not data
    return results


def check_all(driver: Driver, products: list[Product], check: Callable[[Product, F32], None]) -> None:
    """Every table: the same quantized bytes as the portable one, the same bits for any number of columns."""
    generic = run_products(driver, "generic", products, 1)
    for isa in driver.isas:
        whole = run_products(driver, isa, products, 10**6)
        for at_a_time in (1, 3):
            parts = run_products(driver, isa, products, at_a_time)
            assert all(a[1].tobytes() == b[1].tobytes() for a, b in zip(whole, parts, strict=True)), isa
        for product, (quantized, y), (like, _) in zip(products, whole, generic, strict=True):
            assert quantized.tobytes() == like.tobytes(), isa
            check(product, y)


def test_products(rng: np.random.Generator, driver: Driver) -> None:
    widest = 17408 if driver.scale == 1 else 1024
    products = [random_product(rng, 64, 64, 3, 2), random_product(rng, 128, widest, 9, 5)]
    for n_cols in range(1, 34):
        group = int(rng.choice([64, 128]))
        n_in = group * int(rng.integers(1, 6))
        products.append(random_product(rng, group, n_in, int(rng.integers(1, 42)), n_cols))
    products.append(random_product(rng, 128, 256, 17, int(513 * driver.scale)))
    check_all(driver, products, lambda product, y: assert_close(y, product.expected()))


def test_dense_tiles(rng: np.random.Generator, driver: Driver) -> None:
    products = [
        random_product(rng, 128, 128 * n_groups, n_out, n_cols, n_codes=3)
        for n_groups, n_out, n_cols in ((1, 1, 1), (3, 20, 1), (9, 75, 2), (16, 33, 30))
    ]
    for isa in driver.isas:
        fast = run_products(driver, isa, products, 10**6)
        dense = run_products(driver, isa, products, 10**6, dense=True)
        assert all(a[1].tobytes() == b[1].tobytes() for a, b in zip(fast, dense, strict=True)), isa


def test_extremes(rng: np.random.Generator, driver: Driver) -> None:
    check_all(driver, extreme_products(rng), lambda product, y: assert_close(y, product.expected()))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_column_alone(
    rng: np.random.Generator, driver: Driver, value: float
) -> None:
    product = random_product(rng, 128, 384, 19, 14)
    product.x[7, 200] = value

    def check(product: Product, y: F32) -> None:
        assert np.isnan(y[7]).all()
        others = Product(
            product.group, product.codes, product.scales, np.nan_to_num(product.x, posinf=0, neginf=0)
        )
        assert_close(np.delete(y, 7, axis=0), np.delete(others.expected(), 7, axis=0))

    check_all(driver, [product], check)


def test_hadamard_and_squared_relu_have_the_same_bits(rng: np.random.Generator, driver: Driver) -> None:
    jobs = []
    for block in (1, 2, 4, 8, 16, 32, 128, 1024):
        for signed in (0, 1):
            x = rng.standard_normal((3, block)).astype(np.float32)
            signs = rng.choice([-1.0, 1.0], block if signed else 0).astype(np.float32)
            numbers = np.array([1, block, 3, signed, 0], np.int64)
            jobs.append(numbers.tobytes() + x.tobytes() + signs.tobytes())
    values = np.concatenate([rng.standard_normal(1003) * 3, [0, -0.0, 1e20, -1e20]]).astype(np.float32)
    jobs.append(np.array([2, values.size, 0, 0, 0], np.int64).tobytes() + values.tobytes())
    expected = driver.run("generic", jobs)
    for isa in driver.isas:
        assert driver.run(isa, jobs) == expected, isa


def test_attention(rng: np.random.Generator, driver: Driver) -> None:
    """Every type of K beside a random one of V, few rows and many, a mask, soft cap and ALiBi."""
    jobs, expected = [], []
    for type_k in attention_ref.TYPES:
        type_v = int(rng.choice(attention_ref.TYPES))
        for n_tokens, n_heads, n_kv_heads in ((1, 6, 3), (7, 4, 1)):
            n_kv = int(rng.integers(1, int(700 * driver.scale)))
            d_k, d_v = (32 * int(n) for n in rng.integers(1, 5, 2))
            softcap, max_bias = float(rng.choice([0, 20])), float(rng.choice([0, 8]))
            q = rng.standard_normal((n_tokens, n_heads, d_k)).astype(np.float32)
            k = attention_ref.cache(rng, type_k, n_kv, n_kv_heads, d_k)
            v = attention_ref.cache(rng, type_v, n_kv, n_kv_heads, d_v)
            mask = attention_ref.random_mask(rng, n_tokens, n_kv)
            numbers = [3, n_tokens, n_heads, n_kv_heads, n_kv, d_k, d_v, type_k, type_v]
            options = np.array([softcap, max_bias], np.float32)
            jobs.append(b"".join(a.tobytes() for a in (np.array(numbers, np.int64), options, q, k, v, mask)))
            plain = attention_ref.decoded(type_k, k), attention_ref.decoded(type_v, v)
            expected.append(attention_ref.reference(q, *plain, mask, softcap=softcap, max_bias=max_bias))
    for isa in driver.isas:
        found = np.frombuffer(driver.run(isa, jobs), np.float32)
        for want in expected:
            attention_ref.assert_matches(found[: want.size].reshape(want.shape), want)
            found = found[want.size :]
        assert found.size == 0


def test_multiply_add_loops_do_what_they_count(driver: Driver) -> None:
    """All factors are 1, so the sums add up to the number of multiply-adds."""
    n_passes = 1000
    job = np.array([4, n_passes, 0, 0, 0], np.int64).tobytes()
    for isa in driver.isas:
        of_a_pass, total = np.frombuffer(driver.run(isa, [job]), np.int64)
        assert total == of_a_pass * n_passes, isa
        assert of_a_pass >= 16, isa


def shared_symbols(cxx: tools.Compiler, sources: dict[Path, list[str]], flags: list[str]) -> list[str]:
    """Those of which the linker takes one copy for all, whatever instructions it was compiled with."""
    nm = tools.Compiler([cxx.run("-print-prog-name=nm").strip()], cxx.variables)
    compiled = map(str, tools.objects(cxx, sources, flags))
    lines = nm.run("--defined-only", "--demangle", "--print-file-name", *compiled).splitlines()
    return [line for line in lines if re.search(r" [uVW] ", line)]


def test_no_instruction_set_lends_its_functions() -> None:
    """An inline function that AVX-512 was used for must not be the one that every processor runs."""
    release = ["-O3", "-DNDEBUG", "-fPIC"]
    compilers = [(tools.cross_compiler(), ARM_FILES)]
    if platform.machine() == "x86_64":
        compilers.append((tools.compiler(), X86_FILES))
    for cxx, sources in compilers:
        assert shared_symbols(cxx, sources, release) == []
    # Nothing is inlined without optimization: then there are some, and they are seen.
    assert shared_symbols(tools.cross_compiler(), files("neon", [_DOTPROD]), ["-O0"])
