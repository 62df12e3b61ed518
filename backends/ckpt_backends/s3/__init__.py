"""Amazon S3 and compatible stores, over s3fs, botocore and obstore."""
