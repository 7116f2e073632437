"""What a thief of a run's credentials tries on the bus."""

from __future__ import annotations

# What the thief tries. T, C, L: streams of telemetry, control and live, of its own run or (2) of
# another's; N: the node's commands; M: what the node reports; A: an answer of the node.
TRIES = """
KEYS * | SCAN 0 | RANDOMKEY | DBSIZE | INFO | TYPE T2 | EXISTS T2 | OBJECT ENCODING T2 | DUMP T2
XREAD STREAMS T2 0 | XRANGE T2 - + | XREVRANGE C2 + - | XLEN T2 | XREAD STREAMS C2 0
XREAD STREAMS L 0 | XREAD STREAMS L2 0 | XREAD STREAMS N 0 | XREVRANGE N + - | XREAD STREAMS M 0
XRANGE T - + | XREAD STREAMS T 0 | XREVRANGE T + - | XINFO STREAM T | XINFO GROUPS T
XADD T2 * v 1 | XADD C2 * v 1 | XADD C * v 1 | XADD L * v 1 | XADD L2 * v 1 | XADD N * v 1
XADD M * v 1 | XADD paceline:telemetry * v 1 | XADD paceline:rejected * v 1
XRANGE paceline:rejected - +
XADD paceline:probe * v 1 | SET paceline:probe x | XADD paceline:off * v 1 | SET paceline:off x
SADD paceline:off x | HSET paceline:off a b | GET paceline:off | SET x y | GET x | APPEND x y
XTRIM T MAXLEN 0 | XTRIM T2 MAXLEN 0 | XDEL T 1-1 | DEL T | UNLINK T2 | XSETID T 99-1
RENAME T T2 | RENAMENX T x | COPY T x | MOVE T 1 | SELECT 1 | SWAPDB 0 1 | EXPIRE T2 1 | PERSIST T
XGROUP CREATE T thief 0 | XGROUP DESTROY T ingest | XGROUP SETID T2 ingest 0 | XACK T ingest 1-1
XREADGROUP GROUP ingest me STREAMS T2 > | XCLAIM T2 ingest me 0 1-1 | XPENDING T2 ingest
XAUTOCLAIM T2 ingest me 0 0 | CONFIG GET * | CONFIG SET dir /tmp | CONFIG SET requirepass x
CONFIG REWRITE | CONFIG RESETSTAT | ACL LIST | ACL USERS | ACL GETUSER default | ACL LOG
ACL SETUSER default on nopass | ACL SETUSER U +@all ~* | ACL DELUSER V | ACL GENPASS | ACL SAVE
EVAL return(1) 0 | EVALSHA aa 0 | EVAL_RO return(1) 0 | SCRIPT FLUSH | SCRIPT LOAD return(1)
FUNCTION LIST | FUNCTION FLUSH | FCALL f 0 | DEBUG SLEEP 1 | DEBUG OBJECT T2 | CLIENT LIST
CLIENT KILL TYPE normal | CLIENT PAUSE 1000 | CLIENT TRACKING ON BCAST | CLIENT UNBLOCK 1
SUBSCRIBE x | PSUBSCRIBE * | PUBLISH x y | SPUBLISH x y | SSUBSCRIBE x | MONITOR | PUBSUB CHANNELS
MIGRATE 127.0.0.1 1 T 0 9 | RESTORE x 0 y | SORT T2 | MEMORY USAGE T2 | LATENCY LATEST | SLOWLOG GET
FLUSHALL | FLUSHDB | SHUTDOWN NOSAVE | SAVE | BGSAVE | BGREWRITEAOF | REPLICAOF 127.0.0.1 1
MODULE LIST | MODULE LOAD /tmp/x.so | CLUSTER INFO | SYNC | PSYNC ? -1 | FAILOVER | ROLE | WAIT 1 1
XADD A * v 1 | XADD A NOMKSTREAM * v 1 | XREAD STREAMS A 0 | XLEN A | DEL A | EXPIRE A 9
MULTI | WATCH T2 | EXEC | LOLWUT | KEYSPACE x | BLPOP x 0 | BLMOVE T x LEFT LEFT 0 | OBJECT HELP
"""
CASES = [tried.strip() for line in TRIES.strip().splitlines() for tried in line.split("|")]
