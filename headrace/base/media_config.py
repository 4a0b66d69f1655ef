"""`MediaConfig`: where images, audio and video of requests may come from, and how large they may be.

Refuses: what a model takes (its family says so), and the budget of its encoder.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from headrace.base.errors import ConfigError
from headrace.base.option import Section, option, read_object, split_list

KINDS = ("image", "video", "audio")
"""Kinds of media."""
DEFAULT_LIMITS = {"image": 64, "video": 4, "audio": 16}
"""Items of each kind in one prompt, unless ``limit_mm_per_prompt`` says otherwise."""
MOST_ITEMS = 1024
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class MediaHosts:
    """Hosts that media may be fetched from. ``names``: lower case; one that begins with a dot stands for all names
    below it. ``networks`` are allowed although their addresses may be private. Neither: every public host."""

    names: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    is_closed: bool = False

    @property
    def is_open(self) -> bool:
        """Whether names are not restricted."""
        return not (self.names or self.networks or self.is_closed)

    def has_name(self, host: str) -> bool:
        """Whether the list names a host (lower case)."""
        return any(host.endswith(name) if name.startswith(".") else host == name for name in self.names)

    @classmethod
    def parse(cls, text: str) -> MediaHosts:
        """The hosts of ``allowed_media_domains``; raises `ConfigError`."""
        entries = split_list(text.lower())
        if entries == ["none"]:
            return cls(is_closed=True)
        names, networks = [], []
        for entry in entries:
            network = _read_network(entry)
            if network is not None:
                networks.append(network)
                continue
            if not _NAME.fullmatch(entry):
                raise ConfigError(
                    f"allowed_media_domains takes host names (*.example.org with all below), addresses and networks, "
                    f"separated by commas, or none; got {entry!r}", param="allowed_media_domains"
                )
            names.append(entry.removeprefix("*"))
        return cls(tuple(names), tuple(networks))


def _read_network(text: str) -> Network | None:
    """An address (a network of one) or a network; None for anything else, such as a name."""
    try:
        return ipaddress.ip_network(text.strip("[]"), strict=False)
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class MediaConfig(Section):
    """Images, audio and video in requests, for models that take them."""

    limit_mm_per_prompt: str | None = option(
        None,
        'most items of each kind in one prompt, such as {"image": 4, "video": 0}; default: 64 images, 4 videos and 16 '
        "audio clips",
        metavar="JSON"
    )
    allowed_media_domains: str = option(
        "",
        "comma-separated hosts that media are fetched from: names (*.example.org with all below it), and addresses or "
        "networks, which may then be private; default: every public host; none: only data inside requests",
        metavar="HOSTS"
    )
    allowed_local_media_path: str | None = option(
        None, "folder whose files requests may name as file:// addresses; default: no files", metavar="FOLDER"
    )
    media_max_mib: int = option(64, "maximum size of one item as it is sent or fetched, in MiB", low=1, high=1024)
    media_max_megapixels: int = option(
        64, "maximum size of an image, in millions of pixels", low=1, high=1024
    )
    media_timeout_s: float = option(
        20.0, "seconds after which fetching an item ends, and after which preparing it ends", low=0.1, high=3600
    )
    media_workers: int | None = option(
        None, "processes that decode and prepare media; default: half the cores, 4 at most", low=1, high=256
    )
    media_cache_mib: int = option(
        256, "memory for prepared media that are sent again, in MiB; 0: none", low=0, high=2**20
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        MediaHosts.parse(self.allowed_media_domains)
        self._read_limits()

    @property
    def hosts(self) -> MediaHosts:
        """What ``allowed_media_domains`` allows."""
        return MediaHosts.parse(self.allowed_media_domains)

    @property
    def max_bytes(self) -> int:
        """The size limit of an item."""
        return self.media_max_mib << 20

    @property
    def max_pixels(self) -> int:
        """The size limit of a decoded image."""
        return self.media_max_megapixels * 1_000_000

    def limit(self, kind: str) -> int:
        """Items of a kind that a prompt may hold."""
        return self._read_limits().get(kind, DEFAULT_LIMITS[kind])

    def _read_limits(self) -> dict[str, int]:
        name = "limit_mm_per_prompt"
        stated = read_object(self.limit_mm_per_prompt or "{}", name, example='{"image": 4}')
        for kind, value in stated.items():
            if kind not in KINDS:
                raise ConfigError(f"{name} knows {', '.join(KINDS)}; got {kind!r}", param=name)
            if type(value) is not int or not 0 <= value <= MOST_ITEMS:
                raise ConfigError(f"{name}: {kind} must be a number from 0 to {MOST_ITEMS}; got {value!r}", param=name)
        return stated
