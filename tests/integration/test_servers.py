"""The test servers are real."""

import redis
import sqlalchemy as sa


def test_bus_is_a_real_server(bus_url: str) -> None:
    with redis.Redis.from_url(bus_url) as client:
        client.xadd("s", {"a": "1"})
        assert client.xlen("s") == 1


def test_database_is_real(database_url: str) -> None:
    engine = sa.create_engine(database_url)
    with engine.connect() as connection:
        assert connection.execute(sa.text("select 1")).scalar() == 1
    engine.dispose()
