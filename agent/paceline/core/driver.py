"""What launcher and script agree on where the script is no rank, but starts the ranks: a driver.

Ray Train has one. A launch whose environment sets `VARIABLE` starts the script once,
without the variables of a rank, and never anew: who starts the ranks starts them anew, too. For the
script `VARIABLE` is its process's number, so that its children do not take themselves for it.
"""

VARIABLE = "PACELINE_DRIVER"
RESTARTS = "PACELINE_MAX_RESTARTS"  # how often the driver may start the ranks anew
