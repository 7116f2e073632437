"""Protocol between the launcher and a driver.

A driver is a script that starts the ranks itself, such as one that uses Ray Train. If the
environment of a launch has `VARIABLE`, the launcher starts the script once, without the variables
of a rank. The launcher never restarts the script: whatever starts the ranks also restarts them. In
the script's environment, `VARIABLE` is the PID of the script's process, so that its child processes
do not mistake themselves for the driver.
"""

VARIABLE = "PACELINE_DRIVER"
# Environment variable with the number of times that the driver may restart the ranks.
RESTARTS = "PACELINE_MAX_RESTARTS"
