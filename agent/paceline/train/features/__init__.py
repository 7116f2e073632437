"""Parts of the training loop, made where they are needed: subclasses of `train.feature.Feature`.

Each entry names the condition under which the feature is made, and its purpose:

- `lost_ranks`: several ranks; notices ranks that are lost or out of step, and names them;
- `memory`: a token budget; limits that ranks learn when their memory runs out;
- `gathers`: several ranks; refuses gathers of tensors whose shapes differ between ranks;
- `uneven`: ranks with different numbers of iterations: shared batches, and micro-batches;
- `checkpoints`: a declared checkpoint; saves the training position with the script's objects;
- `signals`: a declared checkpoint; saves before a signal ends the process;
- `reform`: a launcher that changes nodes; ends the ranks so that they restart on other nodes;
- `shapes`: several ranks, without a grid of samples; warns of costly changes of shapes.

`train.nodedata.NodeData` and `train.streams.reader.StreamReader` are features, too. `choice` makes
the features of a session, and has the order in which the loop calls them.
"""
