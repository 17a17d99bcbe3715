"""S3: the only importer of boto3. A checkpoint under a prefix is read by ranges or downloaded.

In: an s3:// URI. Out: `S3Folder`. Endpoint, region, profile and credentials are boto3's own business.
"""
