"""Stands in for `python`: asks the server at a socket to run a command line in a separate fork.

Called as `warm_client.py SOCKET PYTHON ARGUMENTS`. The process of the server gets all open files of
this one, its folder and its environment, signals are handed on to it, and it ends as that one does.
Nothing of the package is imported, since this process is started anew each time.
"""

import json
import os
import signal
import socket
import sys

KEPT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT}
"""Signals that cannot be handed on, or that are about this process."""
SESSION = "AXSPARSE_TEST_SESSION"
"""Names the session of the client for the process of the server."""


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def main() -> None:
    """Run the command line; never returns."""
    address, python, *words = sys.argv[1:]
    is_script = bool(words) and (words[0] in ("-m", "-c") or not words[0].startswith("-"))
    is_usual = os.environ.get("OMP_NUM_THREADS") == "1" and "LD_PRELOAD" not in os.environ
    if not (is_script and is_usual):
        os.execv(python, [python, *words])  # noqa: S606 - what Python itself would be
    files = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    files = [file for file in files if is_open(file)]  # one was that of the folder
    env = {**os.environ, SESSION: str(os.getsid(0))}
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(address)
    folder = os.getcwd()  # noqa: PTH109
    command = {"words": words, "folder": folder, "env": env, "files": files}
    socket.send_fds(server, [json.dumps(command).encode()], files)
    for number in signal.valid_signals() - KEPT:
        signal.signal(number, lambda got, _: server.send(bytes([got])))
    said = server.recv(16)
    code = int(said) if said else -signal.SIGKILL
    if code < 0:
        if -code not in KEPT:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
