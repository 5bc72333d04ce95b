"""From files to token ids: formats.py reads records, encode.py makes ids and batches, stream.py orders the rows."""
