"""Names and arguments in a run file in; the objects that they mean out."""
