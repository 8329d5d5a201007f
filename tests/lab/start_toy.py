"""Run the toy in a process of its own: python -m tests.lab.start_toy FOLDER PAUSE SECONDS."""

import sys
from pathlib import Path

from neurocoder_lab.errors import LabError, Stopped
from neurocoder_lab.run import execute
from tests.lab.toy import EXPERIMENT, Toy

if __name__ == "__main__":
    folder, pause, seconds = sys.argv[1:]
    try:
        execute(EXPERIMENT, Toy(pause=float(pause)), Path(folder), checkpoint_seconds=float(seconds))
    except (LabError, Stopped) as error:
        print(error, file=sys.stderr)
        sys.exit(3)
