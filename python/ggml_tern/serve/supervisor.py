"""The process that stays above llama-server: a script of its own, so that next to no memory is taken.

    python -IS supervisor.py LLAMA-SERVER [ARGUMENTS]...

A llama-server that is told to stop waits for every client that is still being answered, for as long as that
client stays. This passes signals on, and ends a llama-server that has not stopped some seconds later. The
exit code is llama-server's own; one that was told to stop and had to be ended counts as stopped. If this is
killed itself, the system ends llama-server.

A second signal makes llama-server call exit() in the handler of the signal, while its threads run: it ends
with 1, or aborts. So it has a process group of its own, where only this process reaches it, also when a
terminal or a service manager tells the whole group to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time

SECONDS_TO_STOP = 3.0
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def start(command: list[str], mask: set[signal.Signals | int]) -> int:
    """Fork and become the command in the child; its process id."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        # Python ignores these two, and what is ignored or blocked stays so in the new program.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(command[0], command)
    except OSError as error:
        print(f"tern: {command[0]}: cannot be started: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def supervise(command: list[str]) -> int:
    """Run the command to its end. Returns its exit code, negative for the signal that ended it."""
    # Waited for, not handled: nothing can come in between.
    wanted = (*STOPS, signal.SIGTSTP, signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    child = start(command, mask)
    deadline = None
    while True:
        received: signal.struct_siginfo | None
        if deadline is None:
            received = signal.sigwaitinfo(wanted)
        else:
            received = signal.sigtimedwait(wanted, max(0.0, deadline - time.monotonic()))
        if received is not None and received.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                # While it loads a model, llama-server catches no signal; some service managers tell each
                # process of its own to stop, and then it is told twice.
                was_stopped = deadline is not None and (code == 1 or -code in (*STOPS, signal.SIGABRT))
                return 0 if was_stopped else code
        elif received is not None and received.si_signo == signal.SIGTSTP:
            # Ctrl-Z: both rest, until this one is continued.
            os.kill(child, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(child, signal.SIGCONT)
        elif received is None or deadline is not None:
            # Time is up, or somebody is in a hurry.
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 0
        else:
            deadline = time.monotonic() + SECONDS_TO_STOP
            os.kill(child, signal.SIGTERM)


def main() -> None:
    code = supervise(sys.argv[1:])
    if code < 0:
        # End as it did.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
