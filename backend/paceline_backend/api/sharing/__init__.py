"""REST: what people take out of Paceline to show others, such as a report and a trace."""
