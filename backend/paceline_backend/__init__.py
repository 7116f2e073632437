"""The control plane: store, ingest, controllers, REST."""
