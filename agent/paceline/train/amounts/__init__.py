"""How much a step holds: sizes, a budget of tokens, memory, and packed sequences."""
