"""The part of `paceline doctor` that runs inside each rank.

This package runs the script, records what the script does in its first steps, and derives findings:

- `inside`: the program that is started in place of the script, and runs the script;
- `watching`: wrappers around Paceline's and torch's functions, which record the script's calls, and
  hooks that record the model's forward calls in the first step;
- `checks`, `drawing`: turn the record into findings, in sentences.

After the examined steps, the script's loop runs a few further iterations without an optimiser step.
In these iterations, `paceline.train.proof` checks whether the script's loss allows uneven local
batches.

`paceline.node.starting.examining` starts the ranks and collects the file that each rank writes::

    examination = Examination(folder, steps=2, rank=0)
    examination.run("train.py")
"""
