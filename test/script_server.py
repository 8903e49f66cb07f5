"""Scripts in processes of their own that need not import torch and torch_xla anew.

A process that has imported them, and started neither a thread nor an XLA runtime, forks itself for
each script: 8 seconds of the processor less. The script has its own arguments, environment, folder
and output, and ends like any Python process, with exit handlers and its status.
"""

import fcntl
import gc
import importlib
import os
import pickle
import runpy
import select
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

_LARGEST = 1 << 20  # of a request, which holds the environment
# For scripts: what they are to take for their interpreter.
_EXECUTABLE = "SERVED_SCRIPT_EXECUTABLE"

# Runs what examples start in processes of a server, and all else in a new interpreter: a compiler
# of a plan ends with its parent, which would be the server.
_PYTHON = """#!{python} -IS
import os, pickle, socket, sys
evaluates = os.path.basename(sys.argv[1]) == "evaluate.py"
if not evaluates and sys.argv[1:3] != ["-m", "xla_fsdp.consolidate"]:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect("{address}")
    request = pickle.dumps((sys.argv[1:], os.getcwd(), dict(os.environ)))
    socket.send_fds(server, [request], [1, 2])
    status = int(server.recv(64))
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class ScriptServer:
    """Runs scripts that need not import ``modules``. Several processes share the server in a
    folder, which ends with the process ``TEST_PROCESS``. ``python``: a file that runs scripts, and
    consolidation, like a Python interpreter."""

    def __init__(self, folder, *modules):
        folder = Path(folder)
        self._address = str(folder / "socket")
        self.python = str(folder / "python")
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(self.python):
                self._start(modules)

    def _start(self, modules):
        # Set by the import of torch_xla, in this process too: scripts are to find what it sets.
        environment = {name: text for name, text in os.environ.items() if name != "PJRT_DEVICE"}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._address)  # who asks before the server is ready waits
            listener.listen()
            listener.set_inheritable(True)
            os.posix_spawn(
                sys.executable,
                [sys.executable, __file__, str(listener.fileno()), *modules],
                environment,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                setsid=True,  # other processes may need it after this one has ended
            )
        Path(self.python).write_text(_PYTHON.format(python=sys.executable, address=self._address))
        os.chmod(self.python, 0o700)

    def run(self, command, *, cwd, env, timeout, python=None):
        """As ``subprocess.run(..., capture_output=True, text=True)``, of a script, or ``-m`` and a
        module, and arguments. ``python``: ``sys.executable`` there, if not this process's."""
        folder = str(Path(cwd or os.getcwd()).absolute())
        environment = {**env, _EXECUTABLE: python or sys.executable}
        request = pickle.dumps(([str(part) for part in command], folder, environment))
        outputs = [os.pipe(), os.pipe()]
        texts = ["", ""]

        def collect(number):
            with open(outputs[number][0], errors="replace") as pipe:
                texts[number] = pipe.read()

        readers = [threading.Thread(target=collect, args=(n,), daemon=True) for n in (0, 1)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(self._address)
            socket.send_fds(server, [request], [write for _, write in outputs])
            for _, write in outputs:
                os.close(write)
            for reader in readers:
                reader.start()
            server.settimeout(timeout)
            try:
                status = int(server.recv(64))
            except TimeoutError:
                status = None  # the end of this connection ends the script
        for reader in readers:
            reader.join()
        if status is None:
            raise subprocess.TimeoutExpired(command, timeout, *texts)
        return subprocess.CompletedProcess(command, status, *texts)


def _serve(listener):
    waiting = []  # processes for those who ask
    while os.path.exists(f"/proc/{os.environ['TEST_PROCESS']}"):
        ready, _, _ = select.select([listener], [], [], 1.0)
        waiting = [pid for pid in waiting if not os.waitpid(pid, os.WNOHANG)[0]]
        if ready:
            asked, _ = listener.accept()
            with asked:
                waiting.append(os.fork())
                if not waiting[-1]:
                    listener.close()
                    return _for_one(asked)
    os._exit(0)


def _for_one(asked):
    """Returns, in a fork, what to run. Here: waits for it, and ends it if the client is gone."""
    packet, descriptors, _, _ = socket.recv_fds(asked, _LARGEST, 2)
    pid = os.fork()
    if pid == 0:
        for standard, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        return pickle.loads(packet)
    for descriptor in descriptors:
        os.close(descriptor)
    ready, _, _ = select.select([asked, ended := os.pidfd_open(pid)], [], [])
    if ended not in ready:
        os.kill(pid, 9)
    _, status = os.waitpid(pid, 0)
    if ended in ready:
        asked.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _prepare(command, folder, environment, set_by_imports):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({**set_by_imports, **environment})
    sys.executable = os.environ.pop(_EXECUTABLE, sys.executable)
    sys.argv[:] = command[1:] if command[0] == "-m" else command
    first = folder if command[0] == "-m" else str(Path(command[0]).resolve().parent)
    sys.path[0:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]


if __name__ == "__main__":
    before = dict(os.environ)
    # Collections, of which the end of a process is one, would look through all that is imported.
    gc.disable()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()
    gc.enable()
    command, *rest = _serve(socket.socket(fileno=int(sys.argv[1])))
    _prepare(command, *rest, added)
    if command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        # Not by runpy: multiprocessing has to know the script as the main module.
        main = types.ModuleType("__main__")
        main.__file__ = command[0]
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), vars(main))
