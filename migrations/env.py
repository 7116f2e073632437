"""Run migrations in the transaction of the connection from `store.migrate`, which commits."""

from alembic import context

from paceline_backend.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # True for SQLite, too: the store itself executes BEGIN, so DDL is part of the transaction.
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
