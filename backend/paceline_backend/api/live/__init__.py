"""A run live: server-sent events.

All streams of a process share one `Reader` of the bus. It keeps a `Channel` for each run that
somebody follows; a channel makes each event once, for all that follow the run. `Feed` is one
client's stream: it catches up from the client's position, then passes on what the channel brings.
What a slow client does not take is bounded (`Follower`): beyond that the client is told to start
anew with a snapshot. `clients` bounds how many streams a client may have.

    channel = await reader.follow(run, world, ended, follower)
"""
