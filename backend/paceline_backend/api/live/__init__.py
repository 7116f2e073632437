"""Live view of a run: server-sent events that report that new data exist.

All streams of a process share one `Reader` of the bus. An event is `{type, step, revision}`: the
earliest new step, if any, and the run's revision. The client then requests the new data with
`GET view?since=` (`view`). `clients` limits the number of streams per client, and `rights` ends the
streams of tokens that are revoked or have expired.

    follower = reader.join(run)
    event = follower.take()
"""
