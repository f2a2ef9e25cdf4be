"""The program: `gemma4c`, or `python -m gemma4c`."""

import signal
import sys

from gemma4c import _gemma4c


def main() -> None:
    """Runs the program with the arguments of this process, and exits with its code."""
    # Ctrl-C is the program's own: Python would hear of it only after the program has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_gemma4c.main(["gemma4c", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
