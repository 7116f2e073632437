"""Becomes a script that is examined: ``python inside.py FOLDER STEPS script args…``, in each rank.

It is run by path, like a script. What is imported here must not come from this file's folder, which
Python puts first where it looks for modules.
"""

import os
import sys


def main() -> None:
    """Examines the script that the command line names."""
    folder, steps, script, *arguments = sys.argv[1:]
    del sys.path[0]
    from pathlib import Path

    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    from paceline.train.doctor.examination import Examination

    Examination(Path(folder), int(steps), int(os.environ["RANK"])).run(script)


if __name__ == "__main__":
    main()
