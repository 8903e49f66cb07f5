"""Scripts in processes of their own that need not import torch and torch_xla anew.

A process that has imported them, and started neither a thread nor an XLA runtime, forks itself for
each script: 8 seconds of the processor less. The script gets arguments, environment, folder and
output of its own and ends like any Python process, with exit handlers and its status.
"""

import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

_LARGEST = 1 << 20  # of a request, which holds the environment


class ScriptServer:
    """Runs scripts; usable from several threads."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        # Set by the import of torch_xla, in this process too: scripts are to find what it sets.
        environment = {name: text for name, text in os.environ.items() if name != "PJRT_DEVICE"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def run(self, command, *, cwd, env, timeout):
        """``command``: a script and its arguments, or ``-m``, a module and its arguments.

        Returns and raises what ``subprocess.run(..., capture_output=True, text=True)`` does.
        """
        folder = str(Path(cwd or os.getcwd()).absolute())
        request = pickle.dumps(([str(part) for part in command], folder, dict(env)))
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


def _serve(server):
    """In a forked process, returns what it is to run."""
    while True:
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
            for standard, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, standard)
                os.close(descriptor)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        server.send(str(pid).encode())


def _prepare(command, folder, environment, set_by_imports):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({**set_by_imports, **environment})
    sys.argv[:] = command[1:] if command[0] == "-m" else command
    first = folder if command[0] == "-m" else str(Path(command[0]).resolve().parent)
    sys.path[0:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]


if __name__ == "__main__":
    number = int(sys.argv[1])
    before = dict(os.environ)
    import torch_xla.core.xla_model  # noqa: F401
    import torchvision  # noqa: F401

    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    command, *rest = _serve(socket.socket(fileno=number))
    _prepare(command, *rest, added)
    if command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        # Not by runpy: multiprocessing has to know the script as the main module.
        main = types.ModuleType("__main__")
        main.__file__ = command[0]
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), vars(main))
