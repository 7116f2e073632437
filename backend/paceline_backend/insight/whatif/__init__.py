"""What each preset would have taken, from what a run measured."""
