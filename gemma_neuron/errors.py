"""Every failure a user can meet, with its exit code and one hint line.

    GemmaNeuronError
      UsageError 2              SettingsError, PortMismatchError
      CheckpointError 3         SourceNotFoundError, ConfigError, UnknownModelError, AuditFailed,
                                TokenizerError, TemplateError, SourceChangedError
      PlanError 4               IndivisibleError, DoesNotFitError
      IntegrityError 5          PortIncompleteError
      CompileError 6            CompilerFaultError
      ValidationFailed 7        UnvalidatedPortError
      EnvironmentProblem 8      BackendUnavailableError, CompilerMissingError, ReferenceUnavailableError,
                                AccessError, NetworkError, DiskFullError, MirrorInUseError, CloudSetupError
      NoCapacityError 9
      QuotaError 10
      Interrupted 75            work is left; the same command goes on
        OwnerLostError, NotMirroredError
        Cancelled 130

A message says what was tried, what was found and what was needed, with names and numbers; the hint
is one line with the command or flag to try. Our own mistakes are asserts and show a traceback (exit 1).
"""

from __future__ import annotations


class GemmaNeuronError(Exception):
    """Base of every error a user can cause or meet; `exit_code` is the process's exit status."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Cross from a worker to its controller whole, whatever a subclass's own constructor takes."""
        return _restored, (type(self), self.args, dict(self.__dict__))

    def to_json(self) -> dict[str, object]:
        """The `error` object of `--json` (design contract): type, message, hint, exit_code."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "hint": self.hint,
            "exit_code": self.exit_code,
        }


def _restored(
    kind: type[GemmaNeuronError], args: tuple[object, ...], state: dict[str, object]
) -> GemmaNeuronError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(GemmaNeuronError):
    """A flag, a setting or an argument that cannot be."""

    exit_code = 2


class SettingsError(UsageError):
    """A value in a settings file or environment variable that cannot be."""


class PortMismatchError(UsageError):
    """`--out` names a folder that holds something else."""


class CheckpointError(GemmaNeuronError):
    """The source folder cannot be ported."""

    exit_code = 3


class SourceNotFoundError(CheckpointError):
    """The source is not there, or is not a checkpoint folder."""


class ConfigError(CheckpointError):
    """`config.json` is missing, unreadable or contradicts itself."""


class UnknownModelError(CheckpointError):
    """`model_type` is none this toolkit ports."""


class AuditFailed(CheckpointError):
    """The audit has at least one finding of severity error."""


class TokenizerError(CheckpointError):
    """The tokenizer is missing or unreadable."""


class TemplateError(CheckpointError):
    """The chat template is missing, unsafe, or refused the conversation."""


class TemplateLateError(TemplateError):
    """The chat template was not rendered in time, and had not used up its own: the machine is busy."""


class SourceChangedError(CheckpointError):
    """A weights file is no longer what it was when the run began."""


class PlanError(GemmaNeuronError):
    """The model cannot be laid out as asked."""

    exit_code = 4


class IndivisibleError(PlanError):
    """Heads, widths or the vocabulary do not divide by the tensor parallel degree."""


class DoesNotFitError(PlanError):
    """Bytes or positions exceed what there is."""


class IntegrityError(GemmaNeuronError):
    """An artefact's bytes are not what its manifest says."""

    exit_code = 5


class PortIncompleteError(IntegrityError):
    """The folder is no port, or a stage it needs has not been committed."""


class CompileError(GemmaNeuronError):
    """The compiler failed on a unit."""

    exit_code = 6


class CompilerFaultError(CompileError):
    """The compiler ended without a word against the graph (killed, crashed, stalled): another try may succeed.

    `signature`: what makes two such ends the same. `of_memory`: it says that the host's memory was the reason.
    """

    def __init__(
        self, message: str, hint: str = "", *, signature: str, of_memory: bool = False
    ) -> None:
        super().__init__(message, hint)
        self.signature = signature
        self.of_memory = of_memory


class ValidationFailed(GemmaNeuronError):
    """The verdict is not `works`."""

    exit_code = 7


class UnvalidatedPortError(ValidationFailed):
    """`serve-local` and its kin were asked for a port without the verdict `works`."""


class EnvironmentProblem(GemmaNeuronError):
    """This machine lacks something: back end, compiler, SDK, credentials."""

    exit_code = 8


class BackendUnavailableError(EnvironmentProblem):
    """The named back end cannot be used here."""


class CompilerMissingError(EnvironmentProblem):
    """No working C++ compiler."""


class ReferenceUnavailableError(EnvironmentProblem):
    """Neither a golden nor the checkpoint is at hand."""


class AccessError(EnvironmentProblem):
    """A hub or bucket does not let this user in: gated, private, no token, no credentials, no right."""


class NetworkError(EnvironmentProblem):
    """A hub or bucket could not be reached, or kept failing, within the bounds of retrying."""


class DiskFullError(EnvironmentProblem):
    """What is to be written does not fit on the disk."""


class MirrorInUseError(EnvironmentProblem):
    """Another machine mirrors to this prefix, or may be doing so."""


class CloudSetupError(EnvironmentProblem):
    """The account lacks something a box needs: a subnet, an instance profile, an image; or EC2 refuses the request."""


class NoCapacityError(GemmaNeuronError):
    """No instance of the asked types could be had, within the time or the price."""

    exit_code = 9


class QuotaError(GemmaNeuronError):
    """The account's quota does not allow the instance."""

    exit_code = 10


class Interrupted(GemmaNeuronError):
    """Stopped with work left; what is committed stays and the same command goes on."""

    exit_code = 75


class Cancelled(Interrupted):
    """Stopped by Ctrl-C."""

    exit_code = 130


class OwnerLostError(Interrupted):
    """Another machine took the mirror over: nothing more is written there."""


class NotMirroredError(Interrupted):
    """The work is done here, and part of it could not be mirrored."""
