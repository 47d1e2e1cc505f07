"""What `dspark-jax launch` runs in every process: `python -m dspark_jax.cli_process COMMAND …`.

An orderly end of a process waits for the others, but a fault must not: they may be waiting for this one. So what fails
ends at once, with its own exit code, and `launch` stops the rest.
"""

import os
import runpy
import sys
import threading
import time
import traceback

from dspark_jax.cli_guard import INTERRUPTED


def main() -> None:
    """Runs a dspark-jax command, or a Python script."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    code = _run(sys.argv[1:])
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(command: list[str]) -> int:
    try:
        if is_script(command[0]):
            sys.argv = command
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
            runpy.run_path(command[0], run_name="__main__")
        else:
            from dspark_jax import cli

            sys.argv = ["dspark-jax", *command]
            _keep_native_code_off_stdout()
            cli.main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end_with(parent: int) -> None:
    """Ends this process when `launch` is gone, however that came."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def is_script(word: str) -> bool:
    """Whether it names a Python script, not a command of dspark-jax."""
    return word.endswith(".py")


def _keep_native_code_off_stdout() -> None:
    """Python keeps stdout; native code, such as Gloo, which announces its connections there, writes to nowhere."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding=sys.stdout.encoding, errors="replace")


if __name__ == "__main__":
    main()
