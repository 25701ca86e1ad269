"""Words of the command line in, exit codes out: one file for the commands of a kind. They import late."""
