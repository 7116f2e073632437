"""REST: files that users export from Paceline to share, such as a report and a trace."""
