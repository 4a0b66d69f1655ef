"""The command ``headrace``, also as ``python -m headrace``. Ctrl-C while it is being loaded ends it without a
traceback."""

import signal
import sys


def main() -> int:
    """Run this process's command; returns the exit code."""
    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_handled:  # not where the caller wants it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headrace.serving.cli.main import main as run_command

    if is_handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
