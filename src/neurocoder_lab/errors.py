"""What goes wrong in a way the user can mend, and how a command ends then: a sentence and a code, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

INTERRUPTED, AT_ONCE = 3, "stopped; what was finished is kept"


class LabError(Exception):
    """Something the user can mend; shown without a traceback."""


class Stopped(Exception):
    """The run was asked to stop, and has written a checkpoint."""


def guarded(command: Callable[[], int]) -> int:
    """The code that a command ends with; what stopped it is said."""
    try:
        return command()
    except LabError as error:
        print(f"neurocoder: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        print(AT_ONCE, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
