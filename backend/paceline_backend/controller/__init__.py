"""One controller per active run: plans segments under a lease."""
