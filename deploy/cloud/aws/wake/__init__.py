"""The AWS Lambda function in front of an EC2 instance that runs only while there are jobs.

It stores each request as a job in Tercet's DynamoDB table and starts the instance; a gateway on the instance leases the
job and stores the result, which the function returns by id. A request is stored before anything else happens, so it
survives an instance that does not start. `deploy.cloud.aws.wake_archive` packs it with what of the gateway it imports.
"""
