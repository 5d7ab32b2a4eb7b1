"""Entry point of the `embedserve` command and of `python -m embedserve`.

A Python that is too old for the server still reads this file.
"""

import io
import os
import sys


def main() -> None:
    """Runs the command line. Exits with one line if this Python or the installation cannot.

    SIGTERM interrupts from now on, so that a command leaves nothing half done, and because PID 1 of
    a container would otherwise ignore it.
    """
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        sys.exit(
            "embedserve: this is Python {}.{}, and embedserve runs on 3.11 to 3.14: install it "
            "with one of them (python3.11 -m venv)".format(*sys.version_info)
        )
    _open_closed_streams()
    # numpy's OpenBLAS starts a thread for each core of the host, even under a CPU limit, and
    # interrupts the command if a limit of processes forbids that. Nothing here needs the threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if os.environ.get("COLUMNS") == "0":  # a terminal of unknown width: rich would print nothing
        del os.environ["COLUMNS"]
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from embedserve.processes.sigterm import sigterm_interrupts

        with sigterm_interrupts():
            from embedserve.commands.cli import command_line

            command_line(*sys.argv[1:2])()
    except KeyboardInterrupt:  # during the imports; commands handle it themselves
        sys.exit(130)
    except OSError as error:  # the output of --help or --version; commands report their own
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries again at exit
        sys.exit(f"embedserve: {error}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("embedserve."):
            raise
        sys.exit(f"embedserve: {error.name} is not installed: pip install embedserve")


def _open_closed_streams() -> None:
    """Opens /dev/null as the standard streams that the caller has closed. The next sockets would
    have their descriptors, to which libraries write errors."""
    descriptor = 0
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="backslashreplace")


if __name__ == "__main__":
    main()
