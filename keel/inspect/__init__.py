"""`keel inspect`: survey.py counts what is in files, tokens.py shows rows as the trainer sees them; others tell it."""
