"""Flags of a role whose model a Hugging Face folder describes."""

from megarl.errors import UsageError
from megarl.mcore.config import megatron_flags
from megarl.mcore.config.supported_flags import ARCHITECTURE


def with_folder(role: str, described: list[str], folder: str, tokens: list[str]) -> list[str]:
    """A role's Megatron tokens after those that describe its folder's model.

    Args:
        described: tokens of the folder's config.json.
        folder: flag and path, for messages.

    Raises:
        UsageError: a flag of the user contradicts the folder.
    """
    of_folder, given = megatron_flags.parse_tokens(role, described), megatron_flags.parse_tokens(role, tokens)
    for option in (token.split("=", 1)[0] for token in tokens):
        dest = megatron_flags.destinations().get(option)
        if dest in ARCHITECTURE and getattr(given, dest) != getattr(of_folder, dest):
            raise UsageError(
                f"{role}: {option} {getattr(given, dest)}: config.json of {folder} describes "
                f"{getattr(of_folder, dest)}; leave the flag out"
            )
    return described + tokens


def with_source(error: UsageError, described: list[str], folder: str) -> UsageError:
    """An error about a role's flags that says which of them a folder gave. `described`, `folder`: as above."""
    words = str(error).replace(":", " ").replace(",", " ").split()
    named = [token for token in dict.fromkeys(described) if token.startswith("--") and token in words]
    return UsageError(f"{error} ({', '.join(named)}: from config.json of {folder})") if named else error
