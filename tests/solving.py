"""What comes of jobs, for tests that look at the uploads alone."""

from collections.abc import Sequence

from torch import Tensor

from polytempo.training import Job, Solver


def upload_of(solver: Solver, job: Job) -> Tensor:
    return solver.carry_out([job])[0].upload


def uploads_of(solver: Solver, jobs: Sequence[Job]) -> list[Tensor]:
    """Of jobs that are done together."""
    return [outcome.upload for outcome in solver.carry_out(jobs)]
