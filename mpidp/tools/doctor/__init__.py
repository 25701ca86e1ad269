"""`mpidp doctor`: facts of a machine, an installation and a job, checks of these, and a report."""
