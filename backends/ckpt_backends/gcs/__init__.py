"""Google Cloud Storage, over gcsfs."""
