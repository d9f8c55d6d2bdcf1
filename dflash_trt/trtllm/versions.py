"""The TensorRT-LLM versions that deployments are written for."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.errors import DflashError, nearest, one_line


@dataclass(frozen=True, slots=True)
class Version:
    """One release.

    `recomputes_tail` says that its drafter can be fed again after a prefix-cache hit
    (`context_recompute_tail`); without that a hit starves it, so prefixes are not reused.
    """

    name: str
    recomputes_tail: bool

    @property
    def image(self) -> str:
        """NVIDIA's container of this release."""
        return f"nvcr.io/nvidia/tensorrt-llm/release:{self.name}"


VERSIONS = {
    version.name: version
    for version in (
        Version("1.3.0rc27", recomputes_tail=False),
        Version("1.4.0rc1", recomputes_tail=True),
    )
}
DEFAULT_VERSION = "1.4.0rc1"


def find_version(name: str) -> Version:
    """The version called `name`.

    Raises:
        DflashError: its fields are not known here; names the nearest.
    """
    if name not in VERSIONS:
        raise DflashError(
            f"the fields of TensorRT-LLM {one_line(name, 40)!r} are not known"
            f"{nearest(name, list(VERSIONS))}",
            where="--trtllm-version",
            fix=f"choose one of {', '.join(VERSIONS)}",
            usage=True,
        )
    return VERSIONS[name]
