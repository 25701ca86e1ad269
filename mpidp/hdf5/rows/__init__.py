"""Numbers of rows in, their values out."""
