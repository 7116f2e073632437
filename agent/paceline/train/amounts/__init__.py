"""How much a step holds: the sizes of samples, a budget of tokens, and packed sequences."""
