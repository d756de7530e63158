"""Which kinds of steps a worker runs, told from its role."""

from __future__ import annotations

from enum import StrEnum

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError


class Phase(StrEnum):
    """The two kinds of steps; a worker that only decodes has no use for prefill shapes."""

    DECODE = "decode"
    PREFILL = "prefill"


_BOTH = (Phase.DECODE, Phase.PREFILL)
_OF_ROLE = {"kv_producer": (Phase.PREFILL,), "kv_consumer": (Phase.DECODE,), "kv_both": _BOTH}
_OF_OPTION = {"decode": (Phase.DECODE,), "prefill": (Phase.PREFILL,), "both": _BOTH}


def served_phases(config: BuildConfig, *, prefill_programs: bool) -> tuple[Phase, ...]:
    """The phases a worker has programs for: those of `toolchain.phases`, else of its role in KV transfer
    (`kv_transfer_config.kv_role`), else both.

    An engine without `prefill_programs` of its own decodes, whatever the role. Raises `ConfigError` where
    `toolchain.phases` asks it for prefill.
    """
    chosen = config.toolchain.phases
    if not prefill_programs:
        if chosen not in (None, "decode"):
            raise ConfigError(
                f"toolchain.phases is {chosen}, and toolchain {config.toolchain.name} builds decode programs "
                "only; allowed: decode",
                field="toolchain.phases",
                value=chosen,
                hint="leave toolchain.phases out",
            )
        return (Phase.DECODE,)
    return _told(config)


def leaves_prefill_to_others(config: BuildConfig) -> bool:
    """Whether a worker only decodes because it was told to, by its role or by `toolchain.phases`."""
    return _told(config) == (Phase.DECODE,)


def _told(config: BuildConfig) -> tuple[Phase, ...]:
    if config.toolchain.phases is not None:
        return _OF_OPTION[config.toolchain.phases]
    role = (config.serve.kv_transfer_config or {}).get("kv_role")
    return _OF_ROLE.get(str(role), _BOTH)
