"""Checkpoints: a position in training, and all state that is needed to continue from there.

`position.Position` is a point in training. `contents.Contents` converts the script's model,
optimiser, scheduler and scaler to a dictionary of values and back. `storage` writes and reads
files. `saver.Saver` combines these modules: `Session.checkpoint` makes a saver on every rank, and
the saver loads the newest checkpoint. After each step the loop calls `Saver.due`::

    saver = Saver(Schedule(directory, 100, None, 2), contents, rank, samples, gate.outer)
    position = saver.load()
    ...
    if saver.due(step, stepped):
        saver.save(position)
"""
