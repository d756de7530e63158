"""A host with a Neuron device: a mount namespace whose /dev has the nodes that there are in a folder."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

_NAMESPACES = (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount"))
_ENTER = """
set -e
before=$1; nodes=$2; shift 2
mount --rbind /dev "$before"
mount -t tmpfs -o mode=755 none /dev
for name in null zero full random urandom tty; do
    if [ -e "$before/$name" ]; then touch "/dev/$name"; mount --bind "$before/$name" "/dev/$name"; fi
done
for name in shm pts; do mkdir "/dev/$name"; mount --rbind "$before/$name" "/dev/$name"; done
ln -s pts/ptmx /dev/ptmx
ln -s /proc/self/fd /dev/fd
for number in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${number%:*}" "/dev/${number#*:}"; done
for node in "$nodes"/*; do
    name=/dev/${node##*/}; touch "$name"; mount --bind "$node" "$name"
done
exec "$@"
"""


class DeviceHost:
    """Programs that are started with `prefix` before their words see the devices of `folder`, and nothing
    else does. Skips the test where namespaces cannot be had."""

    def __init__(self, folder: Path) -> None:
        self.nodes, before = folder / "nodes", folder / "before"
        for place in (self.nodes, before):
            place.mkdir(parents=True)
        self.prefix = (*_namespace(), "sh", "-c", _ENTER, "sh", str(before), str(self.nodes))

    def add(self, name: str, *, chip: str = "trn2", cores: int = 4) -> Path:
        node = self.nodes / name
        node.write_text(json.dumps({"chip": chip, "cores": cores}))
        return node


@cache
def _namespace() -> tuple[str, ...]:
    for words in _NAMESPACES[os.getuid() != 0 :]:
        tried = [*words, "mount", "-t", "tmpfs", "none", "/mnt"]
        if subprocess.run(tried, capture_output=True, check=False).returncode == 0:
            return words
    pytest.skip("needs mount namespaces: a device is put into the /dev of one")
