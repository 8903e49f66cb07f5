"""Scripts in processes of their own that need not import torch and torch_xla anew.

A process that has imported them, and started neither a thread nor an XLA runtime, forks itself for
each script: 8 seconds of the processor less. The script gets arguments, environment, folder and
output of its own and ends like any Python process, with exit handlers and its status. What scripts
start as ``sys.executable`` may come from such a process too, see ``ScriptServer.python``.
"""

import gc
import importlib
import os
import pickle
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

_LARGEST = 1 << 20  # of a request, which holds the environment
# For scripts: what they are to take for their interpreter.
_EXECUTABLE = "SERVED_SCRIPT_EXECUTABLE"

# Runs scripts, and the one module that examples start, in processes of a server, and all else in a
# new interpreter: what looks at who its parent is would find the server.
_PYTHON = """#!{python} -IS
import os, pickle, socket, sys
if sys.argv[1].startswith("-") and sys.argv[1:3] != ["-m", "xla_fsdp.consolidate"]:
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
    """Runs scripts; usable from several threads.

    Args:
        modules: what the scripts need not import.

    Attributes:
        python: a file that runs scripts, and consolidation, like a Python interpreter.
    """

    def __init__(self, *modules):
        self._folder = tempfile.TemporaryDirectory(prefix="scripts-")
        address = os.path.join(self._folder.name, "socket")
        self.python = os.path.join(self._folder.name, "python")
        Path(self.python).write_text(_PYTHON.format(python=sys.executable, address=address))
        os.chmod(self.python, 0o700)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        # Set by the import of torch_xla, in this process too: scripts are to find what it sets.
        environment = {name: text for name, text in os.environ.items() if name != "PJRT_DEVICE"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), address, *modules],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def run(self, command, *, cwd, env, timeout, python=None):
        """``command``: a script and its arguments, or ``-m``, a module and its arguments.
        ``python``: what is ``sys.executable`` there, if not this process's.

        Returns and raises what ``subprocess.run(..., capture_output=True, text=True)`` does.
        """
        folder = str(Path(cwd or os.getcwd()).absolute())
        environment = {**env, _EXECUTABLE: python or sys.executable}
        request = pickle.dumps(([str(part) for part in command], folder, environment))
        outputs = [os.pipe(), os.pipe()]
        with self._lock:
            socket.send_fds(self._socket, [request], [write for _, write in outputs])
            pid = int(self._socket.recv(64))
        for _, write in outputs:
            os.close(write)
        texts = ["", ""]

        def collect(number):
            with open(outputs[number][0], errors="replace") as pipe:
                texts[number] = pipe.read()

        readers = [threading.Thread(target=collect, args=(n,), daemon=True) for n in (0, 1)]
        for reader in readers:
            reader.start()
        late = threading.Timer(timeout, os.kill, (pid, 9))
        late.daemon = True
        late.start()
        for reader in readers:
            reader.join()
        timed_out = not late.is_alive()
        late.cancel()
        with self._lock:
            self._socket.send(pickle.dumps(pid))
            status = int(self._socket.recv(64))
        if timed_out:
            raise subprocess.TimeoutExpired(command, timeout, *texts)
        return subprocess.CompletedProcess(command, status, *texts)

    def close(self):
        self._socket.close()
        self._process.wait()
        self._folder.cleanup()


def _serve(server, listener):
    """In a forked process, returns what it is to run."""
    waiting = []  # processes for launchers
    while True:
        ready, _, _ = select.select([server, listener], [], [])
        waiting = [pid for pid in waiting if not os.waitpid(pid, os.WNOHANG)[0]]
        if listener in ready:
            asked, _ = listener.accept()
            with asked:
                waiting.append(os.fork())
                if not waiting[-1]:
                    server.close()
                    listener.close()
                    return _for_a_launcher(asked)
            continue
        packet, descriptors, _, _ = socket.recv_fds(server, _LARGEST, 2)
        if not packet:
            os._exit(0)
        request = pickle.loads(packet)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            server.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            server.close()
            listener.close()
            _print_into(descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        server.send(str(pid).encode())


def _for_a_launcher(asked):
    """In a fork of this process, returns what it is to run. This one waits for it, and ends it if
    nobody waits for this one any more."""
    packet, descriptors, _, _ = socket.recv_fds(asked, _LARGEST, 2)
    pid = os.fork()
    if pid == 0:
        _print_into(descriptors)
        return pickle.loads(packet)
    ready, _, _ = select.select([asked, ended := os.pidfd_open(pid)], [], [])
    if ended not in ready:
        os.kill(pid, 9)
    _, status = os.waitpid(pid, 0)
    if ended in ready:
        asked.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _print_into(descriptors):
    for standard, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, standard)
        os.close(descriptor)


def _prepare(command, folder, environment, set_by_imports):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({**set_by_imports, **environment})
    sys.executable = os.environ.pop(_EXECUTABLE, sys.executable)
    sys.argv[:] = command[1:] if command[0] == "-m" else command
    first = folder if command[0] == "-m" else str(Path(command[0]).resolve().parent)
    sys.path[0:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]


if __name__ == "__main__":
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(sys.argv[2])  # who asks before this process is ready waits
    listener.listen()
    before = dict(os.environ)
    # Collections, of which the end of a process is one, would look through all that is imported.
    gc.disable()
    for module in sys.argv[3:]:
        importlib.import_module(module)
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()
    gc.enable()
    command, *rest = _serve(socket.socket(fileno=int(sys.argv[1])), listener)
    _prepare(command, *rest, added)
    if command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        # Not by runpy: multiprocessing has to know the script as the main module.
        main = types.ModuleType("__main__")
        main.__file__ = command[0]
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), vars(main))
