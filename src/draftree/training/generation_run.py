"""What the commands share that generate texts in the processes of a training run."""

from dataclasses import dataclass, field

from draftree.data.decontamination import Excluded
from draftree.evaluation.trace_store import target_hashes
from draftree.target.target import Target
from draftree.training.answer_source import Author, Local
from draftree.training.distributed import Processes
from draftree.utils.progress_callback import Tell, ignore_progress


@dataclass(frozen=True)
class GenerationRun:
    """The processes of a run in which texts are generated.

    Attributes:
        processes: processes of the run.
        tell: called with the number of texts that this process has finished.
        author: object that generates the texts; by default the local target.
        excluded: prompts that must not be generated or answered.
    """

    processes: Processes
    tell: Tell = ignore_progress
    author: Author | None = None
    excluded: Excluded = field(default_factory=Excluded)

    def author_for(self, target: Target, rows: int) -> Author:
        """Return the object that generates the texts.

        Args:
            target: the local target.
            rows: number of texts that the local target generates at the same time.
        """
        return self.author or Local(target, rows)


def hash_model(target: Target) -> dict[str, str]:
    """Return hashes of a target's weights and of its tokenizer with the chat template."""
    return {k: v for k, v in target_hashes(target).items() if k != "dtype"}
