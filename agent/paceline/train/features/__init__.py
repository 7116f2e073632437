"""Parts of the training loop, made where they are needed: subclasses of `train.feature.Feature`.

Each entry names the condition under which the feature is made, and its purpose:

- `lost_ranks`: several ranks; detects ranks that are lost or out of step, and names them;
- `memory`: a token budget; applies limits that ranks learn when their memory runs out;
- `gathers`: several ranks; refuses gathers of tensors whose shapes differ between ranks;
- `uneven`: shared batches or micro-batches; handles different numbers of iterations on ranks;
- `checkpoints`: a declared checkpoint; saves the training position with the script's objects;
- `signals`: a declared checkpoint; saves before a signal ends the process;
- `reform`: a launcher that changes nodes; ends the ranks so that they restart on other nodes;
- `shapes`: several ranks, without ``Session(shapes=…)``; warns of costly changes of batch shapes.

`train.nodedata.NodeData` and `train.streams.reader.StreamReader` are features, too. `choice` makes
the features of a session, and defines the order in which the loop calls them.
"""
