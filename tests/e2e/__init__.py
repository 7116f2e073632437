"""The whole product, end to end."""
