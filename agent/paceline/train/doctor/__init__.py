"""What `paceline doctor` does inside a rank: runs the script, watches its first steps, looks at it.

- `inside`: the program that becomes the script;
- `watching`: what is noted while the script runs, by functions around Paceline's and torch's own;
- `calls`: the first calls of the model;
- `checks`, `drawing`: what follows from it, in sentences.

After the steps, the script's loop makes a few further turns, without a step of an optimiser, in
which `paceline.train.proof` proves its loss.

`paceline.node.starting.examining` starts the ranks and gathers what each of them leaves::

    examination = Examination(folder, steps=2, rank=0)
    examination.run("train.py")
"""
