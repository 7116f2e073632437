"""Runs migrations in the transaction of the connection that was passed; its owner commits."""

from alembic import context

from paceline_backend.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,  # SQLite too: the store begins its transactions itself
    render_as_batch=True,
)
context.run_migrations()
