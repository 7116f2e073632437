"""A run live: server-sent events that say when there is something new.

All streams of a process share one `Reader` of the bus. An event is `{type, step, revision}`: the
earliest step that is new, if any, and the run's revision. What is new, the client asks of
`GET view?since=` (`view`). `clients` bounds how many streams a client may have, and `rights` ends
the streams of tokens that are revoked or have expired.

    follower = reader.join(run)
    event = follower.take()
"""
