"""What can be wrong with a machine, an installation and a job: facts, checks that read them, a report."""
