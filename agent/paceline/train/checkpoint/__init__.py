"""Checkpoints: where training is, and everything that it needs to go on from there.

`position.Position` is a point in training. `contents.Contents` turns model, optimiser, scheduler
and scaler into values and back. `folder.Folder` keeps whole checkpoints apart from unfinished ones.
`storage` writes and reads files.
`saver.Saver` brings these together: `Session.checkpoint` makes it on every rank, it loads the
newest checkpoint, and the loop asks it after each step whether a checkpoint is due::

    saver = Saver(Schedule(directory, 100, None, 2), contents, rank, samples, gate.outer)
    position = saver.load()
    ...
    if saver.due(step, stepped):
        saver.save(position)
"""
