"""Why a request has no completion, as one error. Pure; knows no dialect."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.generation.request import BranchFailure
from gateway.generation.selection import REJECTION_DETAILS
from shared.errors import DeadlineExceeded, InvalidRequest, NoCompletion, PromptTooLong, TercetError


def are_rejections(failures: Sequence[BranchFailure]) -> bool:
    """Whether every branch had a completion, and all were rejected."""
    return all(failure.code in REJECTION_DETAILS for failure in failures)


def no_completion_error(failures: Sequence[BranchFailure], *, faster: str) -> TercetError:
    """The error of a request whose branches failed, or whose completions were rejected.

    Args:
        failures: the failures, at least one.
        faster: what to change so that a completion is ready in time, with the names of the dialect's fields.
    """
    codes = {failure.code for failure in failures}
    for refusal in (PromptTooLong, InvalidRequest):
        if codes == {refusal.code}:
            return refusal(failures[0].detail)  # the same for all: the worker refuses what its model cannot compute
    if codes == {DeadlineExceeded.code}:
        return DeadlineExceeded(f"No completion was ready in time; {faster}.")
    reasons = " ".join(sorted({f"{failure.code}: {failure.detail}" for failure in failures}))
    if are_rejections(failures):
        return NoCompletion(
            f"No completion was worth showing. {reasons} Try another seed, a higher temperature, or more context.",
        )
    return NoCompletion(f"Generation failed. {reasons} Try again.")
