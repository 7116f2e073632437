"""Runs and examines a script in each rank: ``python inside.py FOLDER STEPS script args…``.

Python runs this file by path, so it puts the file's folder first in ``sys.path``. `main` removes
that entry before it imports anything else, so that no import finds a module of the folder.
"""

import os
import sys


def main() -> None:
    """Examine the script that the command line names."""
    folder, steps, script, *arguments = sys.argv[1:]
    del sys.path[0]
    from pathlib import Path

    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    from paceline.train.doctor.examination import Examination

    Examination(Path(folder), int(steps), int(os.environ["RANK"])).run(script)


if __name__ == "__main__":
    main()
