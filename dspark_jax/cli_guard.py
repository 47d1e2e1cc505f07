"""How commands end on bad input and on Ctrl-C: one line on stderr, no traceback."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from dspark_jax.errors import DSparkError, RequestError, is_out_of_memory

BAD_INPUT, INTERRUPTED = 2, 130


def stop(message: str, code: int) -> NoReturn:
    """Prints `message` and exits with `code`."""
    print(f"dspark-jax: {message}", file=sys.stderr)
    raise SystemExit(code)


def check_out(option: str, path: Path | None) -> None:
    """Raises RequestError, before anything runs, for an output file that could not be written."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise RequestError(f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}; make it, or choose another path")
    if path.is_dir():
        raise RequestError(f"{option} {str(path)!r} is a folder; expected the path of a file")


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """One line on stderr for bad input and for Ctrl-C, no traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except DSparkError as error:
            stop(f"error: {error}", BAD_INPUT)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            stop(f"error: out of memory ({reason}); `dspark-jax inspect` shows what a model takes", BAD_INPUT)
        except KeyboardInterrupt:
            stop("interrupted", INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output has gone. Python would complain once more when it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        except OSError as error:
            if error.filename is None:
                raise
            stop(f"error: {str(error.filename)!r}: {error.strerror}; check the path and its permissions", BAD_INPUT)

    return run
