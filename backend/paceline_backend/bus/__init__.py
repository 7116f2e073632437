"""The Redis-protocol bus: embedded server, consumer, publisher."""
