"""Calls of AWS through boto3, each of whose errors becomes one sentence that says what to do.

Knows no service's resources. boto3 is imported when the first call is made.
"""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

from shared.errors import StartError
from shared.extras import install_command

# botocore waits 1, 2, 4, … s (at most 20 s) between attempts, with jitter, after throttling, 5xx and lost connections.
MAX_ATTEMPTS = 6
CONNECT_TIMEOUT_S = 10.0
# SageMaker gives an endpoint's container 60 s for an answer.
READ_TIMEOUT_S = 70.0

# SageMaker and CloudFormation have no code of their own for it.
_NOT_FOUND = re.compile(r"ResourceNotFound|Validation.*: .*(could not find|does not exist)", re.IGNORECASE)
# By what AWS's text or code contains. "ServiceLimitExceeded" is CloudFormation's name of "ResourceLimitExceeded".
_QUOTA = "Raise the quota in the AWS console (Service Quotas, Amazon SageMaker), or choose another --instance-type."
_UNKNOWN = "AWS does not know these credentials: check them with `aws sts get-caller-identity`."
_ADVICE = {
    "AccessDenied": "Allow it with the policy in docs/AWS.md.",
    "ExpiredToken": "The credentials have expired: log in again, for example with `aws sso login`.",
    "InvalidClientTokenId": _UNKNOWN,
    "UnrecognizedClientException": _UNKNOWN,
    "ResourceLimitExceeded": _QUOTA,
    "ServiceLimitExceeded": _QUOTA,
    "Throttling": "AWS refuses that many calls: run the command again in some minutes.",
}


def with_advice(reason: str) -> str:
    """One sentence with the reason, and what to do about it if that is known."""
    advice = next((f" {advice}" for code, advice in _ADVICE.items() if code in reason), "")
    return f"{' '.join(reason.split()).rstrip('.')}.{advice}"


class AwsError(StartError):
    """AWS refused a call. `code` is AWS's name of the error, `detail` its text."""

    def __init__(self, operation: str, code: str, detail: str) -> None:
        self.code = code
        self.detail = detail
        super().__init__(with_advice(f"{operation}: {code}: {detail}"))

    @property
    def is_not_found(self) -> bool:
        return _NOT_FOUND.match(f"{self.code}: {self.detail}") is not None


class Account:
    """One AWS account in one region."""

    def __init__(self, region: str | None = None, profile: str | None = None) -> None:
        """
        Args:
            region: None: of the environment or the profile.
            profile: a section of ~/.aws/config; None: the default one.

        Raises:
            StartError: boto3 is missing, there is no such profile, or no region is set.
        """
        try:
            import boto3
            from botocore import exceptions as errors
            from botocore.config import Config
        except ImportError as error:
            raise StartError(f"This needs boto3: {install_command('aws')}") from error
        try:
            session = boto3.Session(region_name=region, profile_name=profile)
        except errors.BotoCoreError as error:
            raise StartError(f"{error}. Name a section of ~/.aws/config with --profile.") from error
        if session.region_name is None:
            raise StartError("No AWS region is set: give one with --region, for example --region eu-central-1.")
        self.region: str = session.region_name
        config = Config(
            retries={"total_max_attempts": MAX_ATTEMPTS, "mode": "standard"},
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
        )
        self._client = cache(partial(session.client, config=config))

    def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """A call's answer. The names are boto3's: "sagemaker", "create_endpoint".

        Raises:
            AwsError: AWS refuses it.
            StartError: there are no credentials, or AWS cannot be reached.
        """
        from botocore import exceptions as errors

        try:
            answer: dict[str, Any] = getattr(self._client(service), operation)(**parameters)
        except errors.ClientError as error:
            found = error.response.get("Error", {})
            raise AwsError(operation, found.get("Code", "unknown error"), found.get("Message", "")) from error
        except (errors.NoCredentialsError, errors.PartialCredentialsError) as error:
            raise StartError(
                f"{error}: log in with `aws configure` or `aws sso login`, or name a profile with --profile."
            ) from error
        except errors.BotoCoreError as error:
            raise StartError(f"{operation}: {' '.join(str(error).split())}") from error
        return answer

    def find(self, service: str, operation: str, **parameters: Any) -> dict[str, Any] | None:
        """A call's answer, or None if what it names does not exist.

        Raises:
            StartError: as `call`.
        """
        try:
            return self.call(service, operation, **parameters)
        except AwsError as error:
            if error.is_not_found:
                return None
            raise
