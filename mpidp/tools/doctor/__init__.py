"""The command `mpidp doctor`: facts of a machine, an installation and a job, checks that read them, a report."""
