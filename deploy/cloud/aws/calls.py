"""Calls of AWS through boto3, each of whose errors becomes one sentence that says what to do.

Knows no service's resources. boto3 is imported when the first call is made.
"""

from __future__ import annotations

from typing import Any

from shared.errors import StartError
from shared.extras import install_command

# botocore waits 1, 2, 4, … s (at most 20 s) between attempts, with jitter, after throttling, 5xx and lost connections.
MAX_ATTEMPTS = 6
CONNECT_TIMEOUT_S = 10.0
# SageMaker gives an endpoint's container 60 s for an answer.
READ_TIMEOUT_S = 70.0

_NOT_FOUND = frozenset(
    {
        "NoSuchEntity",
        "ObjectNotFoundException",
        "RepositoryNotFoundException",
        "ResourceNotFound",
        "ResourceNotFoundException",
    }
)
_EXISTS = frozenset({"EntityAlreadyExists", "RepositoryAlreadyExistsException", "ResourceInUse"})
_VALIDATION = frozenset({"ValidationException", "ValidationError"})
_ADVICE = {
    "AccessDenied": "Allow it with the policy in docs/AWS.md.",
    "AccessDeniedException": "Allow it with the policy in docs/AWS.md.",
    "ExpiredToken": "The credentials have expired: log in again, for example with `aws sso login`.",
    "ExpiredTokenException": "The credentials have expired: log in again, for example with `aws sso login`.",
    "InvalidClientTokenId": "AWS does not know these credentials: check them with `aws sts get-caller-identity`.",
    "UnrecognizedClientException": "AWS does not know these credentials: check them with "
    "`aws sts get-caller-identity`.",
    "ResourceLimitExceeded": "Raise the quota in the AWS console (Service Quotas, Amazon SageMaker), or choose another "
    "--instance-type.",
    "Throttling": "AWS refuses that many calls: run the command again in some minutes.",
    "ThrottlingException": "AWS refuses that many calls: run the command again in some minutes.",
}


class AwsError(StartError):
    """AWS refused a call. `code` is AWS's name of the error, `detail` its text."""

    def __init__(self, operation: str, code: str, detail: str) -> None:
        self.code = code
        self.detail = detail
        sentence = f"{operation}: {code}: {' '.join(detail.split())}"
        advice = _ADVICE.get(code)
        super().__init__(f"{sentence.rstrip('.')}. {advice}" if advice else sentence)

    @property
    def is_not_found(self) -> bool:
        return self.code in _NOT_FOUND or (self.code in _VALIDATION and "could not find" in self.detail.lower())

    @property
    def is_name_taken(self) -> bool:
        return self.code in _EXISTS or (self.code in _VALIDATION and "already exist" in self.detail.lower())


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
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise StartError(f"This needs boto3: {install_command('aws')}") from error
        try:
            self._session = boto3.Session(region_name=region, profile_name=profile)
        except BotoCoreError as error:
            raise StartError(f"{error}. Name a section of ~/.aws/config with --profile.") from error
        if self._session.region_name is None:
            raise StartError("No AWS region is set: give one with --region, for example --region eu-central-1.")
        self.region: str = self._session.region_name
        self._config = Config(
            retries={"total_max_attempts": MAX_ATTEMPTS, "mode": "standard"},
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
        )
        self._clients: dict[str, Any] = {}

    def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """A call's answer. The names are boto3's: "sagemaker", "create_endpoint".

        Raises:
            AwsError: AWS refuses it.
            StartError: there are no credentials, or AWS cannot be reached.
        """
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            NoCredentialsError,
            PartialCredentialsError,
        )

        try:
            if service not in self._clients:
                self._clients[service] = self._session.client(service, config=self._config)
            answer: dict[str, Any] = getattr(self._clients[service], operation)(**parameters)
        except ClientError as error:
            found = error.response.get("Error", {})
            raise AwsError(operation, found.get("Code", "unknown error"), found.get("Message", "")) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise StartError(
                f"{error}: log in with `aws configure` or `aws sso login`, or name a profile with --profile."
            ) from error
        except BotoCoreError as error:
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

    def all(self, service: str, operation: str, member: str, **parameters: Any) -> list[dict[str, Any]]:
        """The items of every page of a list.

        Raises:
            StartError: as `call`.
        """
        items: list[dict[str, Any]] = []
        token: dict[str, Any] = {}
        while True:
            page = self.call(service, operation, **parameters, **token)
            items += page.get(member, [])
            if not page.get("NextToken"):
                return items
            token = {"NextToken": page["NextToken"]}
