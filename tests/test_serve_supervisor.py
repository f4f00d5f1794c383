"""The process above llama-server: exit codes, signals, and that neither outlives the other."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ggml_tern.serve import supervisor

SUPERVISE = (sys.executable, "-IS", supervisor.__file__)
SHELL = "/bin/sh"
DEAF = "trap '' TERM INT; echo ready; while :; do sleep 0.1; done"
OBEDIENT = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SUPERVISE, *command], capture_output=True, text=True, check=False, timeout=60)


def started(script: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([*SUPERVISE, SHELL, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def child_of(process: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii"))


def test_exit_codes_and_output_come_through() -> None:
    result = run(SHELL, "-c", "echo out; echo err >&2; exit 7")
    assert (result.returncode, result.stdout, result.stderr) == (7, "out\n", "err\n")
    assert run("/bin/true").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_death_by_signal_comes_through(number: signal.Signals) -> None:
    assert run(SHELL, "-c", f"ulimit -c 0; kill -{int(number)} $$").returncode == -number


def test_what_cannot_be_started(tmp_path: Path) -> None:
    result = run(str(tmp_path / "llama-server"))
    assert result.returncode == 1
    assert result.stderr == f"tern: {tmp_path}/llama-server: cannot be started: No such file or directory\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_is_passed_on(number: signal.Signals) -> None:
    with started(OBEDIENT) as process:
        process.send_signal(number)
        assert process.wait(30) == 5


def test_what_a_stop_ends_has_stopped() -> None:
    """While it loads a model, llama-server catches no signal; told twice, it exits with 1 or aborts."""
    aborting = OBEDIENT.replace("exit 5", "ulimit -c 0; kill -ABRT $$")
    for script in ("echo ready; exec sleep 60", OBEDIENT.replace("exit 5", "exit 1"), aborting):
        with started(script) as process:
            process.terminate()
            assert process.wait(30) == 0


def test_the_deaf_are_ended() -> None:
    with started(DEAF) as process:
        began = time.monotonic()
        process.terminate()
        assert process.wait(30) == 0
        assert time.monotonic() - began >= supervisor.SECONDS_TO_STOP
    with started(DEAF) as process:
        process.terminate()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(supervisor.SECONDS_TO_STOP) == 0


def test_it_takes_the_other_with_it() -> None:
    with started(DEAF) as process:
        child = child_of(process)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        for _ in range(200):
            if not Path(f"/proc/{child}/exe").exists():
                break
            time.sleep(0.05)
        else:
            pytest.fail("its child lives on")


#: Ends with 4 and the number of signals that it received.
COUNTING = (
    "n=0; trap 'n=$((n+1))' INT TERM; echo ready; for i in 1 2 3 4 5 6 7 8; do sleep 0.1; done; exit $((n+4))"
)


def test_a_stop_for_the_whole_group_arrives_once() -> None:
    """llama-server takes a second one for impatience, and may abort."""
    with subprocess.Popen(
        [*SUPERVISE, SHELL, "-c", COUNTING], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == 5


def test_ctrl_z_and_on_again() -> None:
    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]

    def wait_for(states: str) -> None:
        for _ in range(200):
            if state(process.pid) in states and state(child) in states:
                return
            time.sleep(0.05)
        pytest.fail(f"{state(process.pid)} and {state(child)}, not {states}")

    with started(OBEDIENT) as process:
        child = child_of(process)
        process.send_signal(signal.SIGTSTP)
        wait_for("T")
        process.send_signal(signal.SIGCONT)
        wait_for("SR")
        process.terminate()
        assert process.wait(30) == 5


def test_ctrl_c_in_a_terminal_arrives_once() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(SUPERVISE[0], [*SUPERVISE, SHELL, "-c", COUNTING])
    try:
        said = b""
        while b"ready" not in said:
            said += os.read(terminal, 1024)
        os.write(terminal, b"\x03")
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 5
