"""Entry point of `dspark-jax` and of `python -m dspark_jax`: Ctrl-C ends it quietly also while modules are imported."""

import signal


def main() -> None:
    """Runs the command line. A Ctrl-C before it is there kills the process, which a shell reports as exit code 130."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so where SIGINT is ignored, as behind nohup
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dspark_jax.cli import main as command

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
