"""Optional features of the training loop: subclasses of `paceline.train.feature.Feature`.

- `lockstep`: several ranks; detects ranks whose reductions no longer match;
- `memory`: a token budget; limits that ranks learn when their memory runs out;
- `gathers`: several ranks; refuses gathers of tensors whose shapes differ between ranks;
- `uneven`: ranks with different numbers of iterations: shared batches, and micro-batches;
- `checkpoints`: a declared checkpoint; saves the training position with the script's objects;
- `signals`: a declared checkpoint; saves before a signal ends the process;
- `reform`: a launcher that changes nodes; ends the ranks so that they restart on other nodes;
- `shapes`: several ranks, without a grid of samples; warns of costly changes of shapes.

`nodedata.node.NodeData` and `streams.reader.StreamReader` are features, too. `choice` makes the
features of a session and defines the order in which the loop calls them.
"""
