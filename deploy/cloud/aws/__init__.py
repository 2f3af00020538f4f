"""`tercet deploy`: Tercet in an AWS account, with boto3 and CloudFormation."""
