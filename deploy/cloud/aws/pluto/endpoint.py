"""GET /endpoint: the address at which the SageMaker endpoint is invoked."""

import os
from typing import Any


def handler(_event: dict[str, Any], _context: object) -> dict[str, Any]:
    region, name, suffix = (os.environ[key] for key in ("AWS_REGION", "ENDPOINT_NAME", "URL_SUFFIX"))
    url = f"https://runtime.sagemaker.{region}.{suffix}/endpoints/{name}/invocations"
    return {"statusCode": 200, "headers": {"content-type": "text/plain"}, "body": url}
