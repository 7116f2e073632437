"""Hellos in parts, in a table of their own; a run's row has the digest of its latest."""

import hashlib

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None

_runs = sa.table(
    "runs", sa.column("key"), sa.column("attempt"), sa.column("hello", sa.LargeBinary())
)
_parts = sa.table(
    "hello_parts",
    sa.column("run"),
    sa.column("attempt"),
    sa.column("hello", sa.LargeBinary()),
    sa.column("number"),
    sa.column("data", sa.LargeBinary()),
)


def upgrade() -> None:
    op.create_table(
        "hello_parts",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("hello", sa.LargeBinary(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_hello_parts_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "attempt", "hello", "number", name="pk_hello_parts"),
    )
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        # Sizes hardly compress, and to try that would take Postgres seconds for a large Hello.
        op.execute("ALTER TABLE hello_parts ALTER COLUMN data SET STORAGE EXTERNAL")
    keys = connection.execute(
        sa.select(_runs.c.key, _runs.c.attempt).where(_runs.c.hello.is_not(None))
    ).all()
    for key, attempt in keys:
        of_run = _runs.c.key == key
        data = connection.execute(sa.select(_runs.c.hello).where(of_run)).scalar_one()
        name = hashlib.blake2b(data, digest_size=16).digest()
        row = {"run": key, "attempt": attempt, "hello": name, "number": 0, "data": data}
        connection.execute(sa.insert(_parts).values(row))
        connection.execute(sa.update(_runs).where(of_run).values(hello=name))


def downgrade() -> None:
    connection = op.get_bind()
    c = _parts.c
    keys = connection.execute(
        sa.select(_runs.c.key, _runs.c.attempt, _runs.c.hello).where(_runs.c.hello.is_not(None))
    ).all()
    for key, attempt, name in keys:
        query = (
            sa.select(c.data)
            .where(c.run == key, c.attempt == attempt, c.hello == name)
            .order_by(c.number)
        )
        data = b"".join(connection.execute(query).scalars())
        connection.execute(sa.update(_runs).where(_runs.c.key == key).values(hello=data))
    op.drop_table("hello_parts")
